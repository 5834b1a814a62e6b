"""Numbers that the code of a model changes as it runs: a block that counts its calls may do something else in one.

A forward that changes none of them is the same for each call with the same inputs.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import nn

from memsize.torch_internals.module_tree import paths_of

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
        numbers.update(((base, *names), number) for names, number in _of_methods(base))
    return numbers


def is_counting(before: Numbers, after: Numbers) -> bool:
    """Whether a number is another one than it was; one that was none before is no counter."""
    return any(name in after and after[name] != number for name, number in before.items())


def _own(kind: type) -> list[type]:
    """Return a class and its bases, apart from PyTorch's."""
    return [kind for kind in kind.__mro__ if not kind.__module__.startswith("torch.") and kind is not object]


def _of_methods(kind: type) -> Iterator[tuple[tuple[str, ...], object]]:
    seen: set[int] = set()
    for method in [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]:
        if id(method.__globals__) not in seen:
            seen.add(id(method.__globals__))
            yield from ((("globals", name), number) for name, number in _numbers(method.__globals__))
        closure = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
        cells = {name: cell.cell_contents for name, cell in closure if _is_filled(cell)}
        yield from ((("closure", method.__name__, name), number) for name, number in _numbers(cells))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in list(values.items()):
        if (kind := type(value)) in _COUNTERS:
            yield name, _COUNTERS[kind](value)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
