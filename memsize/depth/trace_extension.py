"""The trace of a deep model, from those of shallow ones that have `n` and `n + 1` periods of its repeated blocks.

Each table of a trace (layers, tensors, storages, events …) is extended by itself (`memsize.depth.alignment`). A row's
key has the parts of it that are the same at any depth, with folded paths in place of layers and keys in place of
storages; its numbers are the rest. Afterwards each index has to lead to a row of the key that the event was seen with:
the tables were extended apart from each other, so that a wrong induction does not get through.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from memsize.depth.alignment import Extension, Integers, Table, extended
from memsize.depth.blocks import Repetition, one_more
from memsize.depth.extension_plan import ExtensionPlan, IndexedRows, LayerRow, TensorRow, structure_of
from memsize.records.trace import DeferredFree, Layer, StoredTensor, Trace

_MOST_DIMENSIONS: Final = 8
_NUMBER: Final = re.compile(r"(?<![\d.,])(\d+)(?![\d.,]*\d)")
"""A whole number without a separator in it, which may count blocks; sizes have one."""
_NO_PATH: Final = -1
_OF_PARAMETERS: Final = ("parameter", "gradient", "optimizer state")
"""Roles of storages that are as large as parameters, which blocks have one by one."""
_LAYER_SIZES: Final = ("calls", "saved_bytes", "cast_bytes")
"""Figures of a layer that may grow with the depth where it holds the blocks."""
_WHOLE: Final = ("model", "scenario", "training", "batch_size", "torch", "inputs", "phases", "assumptions")
_WHOLE_TOO: Final = ("cudnn", "failure", "roots", "world", "lines", "stack")


class NotRepeatedError(Exception):
    """Two runs do not differ by repetition alone; the text says in what."""


class _Numbers:
    """The numbers of keys, the same in all runs."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> int:
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def all(self, keys: Iterable[Hashable]) -> Integers:
        return np.array([self(key) for key in keys], dtype=np.int64)

    def column(self, rows: Integers, part: int) -> Integers:
        """Return a part of the keys of `rows`, a whole number."""
        return np.array([key[part] for key in self.keys], dtype=np.int64)[rows]


# The parts of a storage's key; the last is its bytes and its shape, None where they grow with the depth.
_ROLE, _OP, _DTYPE, _RANK, _STREAM, _LINE, _SAVED_AT, _DOUBT, _PATH, _SAVED_PATH, _SIZE = range(11)
# The parts of an event's key: the key of its storage; the bytes, or their sign alone where they grow with the depth;
# the phase, the path of the layer, and the op; and whether it is the first of its storage, or ends it.
_STORAGE, _DELTA, _PHASE, _EVENT_PATH, _EVENT_OP, _FIRST, _LAST = range(7)


class _Keys(NamedTuple):
    paths: _Numbers
    layers: _Numbers
    tensors: _Numbers
    storages: _Numbers
    events: _Numbers
    others: _Numbers


_Kind = TypeVar("_Kind", Table, Extension)


@dataclass
class _Tables(Generic[_Kind]):
    """The tables of one of the short runs, or of the whole model's."""

    layers: _Kind
    outputs: _Kind
    inputs: _Kind
    tensors: _Kind
    storages: _Kind
    events: _Kind
    deferred: _Kind
    emptied: _Kind
    collectives: _Kind


def plan_extension(shorter: Trace, longer: Sequence[Trace], blocks: Repetition, counts: Sequence[int]) -> ExtensionPlan:
    """Return how the run of a model with `counts` periods of blocks comes from that with `blocks`, and those with one
    more of each group.

    Raises `NotRepeatedError` where they differ by more than repetition.
    """
    for name in (*_WHOLE, *_WHOLE_TOO):
        if any(getattr(shorter, name) != getattr(other, name) for other in longer):
            raise NotRepeatedError(f"{name} of the short runs differ")
    try:
        return _planned(shorter, longer, blocks, counts, sizes_grow=False)
    except NotRepeatedError:
        return _planned(shorter, longer, blocks, counts, sizes_grow=True)


