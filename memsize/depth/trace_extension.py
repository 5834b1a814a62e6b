"""The trace of a deep model, from those of two shallow ones that have `n` and `n + 1` periods of its repeated blocks.

Each table of a trace (layers, tensors, storages, events …) is extended by itself (`memsize.depth.alignment`). A row's
key has the parts of it that are the same at any depth, with folded paths in place of layers and keys in place of
storages; its numbers are the rest. Afterwards each index has to lead to a row of the key that the event was seen with:
the tables were extended apart from each other, so that a wrong induction does not get through.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from memsize.depth.alignment import Integers, Table, extended
from memsize.depth.repeated import FoldedPath, RepeatedBlocks
from memsize.records.columns import Coded, Columns, Shapes
from memsize.records.trace import DeferredFree, Event, Layer, Storage, StoredTensor, Trace
from memsize.records.world import Collective

_MOST_DIMENSIONS: Final = 8
_WHOLE: Final = ("model", "scenario", "training", "batch_size", "torch", "inputs", "phases", "assumptions", "notes")
_WHOLE_TOO: Final = ("cudnn", "failure", "roots", "world", "lines", "stack")


class NotRepeatedError(Exception):
    """Two runs do not differ by repetition alone; the text says in what."""


class _Numbers:
    """The numbers of keys, the same in both runs."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> int:
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def column(self, rows: Integers, part: Callable[[Any], Any]) -> Integers:
        """Return a part of the keys of `rows`, a whole number."""
        values = np.fromiter(map(part, self.keys), dtype=np.int64, count=len(self.keys))
        return values[rows]

    def coded(self, rows: Integers, part: Callable[[Any], str]) -> Coded:
        """Return a part of the keys of `rows`, a text."""
        texts: dict[str, int] = {}
        codes = [texts.setdefault(part(key), len(texts)) for key in self.keys]
        return Coded(np.array(codes, dtype=np.int32)[rows], tuple(texts))


class _StorageKey(NamedTuple):
    role: str
    op: str
    dtype: str
    rank: int
    stream: int
    line: int
    saved_at: int
    layer: FoldedPath | None
    saved_by: FoldedPath | None
    size: tuple[int, ...] | None
    """Its bytes and shape, None where they grow with the depth."""


class _EventKey(NamedTuple):
    storage: int
    delta: int | bool
    """Its sign alone where the storage's size grows with the depth."""
    phase: int
    layer: FoldedPath | None
    op: str
    first: bool
    last: bool


class _Keys(NamedTuple):
    layers: _Numbers
    tensors: _Numbers
    storages: _Numbers
    events: _Numbers
    others: _Numbers


@dataclass
class _Tables:
    """The tables of one of the two runs."""

    layers: Table
    outputs: Table
    inputs: Table
    tensors: Table
    storages: Table
    events: Table
    deferred: Table
    emptied: Table
    collectives: Table


def extended_trace(shorter: Trace, longer: Trace, blocks: RepeatedBlocks, count: int) -> Trace:
    """Return the trace of a model with `count` periods of blocks, from those of models with `blocks` and one more.

    Raises `NotRepeatedError` where they differ by more than repetition.
    """
    for name in (*_WHOLE, *_WHOLE_TOO):
        if getattr(shorter, name) != getattr(longer, name):
            raise NotRepeatedError(f"{name} of the two runs differ")
    try:
        return _extended(shorter, longer, blocks, count, sizes_grow=False)
    except NotRepeatedError:
        return _extended(shorter, longer, blocks, count, sizes_grow=True)


def _extended(shorter: Trace, longer: Trace, blocks: RepeatedBlocks, count: int, *, sizes_grow: bool) -> Trace:
    keys = _Keys(*(_Numbers() for _ in _Keys._fields))
    first = _Folding(shorter, blocks, keys, sizes_grow).tables()
    second = _Folding(longer, blocks.with_count(blocks.count + 1), keys, sizes_grow).tables()
    tables = {}
    for name, table in vars(first).items():
        result = extended(table, getattr(second, name), count - blocks.count)
        if result is None:
            raise NotRepeatedError(f"the {name} of the two runs do not align")
        tables[name] = result
    whole = _Tables(**tables)
    _check(whole, keys)
    return _Unfolding(blocks, keys, whole).into(shorter)


