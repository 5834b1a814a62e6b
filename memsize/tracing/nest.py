"""Tensors inside whatever a model takes or returns: tuples, dicts, dataclasses, model outputs, caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order, each object once.

    Looks into sequences, sets, mappings, and the attributes of any other object that is neither a module nor a class:
    a key-value cache returned by a language model is such an object.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value):
        yield from value
    else:
        yield from _walk(value, set())


def arguments_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that `value` holds directly or in sequences and mappings, but not inside other objects.

    A key-value cache is handed to every layer of a language model: looking into it at each call would take longer the
    more layers there are.
    """
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple, Mapping)):
            yield from arguments_in(item)


def _walk(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in _parts(value):
        yield from _walk(item, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        yield from list(getattr(value, "__dict__", {}).values())


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` rebuilt with `function` applied to each of its tensors; what holds none comes back as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        return _map_mapping(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def _map_mapping(function: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any]) -> Any:
    mapped = {key: map_tensors(function, item) for key, item in value.items()}
    try:
        return type(value)(mapped)  # type: ignore[call-arg]
    except TypeError:
        # A mapping with a constructor of its own: a plain dict answers the same look-ups.
        return mapped
