"""Tensors in what a model takes or returns (tuples, dicts, dataclasses, outputs, caches), and its modules by path."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order, as often as it is there; what holds them is looked into once.

    Looks into sequences, sets, mappings, and the attributes of any other object that is no code: a key-value cache
    returned by a language model is such an object.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is tuple and all(item is None or isinstance(item, torch.Tensor) for item in value):
        yield from (item for item in value if item is not None)
    else:
        yield from _walk(value, set())


def objects_in(value: Any) -> Iterator[Any]:
    """Every object in `value` that is neither a tensor nor plain data, itself first: the containers of its tensors."""
    met: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (torch.Tensor, *_PLAIN)) or id(value) in met:
            continue
        met.add(id(value))
        yield value
        waiting.extend(_parts(value))


def arguments_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that `value` holds in sequences and mappings, not inside other objects such as a large KV cache."""
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple, Mapping)):
            yield from arguments_in(item)


def _walk(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, _PLAIN) and id(value) not in seen:
        seen.add(id(value))
        for item in _parts(value):
            yield from _walk(item, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif not _is_code(value):
        yield from _attributes(value).values()


def _is_code(value: Any) -> bool:
    """Whether `value` is a class, a module, or something to call that is not iterable, and so no data."""
    return isinstance(value, (type, torch.nn.Module)) or (callable(value) and not isinstance(value, Iterable))


def _attributes(value: Any) -> dict[str, Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = (name for own in slots for name in ((own,) if isinstance(own, str) else own))
    present = (name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name))
    return {name: getattr(value, name) for name in present} | getattr(value, "__dict__", {})


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` rebuilt with `function` applied to each of its tensors; what holds none comes back as it is.

    A tensor or an object that is found twice is the same in both places afterwards. Objects are rebuilt where they are
    sequences, sets, mappings or dataclasses, and others as copies with the attributes that changed.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    return _Mapped(function).of(value)


class _Mapped:
    """One pass of `map_tensors`. The memo is keyed by id, so it keeps its objects alive."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function
        self.memo: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in self.memo:
            self.memo[id(value)] = (value, value)  # an object that contains itself is met again before it is rebuilt
            self.memo[id(value)] = (value, self._new(value))
        return self.memo[id(value)][1]

    def _new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.function(value)
        if isinstance(value, PackedSequence):
            return PackedSequence(self.of(value.data), *value[1:])  # the rest are indices, some of them on the CPU
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value)(map(self.of, value))
        if isinstance(value, Mapping) and (isinstance(value, dict) or not _attributes(value)):
            return self._mapping(value)
        if isinstance(value, weakref.ref):
            target = value()
            mapped = self.of(target)
            return value if mapped is target else weakref.ref(mapped)
        return value if _is_code(value) else self._object(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        mapped = {key: self.of(item) for key, item in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, mapped)
        try:
            return type(value)(mapped)  # type: ignore[call-arg]
        except TypeError:
            # A mapping with a constructor of its own: a plain dict answers the same look-ups.
            return mapped

    def _object(self, value: Any) -> Any:
        if next(tensors_in(value), None) is None:
            return value
        rebuilt = copy.copy(value)
        self.memo[id(value)] = (value, rebuilt)  # parts may refer to the whole
        own = getattr(rebuilt, "__dict__", {})
        for name, item in _attributes(value).items():
            mapped = self.of(item)
            if name in own:
                own[name] = mapped  # past any property of that name
            else:
                object.__setattr__(rebuilt, name, mapped)
        return rebuilt


def paths_of(model: nn.Module, without: Iterable[nn.Module] = ()) -> dict[nn.Module, str]:
    """Return each module of `model` with its first path, in the order of ``model.named_modules()``, but for those
    `without` which it is walked and what only they hold.

    PyTorch's own takes two to three times as long: a module comes through a generator per level.
    """
    paths = dict.fromkeys(without, "")
    left_out = tuple(paths)
    _visit(model, "", paths)
    for module in left_out:
        del paths[module]
    return paths


def _visit(module: nn.Module, path: str, paths: dict[nn.Module, str]) -> None:
    # No function inside `paths_of`: one that calls itself is a reference cycle, which would keep the modules alive.
    paths[module] = path
    prefix = f"{path}." if path else ""
    for name, child in module._modules.items():
        if child is not None and child not in paths:
            _visit(child, prefix + name, paths)
