"""Whether modules are alike: of the same classes, with parameters of the same shapes and equal attributes.

Whole numbers may differ from module to module by the same amount each time, as the index of a layer does.
"""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn

from memsize.known_values.values import constant_of
from memsize.torch_internals.pytree import paths_of

_PLAIN: Final = (type(None), bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, Enum, type, range)
_USUAL: Final = frozenset({type(None), bool, str, int})
_HOLDERS: Final = frozenset({dict, OrderedDict, list, tuple})
_MOST_NESTED: Final = 6
_OWN: Final = ("_modules", "_compiled_call_impl")

Key = tuple[str, str]
"""The path of a module inside of a block, and the name of its attribute."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features that like blocks have in common, and the whole numbers of a block, which may count the blocks."""

    common: Hashable
    numbers: Mapping[Key, int]


class Likeness:
    """The features of blocks of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[int, int] = {}
        """How many modules hold a tensor or a module, by its id."""
        for module in paths_of(model):
            for part in (*module._parameters.values(), *module._buffers.values(), *module._modules.values()):
                if part is not None:
                    self._holders[id(part)] = self._holders.get(id(part), 0) + 1
        self._objects: dict[int, tuple[Any, Hashable]] = {}

    def features(self, block: nn.Module) -> Features:
        modules = paths_of(block)
        paths = {id(module): path for module, path in modules.items()}
        numbers: dict[Key, int] = {}
        common: list[Hashable] = []
        for module, path in modules.items():
            for name, value in vars(module).items():
                if name in _OWN:
                    continue
                if type(value) is int:
                    numbers[path, name] = value
                else:
                    common.append((path, name, self._feature(value, paths, 0)))
            children = [(name, self._shared(child)) for name, child in module._modules.items()]
            common.append((path, type(module), tuple(children)))
        return Features(tuple(common), numbers)

    def _shared(self, part: Any) -> Hashable:
        """Return what is to be known of a part that several modules may hold: then which it is."""
        return id(part) if self._holders.get(id(part), 0) > 1 else part is None

    def _feature(self, value: Any, paths: Mapping[int, str], nested: int) -> Hashable:
        kind = type(value)
        if kind in _USUAL or isinstance(value, _PLAIN):
            return kind, value
        if kind in _HOLDERS and not value:  # as most attributes are: hook tables
            return kind, ()
        if kind is nn.Parameter:
            return self._tensor(value)
        if kind is slice:  # which has no hash before Python 3.12
            return kind, value.start, value.stop, value.step
        if kind is float:
            # A rate may differ from block to block, as that of stochastic depth does.
            return kind, value if value in (0.0, 1.0) else "between"
        if isinstance(value, nn.Module):
            return "module", paths.get(id(value), id(value))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if nested > _MOST_NESTED:
            return kind, id(value)
        again = partial(self._feature, paths=paths, nested=nested + 1)
        if isinstance(value, (list, tuple)):
            return kind, tuple(map(again, value))
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(again, value))
        if isinstance(value, Mapping):
            # Hooks are numbered across all modules.
            return kind, tuple((None if type(key) is int else again(key), again(item)) for key, item in value.items())
        return self._callable_or_object(value, paths, again, nested)

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
        of = type(tensor), tensor.dtype, tuple(tensor.shape), strides, tensor.device, tensor.requires_grad
        return of, self._shared(tensor)

    def _callable_or_object(self, value: Any, paths: Mapping[int, str], again: Any, nested: int) -> Hashable:
        kind = type(value)
        if isinstance(value, types.MethodType):
            return kind, again(value.__func__), again(value.__self__)
        if isinstance(value, partial):
            return kind, again(value.func), again(value.args), again(value.keywords)
        if isinstance(value, types.FunctionType):
            cells = tuple(again(cell.cell_contents) for cell in value.__closure__ or () if _is_filled(cell))
            return kind, id(value.__code__), again(value.__defaults__), cells
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)) or not hasattr(value, "__dict__"):
            return kind, id(value)
        if id(value) not in self._objects:
            self._objects[id(value)] = value, (kind, id(value))  # where it holds itself
            parts = again(vars(value))
            self._objects[id(value)] = value, (kind, parts)
        return self._objects[id(value)][1]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def counted(blocks: Sequence[Features], period: int, count: int) -> frozenset[Key] | None:
    """Return the whole numbers that count blocks in `count` periods; None where a number differs otherwise."""
    counting = set()
    for kind in range(period):
        alike = [blocks[kind + period * number].numbers for number in range(count)]
        for key in alike[0]:
            steps = {after[key] - before[key] for before, after in pairwise(alike)}
            if steps == {period}:
                counting.add(key)
            elif steps != {0}:
                return None
    return frozenset(counting)


# -- values that the code of a model changes as it runs ----------------------------------------------------------------

_COUNTERS: dict[type, Callable[[Any], object]] = {int: int, float: float, list: len, itertools.count: repr}
"""What can count, and how its number is read."""
_FLAGS: dict[type, Callable[[Any], object]] = _COUNTERS | {bool: bool, str: str, type(None): lambda _: None}
"""The same for attributes of a module, which may also switch from one way to another."""
_SET_BY_RUNS: Final = (
    *("training", "_compiled_call_impl", "num_batches_tracked"),
    *("_is_fsdp_managed_module", "_fsdp_use_orig_params"),
    "_previous_max_cache_length",
)
"""What each run sets, what a batch norm counts without deciding by it, FSDP's marks of its modules, and the length of
the static cache that transformers' generate has made.
"""

Numbers = Mapping[tuple[Any, ...], object]
"""Numbers, flags and lengths of lists, by where they are."""


def numbers_of(model: nn.Module) -> Numbers:
    """Return the values that the next forward may decide by: the numbers, texts and flags that modules of `model` have,
    those of single-number buffers where they are known, which parameters are trained, and the numbers of the classes,
    globals and closures of their methods.
    """
    numbers: dict[tuple[Any, ...], object] = {}
    of_kinds: dict[type, dict[str, object]] = {}
    for module, path in paths_of(model).items():
        kind = type(module)
        if kind not in of_kinds:
            of_kinds[kind] = {name: number for of in reversed(_own(kind)) for name, number in _numbers(vars(of))}
        # An attribute of the class stands for that of a module until that is set.
        for name, number in (*of_kinds[kind].items(), *_numbers(vars(module), _FLAGS)):
            if name not in _SET_BY_RUNS:
                numbers["module", path, name] = number
        for name, parameter in module._parameters.items():
            if parameter is not None:
                numbers["trained", path, name] = parameter.requires_grad
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() == 1 and name not in _SET_BY_RUNS:
                numbers["buffer", path, name] = None if (value := constant_of(buffer)) is None else value.item()
    for base in {base for kind in of_kinds for base in _own(kind)}:
        seen: set[int] = set()
        for method in [value for value in vars(base).values() if isinstance(value, types.FunctionType)]:
            if id(method.__globals__) not in seen:
                seen.add(id(method.__globals__))
                numbers.update(((base, "globals", name), n) for name, n in _numbers(method.__globals__))
            closure = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
            cells = {name: cell.cell_contents for name, cell in closure if _is_filled(cell)}
            numbers.update(((base, "closure", method.__name__, name), n) for name, n in _numbers(cells))
    return numbers


def is_counting(before: Numbers, after: Numbers) -> bool:
    """Whether a value is another one than it was, or a module has a new one; one that was None before is no counter."""
    if any(name[0] == "module" and name not in before for name in after):
        return True
    return any(number is not None and after.get(name, number) != number for name, number in before.items())


def _own(kind: type) -> list[type]:
    return [kind for kind in kind.__mro__ if not kind.__module__.startswith("torch.") and kind is not object]


def _numbers(
    values: Mapping[str, Any], kinds: Mapping[type, Callable[[Any], object]] = _COUNTERS
) -> Iterator[tuple[str, object]]:
    for name, value in list(values.items()):
        if (kind := type(value)) in kinds:
            yield name, kinds[kind](value)


# -- functions that only a backward calls ------------------------------------------------------------------------------


def behavior_of(function: Any) -> Hashable:
    """Return what a function that a backward calls decides by, apart from the tensors: its code, and the plain values
    that it closes over or that its arguments and its object have. Nothing of it is kept alive.
    """
    if isinstance(function, partial):
        return behavior_of(function.func), plain_values((function.args, *function.keywords.values()))
    if isinstance(function, types.MethodType):
        return behavior_of(function.__func__), plain_values(vars(function.__self__))
    if isinstance(function, types.FunctionType):
        cells = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        return id(function.__code__), tuple(map(_behavior, (*(function.__defaults__ or ()), *cells)))
    return type(function), plain_values(getattr(function, "__dict__", {}))


def _behavior(value: Any) -> Hashable:
    if callable(value) and not isinstance(value, type):
        return behavior_of(value)
    return plain_values(vars(value) if hasattr(value, "__dict__") else value)


def plain_values(value: Any) -> Hashable:
    """Return the plain values in a value, and the types of others."""
    if type(value) is float or type(value) in _USUAL or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Mapping):
        return tuple((str(name), plain_values(item)) for name, item in value.items())
    if type(value) in (list, tuple):
        return tuple(map(plain_values, value))
    return (type(value),)
