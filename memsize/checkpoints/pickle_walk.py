"""A walk through the values of a pickle: its tensors and plain values, each by the keys down to it.

A module that was pickled whole is walked as its ``state_dict()`` names it. Lists and tuples count as keys by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memsize.checkpoints.contents import Mark, PartKind
from memsize.checkpoints.pickle_values import Blob, Composite, Dict, Global, Object, StorageValue, TensorValue
from memsize.checkpoints.source import DEEPEST, LONGEST_KEY, MOST_VALUES_SHOWN, Piece, Source, printable
from memsize.errors import CheckpointError
from memsize.records.byte_ownership import strided_extent
from memsize.records.dtypes import BITS
from memsize.records.trace import TensorSpec

Keys = tuple[str, ...]
Locate = Callable[[StorageValue], int]
"""Gives the index of a storage; raises `CheckpointError` when the file lacks it."""

_OF_MODULE = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold its ``state_dict()``."""
_KINDS: tuple[tuple[PartKind, frozenset[str]], ...] = (
    ("optimizer", frozenset(("state", "param_groups"))),
    ("scheduler", frozenset(("last_epoch", "_step_count"))),
    ("scheduler", frozenset(("last_epoch", "base_lrs"))),
    ("other", frozenset(("scale", "growth_factor"))),
)
"""Dictionaries that are recognised by their entries."""


@dataclass(slots=True)
class PickleContents:
    """The tensors and plain values in the pickles of a file."""

    pieces: list[Piece] = field(default_factory=list)
    values: list[tuple[str, str]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    _last_model: Keys | None = None
    module: str | None = None
    """The class of a module that was pickled whole, if there is one."""

    def mark_module(self, keys: Keys) -> None:
        """Mark a module, whole or its state dict, as a model; a module within another belongs to that one."""
        # Children are walked before what follows their parent: only the last model can hold this one.
        if self._last_model is None or keys[: len(self._last_model)] != self._last_model:
            self.marks.append(Mark(keys, "model"))
            self._last_model = keys


class _Step(NamedTuple):
    keys: Keys
    value: Any
    wrapper: str | None = None
    trainable: bool | None = None


def walk(root: Any, locate: Locate, source: Source, contents: PickleContents) -> None:
    """Add the tensors and values in `root` to `contents`. Raises `CheckpointError` for too deep or endless nesting."""
    budget = source.budget
    open_now: set[int] = set()
    barren: set[int] = set()
    """Containers that were walked and have no tensor: they are not walked again."""
    levels: list[tuple[Iterator[_Step], int, int]] = [(iter([_Step((), root)]), 0, 0)]
    while levels:
        steps, container, before = levels[-1]
        step = next(steps, None)
        if step is None:
            levels.pop()
            open_now.discard(container)
            if before == len(contents.pieces):
                barren.add(container)
            continue
        value = step.value
        budget.visits -= 1
        budget.letters -= 8 * len(step.keys)
        if isinstance(value, _TENSORS):
            budget.tensors -= 1
            budget.letters -= sum(map(len, step.keys))
            contents.pieces.append(_piece(step, locate))
        elif not isinstance(value, _CONTAINERS):
            # A plain value near the top is kept: an epoch, a version, a best score.
            is_near_top = len(step.keys) == 1 and len(contents.values) < MOST_VALUES_SHOWN
            if is_near_top and isinstance(value, bool | int | float | str):
                contents.values.append((step.keys[0], printable(str(value))))
        elif value not in ((), []) and id(value) not in open_now and id(value) not in barren:
            # An entry of a dictionary gets a text for its key, and takes as much time and memory as 40 items of a list.
            items = len(value) if isinstance(value, Dict | list | tuple) else 0
            budget.items -= 40 * items if isinstance(value, Dict) else items
            if len(levels) > DEEPEST + 1:
                raise CheckpointError(f"{source.name} holds objects that are nested more than {DEEPEST} deep")
            open_now.add(id(value))
            levels.append((_inner(step, contents), id(value), len(contents.pieces)))
        budget.check_walk()
    _describe(root, contents)


def _describe(root: Any, contents: PickleContents) -> None:
    if not isinstance(root, Dict):
        return
    heads = {piece.keys[0] for piece in contents.pieces}
    marks = {mark.keys: mark.kind for mark in contents.marks}
    for key, value in list(_entries(root).items())[:MOST_VALUES_SHOWN]:
        if key not in heads and isinstance(value, _CONTAINERS):
            if marks.get((key,), "model") != "model":
                kind = f"{marks[(key,)]} state"
            elif isinstance(value, Dict | list | tuple):
                kind = f"a {'dictionary' if isinstance(value, Dict) else 'list'} of {len(value):,}"
            else:
                kind = printable(str(value.callee)) if isinstance(value, Object) else "an object"
            contents.values.append((key, f"{kind}, among the pickled objects"))


def _inner(step: _Step, contents: PickleContents) -> Iterator[_Step]:
    value = step.value
    if isinstance(value, Dict):
        entries = _entries(value)
        _mark(step.keys, value, entries, contents)
        for key, item in entries.items():
            if not step.keys or isinstance(item, _HOLDERS):
                yield _Step((*step.keys, key), item, step.wrapper, step.trainable)
    elif isinstance(value, Composite):
        for key, item in value.inner:
            yield _Step((*step.keys, key) if key else step.keys, item, value.kind or None, value.trainable)
    elif isinstance(value, Object):
        yield from _of_object(step, value, contents)
    elif any(isinstance(item, _HOLDERS) for item in value):
        for index, item in enumerate(value):
            if isinstance(item, _HOLDERS):
                yield _Step((*step.keys, str(index)), item, step.wrapper, step.trainable)


_CONTAINERS = (Dict, list, tuple, Object, Composite)
_TENSORS = (TensorValue, StorageValue)
_HOLDERS = (*_CONTAINERS, *_TENSORS)


def _entries(value: Dict) -> dict[str, Any]:
    return {_key(key): item for key, item in value.pairs}


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key if len(key) <= LONGEST_KEY and key.isprintable() else printable(key, LONGEST_KEY)
    if isinstance(key, bytes):
        return printable(key.decode("utf-8", "replace"), LONGEST_KEY)
    if isinstance(key, Blob):
        return f"<a text of {key.length:,} bytes>"
    if isinstance(key, tuple):
        return f"({', '.join(_key(item) for item in key)})" if all(map(_is_plain, key[:9])) and len(key) < 9 else "(…)"
    return printable(str(key), LONGEST_KEY) if _is_plain(key) else f"<{type(key).__name__.lower()}>"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | Global)