def _planned(
    shorter: Trace, longer: Sequence[Trace], blocks: Repetition, counts: Sequence[int], *, sizes_grow: bool
) -> ExtensionPlan:
    keys = _Keys(*(_Numbers() for _ in _Keys._fields))
    first = _Folding(shorter, blocks, keys, sizes_grow).tables()
    others = [
        _Folding(trace, blocks.with_counts(one_more(blocks.counts, group)), keys, sizes_grow).tables()
        for group, trace in enumerate(longer)
    ]
    more = [count - less for count, less in zip(counts, blocks.counts, strict=True)]
    tables = {}
    for name, table in vars(first).items():
        tables[name] = extended(table, [getattr(other, name) for other in others], more)
        if tables[name] is None:
            raise NotRepeatedError(f"the {name} of the short runs do not align")
    whole: _Tables[Any] = _Tables(**tables)
    _check(whole, keys)
    notes = extended_texts(shorter.notes, [trace.notes for trace in longer], more)
    return _plan(shorter, first, keys, whole, notes)


def extended_texts(shorter: Sequence[str], longer: Sequence[Sequence[str]], blocks: Sequence[int]) -> tuple[str, ...]:
    """Extend texts whose numbers may count blocks. Raises `NotRepeatedError` where they differ otherwise."""
    texts = []
    for of_runs in zip_longest(shorter, *longer, fillvalue=""):
        first, *others = (_NUMBER.split(text) for text in of_runs)
        if any(other[::2] != first[::2] for other in others):
            raise NotRepeatedError("notes of the short runs differ")
        for part in range(1, len(first), 2):
            number, *more = (int(parts[part]) for parts in (first, *others))
            if {*more} - {number} and max(number, *more) > 999:
                raise NotRepeatedError("sizes in notes of the short runs differ")
            first[part] = str(number + sum((one - number) * count for one, count in zip(more, blocks, strict=True)))
        texts.append("".join(first))
    return tuple(texts)