class _Folding:
    """One of the two runs, as tables."""

    def __init__(self, trace: Trace, blocks: RepeatedBlocks, keys: _Keys, sizes_grow: bool) -> None:
        self.trace = trace
        self.blocks = blocks
        self.keys = keys
        self.sizes_grow = sizes_grow
        self.paths = [blocks.fold(layer.path)[0] for layer in trace.layers]
        # Shapes that parameters of blocks have do not grow with the depth.
        self.fixed = {tensor.spec.shape for tensor in trace.tensors}
        self.storage_keys: list[int] = []
        self.event_keys: list[int] = []

    def tables(self) -> _Tables:
        trace = self.trace
        return _Tables(
            layers=_table(map(self._layer, trace.layers), 8),
            outputs=_table(self._passed("outputs"), 0),
            inputs=_table(self._passed("inputs"), 0),
            tensors=_table(map(self._tensor, trace.tensors), 2),
            storages=_table(map(self._storage, trace.storages), 3 + _MOST_DIMENSIONS),
            events=_table(self._events(), 3),
            deferred=_table(map(self._deferred, trace.deferred), 2),
            emptied=_table(((self.keys.others("emptied"), (event,)) for event in trace.emptied), 1),
            collectives=_table(map(self._collective, trace.collectives), 3),
        )

    def _path(self, layer: int) -> FoldedPath | None:
        return self.paths[layer] if layer >= 0 else None

    def _layer(self, layer: Layer) -> tuple[int, tuple[int, ...]]:
        path, number = self.blocks.fold(layer.path)
        aliases = [self.blocks.fold(alias) for alias in layer.aliases]
        if any(of not in (number, -1) for _, of in aliases):
            raise NotRepeatedError(f"{layer.path} is part of several blocks")
        grows = self.sizes_grow and path.kind is None
        sizes = (layer.calls, layer.output_bytes, layer.saved_bytes, layer.cast_bytes, layer.multiply_adds or 0)
        if grows:
            layer = replace(
                layer, calls=0, output_bytes=0, saved_bytes=0, cast_bytes=0, multiply_adds=layer.multiply_adds and 1
            )
        key = (
            replace(layer, path="", aliases=(), outputs=(), inputs=()),
            path,
            tuple(alias for alias, _ in aliases),
            grows,
        )
        return self.keys.layers(key), (number, len(layer.outputs), len(layer.inputs), *sizes)

    def _passed(self, what: str) -> Iterable[tuple[int, tuple[int, ...]]]:
        """What layers returned or were given, all of it in one table."""
        for path, layer in zip(self.paths, self.trace.layers, strict=True):
            for tensor in getattr(layer, what):
                yield self.keys.others((path, tensor)), ()

    def _tensor(self, tensor: StoredTensor) -> tuple[int, tuple[int, ...]]:
        (name, number), (layer, _) = self.blocks.fold(tensor.name), self.blocks.fold(tensor.layer)
        tied, tied_number = self.blocks.fold(tensor.tied_to) if tensor.tied_to is not None else (None, -1)
        key = replace(tensor, name="", layer="", tied_to=None), name, layer, tied
        return self.keys.tensors(key), (number, tied_number)

    def _storage(self, storage: Storage) -> tuple[int, tuple[int, ...]]:
        layer, saved_by = self._path(storage.layer), self._path(storage.saved_by)
        grows = (
            self.sizes_grow
            and (layer is None or layer.kind is None)
            and storage.role not in ("parameter", "gradient", "optimizer state")
            and storage.shape not in self.fixed
        )
        rank = len(storage.shape)
        key = self.keys.storages(
            _StorageKey(
                storage.role, storage.op, storage.dtype, rank, storage.stream, storage.line, storage.saved_at,
                layer, saved_by, None if grows else (storage.bytes, *storage.shape),
            )
        )  # fmt: skip
        self.storage_keys.append(key)
        if rank > _MOST_DIMENSIONS:
            raise NotRepeatedError(f"a tensor has {rank} dimensions")
        numbers = (storage.layer, storage.saved_by, storage.bytes, *storage.shape, *(0,) * (_MOST_DIMENSIONS - rank))
        return key, numbers

    def _events(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        events = self.trace.events
        last = {event.storage: index for index, event in enumerate(events)}
        alive: dict[int, int] = {}
        for index, (storage, delta, phase, layer, op) in enumerate(events):
            left = alive.get(storage, 0) + delta
            of = self.storage_keys[storage]
            key = _EventKey(
                of, delta > 0 if self.keys.storages.keys[of].size is None else delta, phase, self._path(layer), op,
                storage not in alive, last[storage] == index and not left,
            )  # fmt: skip
            alive[storage] = left
            self.event_keys.append(self.keys.events(key))
            yield self.event_keys[-1], (storage, layer, delta)

    def _deferred(self, free: DeferredFree) -> tuple[int, tuple[int, ...]]:
        return self.keys.others(("deferred", self.event_keys[free.event], free.until < 0)), (free.event, free.until)

    def _collective(self, collective: Collective) -> tuple[int, tuple[int, ...]]:
        layer = self._path(collective.layer)
        size = None if self.sizes_grow and (layer is None or layer.kind is None) else collective.bytes
        key = collective._replace(bytes=0, layer=0, event=0), layer, size
        return self.keys.others(key), (collective.bytes, collective.layer, collective.event)


def _table(rows: Iterable[tuple[int, tuple[int, ...]]], width: int) -> Table:
    listed = list(rows)
    keys = np.fromiter((key for key, _ in listed), dtype=np.int64, count=len(listed))
    return Table(keys, np.array([numbers for _, numbers in listed], dtype=np.int64).reshape(len(listed), width))


def _check(tables: _Tables, keys: _Keys) -> None:
    """Raise `NotRepeatedError` unless each index leads to a row of the key that goes with it."""
    paths: dict[FoldedPath | None, int] = {None: -1}
    number = [paths.setdefault(key[1], len(paths)) for key in keys.layers.keys]
    of_layer = np.array([*number, -1], dtype=np.int64)
    layers = np.append(tables.layers.keys, len(number))  # the last is none, which -1 means

    def leads(indexes: Integers, expected: Integers) -> None:
        inside = (indexes >= -1) & (indexes < len(layers) - 1)
        if not inside.all() or not (of_layer[layers[indexes]] == expected).all():
            raise NotRepeatedError("a layer is not the one that it should be")

    storages, events = tables.storages, tables.events
    leads(storages.numbers[:, 0], keys.storages.column(storages.keys, lambda key: paths.get(key.layer, -2)))
    leads(storages.numbers[:, 1], keys.storages.column(storages.keys, lambda key: paths.get(key.saved_by, -2)))
    leads(events.numbers[:, 1], keys.events.column(events.keys, lambda key: paths.get(key.layer, -2)))
    storage, _, delta = events.numbers.T
    if not len(storage):
        return
    if storage.min() < 0 or storage.max() >= len(storages.keys):
        raise NotRepeatedError("an event is about no storage")
    if not (storages.keys[storage] == keys.events.column(events.keys, lambda key: key.storage)).all():
        raise NotRepeatedError("an event is about another storage than it should be")
    order = np.argsort(storage, kind="stable")
    starts = np.append(True, np.diff(storage[order]) != 0)
    ends = np.append(starts[1:], True)
    total = np.cumsum(delta[order])
    before = np.repeat((total - delta[order])[starts], np.diff(np.append(np.flatnonzero(starts), len(order))))
    first = keys.events.column(events.keys, lambda key: key.first)[order].astype(bool)
    last = keys.events.column(events.keys, lambda key: key.last)[order].astype(bool)
    if (first != starts).any() or (last != (ends & (total == before))).any() or (total < before).any():
        raise NotRepeatedError("a storage does not appear once, or ends before it appears")


class _Unfolding:
    """The tables of the deep model, as a trace."""

    def __init__(self, blocks: RepeatedBlocks, keys: _Keys, tables: _Tables) -> None:
        self.blocks = blocks
        self.keys = keys
        self.tables = tables

    def into(self, trace: Trace) -> Trace:
        """Return `trace` with these tables."""
        tables = self.tables
        passed = [self._passed(table, column) for column, table in ((1, tables.outputs), (2, tables.inputs))]
        return replace(
            trace,
            layers=tuple(map(self._layer, *_rows(tables.layers), *passed)),
            tensors=tuple(map(self._tensor, *_rows(tables.tensors))),
            storages=self._storages(),
            events=self._events(),
            deferred=tuple(DeferredFree(*numbers) for numbers in tables.deferred.numbers.tolist()),
            emptied=tuple(tables.emptied.numbers[:, 0].tolist()),
            collectives=tuple(map(self._collective, *_rows(tables.collectives))),
        )

    def _passed(self, table: Table, column: int) -> list[tuple[Any, ...]]:
        """What each layer returned or was given; raises `NotRepeatedError` if that is what another one was."""
        rows, result, end = table.keys.tolist(), [], 0
        for layer, count in zip(
            *(part.tolist() for part in (self.tables.layers.keys, self.tables.layers.numbers[:, column])), strict=True
        ):
            passed = [self.keys.others.keys[row] for row in rows[end : end + count]]
            end += count
            if any(path != self.keys.layers.keys[layer][1] for path, _ in passed):
                raise NotRepeatedError("a layer has the outputs of another")
            result.append(tuple(tensor for _, tensor in passed))
        return result

    def _layer(self, row: int, numbers: Sequence[int], outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> Layer:
        layer, path, aliases, grows = self.keys.layers.keys[row]
        number, _, _, calls, output_bytes, saved_bytes, cast_bytes, multiply_adds = numbers
        unfold = self.blocks.unfold
        same = replace(
            layer,
            path=unfold(path, number),
            aliases=tuple(unfold(alias, number) for alias in aliases),
            outputs=outputs,
            inputs=inputs,
        )
        if not grows:
            return same
        return replace(
            same,
            calls=calls,
            output_bytes=output_bytes,
            saved_bytes=saved_bytes,
            cast_bytes=cast_bytes,
            multiply_adds=None if layer.multiply_adds is None else multiply_adds,
        )

    def _tensor(self, row: int, numbers: Sequence[int]) -> StoredTensor:
        tensor, name, layer, tied = self.keys.tensors.keys[row]
        number, tied_number = numbers
        unfold = self.blocks.unfold
        return replace(
            tensor,
            name=unfold(name, number),
            layer=unfold(layer, number),
            tied_to=None if tied is None else unfold(tied, tied_number),
        )

    def _storages(self) -> Sequence[Storage]:
        rows, numbers = self.tables.storages
        keys = self.keys.storages
        if not len(rows):
            return ()
        ranks = keys.column(rows, lambda key: key.rank)
        dimensions = numbers[:, 3:]
        sizes = dimensions[np.arange(_MOST_DIMENSIONS) < ranks[:, None]]
        return Columns(
            Storage,
            numbers[:, 2],
            keys.coded(rows, lambda key: key.role),
            numbers[:, 0],
            keys.coded(rows, lambda key: key.op),
            keys.coded(rows, lambda key: key.dtype),
            Shapes(sizes, np.cumsum(ranks) - ranks, ranks),
            numbers[:, 1],
            keys.column(rows, lambda key: key.stream),
            keys.column(rows, lambda key: key.line),
            keys.column(rows, lambda key: key.saved_at),
        )

    def _events(self) -> Sequence[Event]:
        rows, numbers = self.tables.events
        keys = self.keys.events
        if not len(rows):
            return ()
        storage, layer, delta = numbers.T
        phase = keys.column(rows, lambda key: key.phase)
        return Columns(Event, storage, delta, phase, layer, keys.coded(rows, lambda key: key.op))

    def _collective(self, row: int, numbers: Sequence[int]) -> Collective:
        collective: Collective = self.keys.others.keys[row][0]
        size, layer, event = numbers
        return collective._replace(bytes=size, layer=layer, event=event)


def _rows(table: Table) -> tuple[list[int], list[list[int]]]:
    return table.keys.tolist(), table.numbers.tolist()