def _mark(keys: Keys, value: Dict, entries: dict[str, Any], contents: PickleContents) -> None:
    """Mark a dictionary that is recognised by its entries, such as an optimizer's, or as a module's state dict."""
    if value.of_module:
        contents.mark_module(keys)
        return
    kind = next((kind for kind, names in _KINDS if entries.keys() >= names), None)
    if kind:
        contents.marks.append(Mark(keys, kind))


def _of_object(step: _Step, value: Object, contents: PickleContents) -> Iterator[_Step]:
    """The states, arguments and items of an object; a module as its ``state_dict()``."""
    for state in value.states:
        entries = _entries(state) if isinstance(state, Dict) else {}
        if all(name in entries for name in _OF_MODULE):
            contents.module = contents.module or str(value.callee)
            yield from _of_module(step, entries)
        elif state is not None:
            yield _Step(step.keys, state, step.wrapper, step.trainable)
    if value.args:
        yield _Step(step.keys, value.args[0] if len(value.args) == 1 else value.args, step.wrapper, step.trainable)
    if value.items:
        yield _Step(step.keys, value.items, step.wrapper, step.trainable)


def _of_module(step: _Step, entries: dict[str, Any]) -> Iterator[_Step]:
    for name in _OF_MODULE:
        value = entries[name]
        if isinstance(value, Dict):
            value.of_module = True
        yield _Step(step.keys, value)
    for name, item in entries.items():
        if name not in _OF_MODULE and isinstance(item, _HOLDERS) and item not in ((), []):
            yield _Step((*step.keys, name), item)


def _piece(step: _Step, locate: Locate) -> Piece:
    value = step.value
    if isinstance(value, StorageValue):
        value = TensorValue(value.dtype, (value.elements,), (1,), 0, value)
    bits = BITS[value.dtype]
    span, needed = strided_extent(value.shape, value.stride, bits)
    return Piece(
        keys=step.keys or ("tensor",),
        spec=TensorSpec(value.dtype, value.shape),
        elements=math.prod(value.shape),
        storage=None if value.storage is None else locate(value.storage),
        start=(value.offset + (value.storage.base if value.storage else 0)) * bits >> 3,
        span=span,
        needed=needed,
        wrapper=step.wrapper,
        trainable=value.trainable if step.trainable is None else step.trainable,
    )