class _Folding:
    """One of the short runs, as tables."""

    def __init__(self, trace: Trace, blocks: Repetition, keys: _Keys, sizes_grow: bool) -> None:
        self.trace = trace
        self.blocks = blocks
        self.keys = keys
        self.sizes_grow = sizes_grow
        self.paths = [*(keys.paths(blocks.fold(layer.path)[0]) for layer in trace.layers), _NO_PATH]
        """The number of the path of each layer; the last is that of no layer, which -1 means."""
        # Shapes that parameters of blocks have do not grow with the depth.
        self.fixed = {tensor.spec.shape for tensor in trace.tensors}
        self.storage_keys: Integers = np.zeros(0, dtype=np.int64)
        self.event_keys: Integers = np.zeros(0, dtype=np.int64)

    def tables(self) -> _Tables[Table]:
        trace, others = self.trace, self.keys.others
        storages, events = self._storages(), self._events()
        of = self.event_keys
        deferred = (
            (others(("deferred", int(of[free.event]), free.until < 0)), (free.event, free.until))
            for free in trace.deferred
        )
        # One that grows with the depth is split from some size on, as a bucket of DDP is.
        collectives = (
            (others((one._replace(layer=0, event=0), self.paths[one.layer])), (one.layer, one.event))
            for one in trace.collectives
        )
        return _Tables(
            layers=_table(map(self._layer, trace.layers), 3 + len(_LAYER_SIZES)),
            outputs=_table(self._passed("outputs"), 0),
            inputs=_table(self._passed("inputs"), 0),
            tensors=_table(map(self._tensor, trace.tensors), 2),
            storages=storages,
            events=events,
            deferred=_table(deferred, 2),
            emptied=_table(((others("emptied"), (event,)) for event in trace.emptied), 1),
            collectives=_table(collectives, 2),
        )

    def _grows(self, path: int) -> bool:
        """Whether the sizes of what a layer makes may grow with the depth."""
        return self.sizes_grow and (path < 0 or self.keys.paths.keys[path].kind is None)

    def _layer(self, layer: Layer) -> tuple[int, tuple[int, ...]]:
        path, number = self.blocks.fold(layer.path)
        aliases = [self.blocks.fold(alias) for alias in layer.aliases]
        if any(alias.kind is not None and (alias.stem, of) != (path.stem, number) for alias, of in aliases):
            raise NotRepeatedError(f"{layer.path} is part of several blocks")
        of = self.keys.paths(path)
        sizes = {name: getattr(layer, name) or 0 for name in _LAYER_SIZES}
        grows = self._grows(of)
        without: dict[str, Any] = dict.fromkeys(sizes, 0) if grows else {}
        alike = replace(layer, path="", aliases=(), outputs=(), output_bytes=0, inputs=(), **without)
        key = alike, of, tuple(alias for alias, _ in aliases), grows
        return self.keys.layers(key), (number, len(layer.outputs), len(layer.inputs), *sizes.values())

    def _passed(self, what: str) -> Iterable[tuple[int, tuple[int, ...]]]:
        for path, layer in zip(self.paths, self.trace.layers, strict=False):
            for tensor in getattr(layer, what):
                yield self.keys.others((path, tensor)), ()

    def _tensor(self, tensor: StoredTensor) -> tuple[int, tuple[int, ...]]:
        (name, number), (layer, _) = self.blocks.fold(tensor.name), self.blocks.fold(tensor.layer)
        tied, tied_number = self.blocks.fold(tensor.tied_to) if tensor.tied_to is not None else (None, -1)
        key = replace(tensor, name="", layer="", tied_to=None), name, layer, tied
        return self.keys.tensors(key), (number, tied_number)

    def _storages(self) -> Table:
        if not self.trace.storages:
            return _table((), 3 + _MOST_DIMENSIONS)
        size, role, layer, op, dtype, shape, saved_by, stream, line, saved_at, doubt = zip(
            *self.trace.storages, strict=True
        )
        ranks = list(map(len, shape))
        if max(ranks) > _MOST_DIMENSIONS:
            raise NotRepeatedError(f"a tensor has {max(ranks)} dimensions")
        path, saved_path = ([self.paths[index] for index in indexes] for indexes in (layer, saved_by))
        sizes: Iterable[Any] = zip(size, shape, strict=True)
        if self.sizes_grow:
            grow = (
                self._grows(path) and role not in _OF_PARAMETERS and shape not in self.fixed
                for path, role, shape in zip(path, role, shape, strict=True)
            )
            sizes = (None if grows else size for grows, size in zip(grow, sizes, strict=True))
        keys = zip(role, op, dtype, ranks, stream, line, saved_at, doubt, path, saved_path, sizes, strict=True)
        self.storage_keys = self.keys.storages.all(keys)
        padding = [(0,) * (_MOST_DIMENSIONS - rank) for rank in range(_MOST_DIMENSIONS + 1)]
        dimensions = np.array([dims + padding[rank] for dims, rank in zip(shape, ranks, strict=True)], dtype=np.int64)
        return Table(self.storage_keys, np.column_stack((layer, saved_by, size, dimensions)))

    def _events(self) -> Table:
        if not self.trace.events:
            return _table((), 3)
        storage, delta, phase, layer, op = zip(*self.trace.events, strict=True)
        numbers = np.column_stack((storage, layer, delta))
        first, last = _ends(numbers[:, 0], numbers[:, 2])
        of = self.storage_keys[numbers[:, 0]].tolist()
        sizes: Iterable[int] = delta
        if self.sizes_grow:
            fixed = [key[_SIZE] is not None for key in self.keys.storages.keys]
            sizes = [size if fixed[key] else size > 0 for key, size in zip(of, delta, strict=True)]
        path = [self.paths[index] for index in layer]
        self.event_keys = self.keys.events.all(
            zip(of, sizes, phase, path, op, first.tolist(), last.tolist(), strict=True)
        )
        return Table(self.event_keys, numbers)


def _ends(storage: Integers, delta: Integers) -> tuple[Integers, Integers]:
    """Return which events are the first of their storage, and which are the last and leave nothing of it."""
    order = np.argsort(storage, kind="stable")
    starts = np.append(True, np.diff(storage[order]) != 0)
    total = np.cumsum(delta[order])
    lengths = np.diff(np.append(np.flatnonzero(starts), len(order)))
    left = total - np.repeat((total - delta[order])[starts], lengths)
    if (left < 0).any():
        raise NotRepeatedError("a storage ends before it appears")
    first, last = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    first[order] = starts
    last[order] = np.append(starts[1:], True) & (left == 0)
    return first, last


def _table(rows: Iterable[tuple[int, tuple[int, ...]]], width: int) -> Table:
    listed = list(rows)
    keys = np.fromiter((key for key, _ in listed), dtype=np.int64, count=len(listed))
    return Table(keys, np.array([numbers for _, numbers in listed], dtype=np.int64).reshape(len(listed), width))


