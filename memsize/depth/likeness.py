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
        """Return the features of one block."""
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


# -- numbers that the code of a model changes as it runs ---------------------------------------------------------------

_COUNTERS: dict[type, Callable[[Any], object]] = {int: int, float: float, list: len, itertools.count: repr}
"""What can count, and how its number is read."""

Numbers = Mapping[Hashable, object]
"""Numbers, and lengths of lists, by where they are."""


def numbers_of(model: nn.Module) -> Numbers:
    """Return the numbers that modules of `model` have, their classes, and the globals and closures of their methods."""
    numbers: dict[Hashable, object] = {}
    of_kinds: dict[type, dict[str, object]] = {}
    for module, path in paths_of(model).items():
        kind = type(module)
        if kind not in of_kinds:
            of_kinds[kind] = {name: number for of in reversed(_own(kind)) for name, number in _numbers(vars(of))}
        # An attribute of the class stands for that of a module until that is set.
        for name, number in (*of_kinds[kind].items(), *_numbers(vars(module))):
            numbers["module", path, name] = number
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
    """Whether a number is another one than it was; one that was none before is no counter."""
    return any(name in after and after[name] != number for name, number in before.items())


def _own(kind: type) -> list[type]:
    return [kind for kind in kind.__mro__ if not kind.__module__.startswith("torch.") and kind is not object]


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in list(values.items()):
        if (kind := type(value)) in _COUNTERS:
            yield name, _COUNTERS[kind](value)