def _check(tables: _Tables[Extension], keys: _Keys) -> None:
    """Raise `NotRepeatedError` unless each index leads to a row of the key that goes with it."""
    storages, events = tables.storages, tables.events
    paths = np.append(np.array([key[1] for key in keys.layers.keys], dtype=np.int64)[tables.layers.keys], _NO_PATH)

    def leads(indexes: Integers, expected: Integers) -> None:
        if len(indexes) and not (indexes.min() >= -1 and indexes.max() < len(paths) - 1):
            raise NotRepeatedError("there is no such layer")
        if not (paths[indexes] == expected).all():
            raise NotRepeatedError("a layer is not the one that it should be")

    if not len(events.keys):
        return
    leads(storages.numbers[:, 0], keys.storages.column(storages.keys, _PATH))
    leads(storages.numbers[:, 1], keys.storages.column(storages.keys, _SAVED_PATH))
    leads(events.numbers[:, 1], keys.events.column(events.keys, _EVENT_PATH))
    storage, _, delta = events.numbers.T
    if storage.min() < 0 or storage.max() >= len(storages.keys):
        raise NotRepeatedError("an event is about no storage")
    if not (storages.keys[storage] == keys.events.column(events.keys, _STORAGE)).all():
        raise NotRepeatedError("an event is about another storage than it should be")
    for part, ends in zip((_FIRST, _LAST), _ends(storage, delta), strict=True):
        if not (keys.events.column(events.keys, part) == ends).all():
            raise NotRepeatedError("a storage appears or ends elsewhere than it should")


def _plan(
    shorter: Trace,
    first: _Tables[Table],
    keys: _Keys,
    whole: _Tables[Extension],
    notes: tuple[str, ...],
) -> ExtensionPlan:
    paths = [keys.layers.keys[key][1] for key in whole.layers.keys.tolist()]
    for passed, column in ((whole.outputs, 1), (whole.inputs, 2)):
        of = [keys.others.keys[key][0] for key in passed.keys.tolist()]
        counts = whole.layers.numbers[:, column].tolist()
        if of != [path for path, count in zip(paths, counts, strict=True) for _ in range(count)]:
            raise NotRepeatedError("a layer has the outputs of another")
    layers = []
    for key, (number, outputs, inputs, *sizes), origin in _rows(whole.layers):
        _, of, aliases, grows = keys.layers.keys[key]
        grown = dict(zip(_LAYER_SIZES, sizes, strict=True)) if grows else {}
        row = LayerRow(
            origin=origin,
            path=keys.paths.keys[of].unfold(number),
            aliases=tuple(alias.unfold(number) for alias in aliases),
            outputs=outputs,
            inputs=inputs,
            grown={name: size for name, size in grown.items() if size != getattr(shorter.layers[origin], name)},
        )
        layers.append(row)
    tensors = []
    for key, (number, tied_number), origin in _rows(whole.tensors):
        _, name, layer, tied = keys.tensors.keys[key]
        tied_to = None if tied is None else tied.unfold(tied_number)
        tensors.append(TensorRow(origin, name.unfold(number), layer.unfold(number), tied_to))
    return ExtensionPlan(
        structure=structure_of(shorter),
        layers=layers,
        outputs=whole.outputs.origin.tolist(),
        inputs=whole.inputs.origin.tolist(),
        tensors=tensors,
        storages=_indexed(whole.storages, first.storages, ("layer", "saved_by")),
        events=_indexed(whole.events, first.events, ("storage", "layer")),
        deferred=tuple(DeferredFree(*numbers) for numbers in whole.deferred.numbers.tolist()),
        emptied=tuple(whole.emptied.numbers[:, 0].tolist()),
        collectives=[(origin, layer, event) for _, (layer, event), origin in _rows(whole.collectives)],
        notes=notes,
    )


def _indexed(table: Extension, short: Table, fields: tuple[str, str]) -> IndexedRows:
    """The rows of a table whose first two numbers are indexes, and the others sizes."""
    indexes, sizes = table.numbers[:, :2], table.numbers[:, 2:]
    grown = np.flatnonzero((sizes != short.numbers[table.origin, 2:]).any(axis=1))
    return IndexedRows(table.origin, dict(zip(fields, indexes.T, strict=True)), grown, sizes[grown])


def _rows(table: Extension) -> Iterator[tuple[int, list[int], int]]:
    return zip(table.keys.tolist(), table.numbers.tolist(), table.origin.tolist(), strict=True)
