"""Cut a traced generation into steps that can be compared, and join steps to a run.

The events of a step identify a storage by its age, the number of steps since it was allocated, and its slot among the
storages of that step. Two steps with the same `structure` differ in their `sizes` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from memsize.records.aggregates import split_phase
from memsize.records.columns import Coded, Columns, Shapes, rows_at
from memsize.records.roles import Role
from memsize.records.trace import Event, Storage, Trace
from memsize.workloads.generation import DECODE, PREFILL
from memsize.workloads.kv_caches import CachedLayer

if TYPE_CHECKING:
    import numpy as np

    from memsize.records.columns import Integers

    Sizes = np.ndarray[Any, np.dtype[np.int64]]


# -- from a trace to steps ---------------------------------------------------------------------------------------------

SETUP = -1
"""The number of the setup, before the prefill, and the `age` of its storages."""


class StepEvent(NamedTuple):
    """An event about the storage in `slot` of the step `age` steps before. `stage` tells phases of one step apart."""

    age: int
    slot: int
    layer: int
    op: str
    stage: str


class StepStorage(NamedTuple):
    """A storage that a step allocates, without its size. `line` is the user's line of code, empty for none."""

    role: Role
    layer: int
    op: str
    dtype: str
    dims: int
    stream: int
    line: str


@dataclass(frozen=True)
class Structure:
    """The properties of a step that do not depend on lengths.

    `cached` are the kinds of the layers of its cache, `hosted` the number of tensors that each has on the host.
    """

    events: tuple[StepEvent, ...]
    storages: tuple[StepStorage, ...]
    cached: tuple[str, ...]
    hosted: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The positions of each storage's dimensions among the sizes of a step, after the sizes of the events."""
        return tuple(accumulate((storage.dims for storage in self.storages), initial=len(self.storages)))


@dataclass(frozen=True, eq=False)
class Step:
    """One step: its structure and its sizes: the bytes that each event adds, the bytes of each storage, the dimensions
    of all storages, the bytes of each layer of the cache, the bytes of all their tensors on the host.
    """

    structure: Structure
    sizes: Sizes

    @property
    def deltas(self) -> Sizes:
        """The bytes of each event."""
        return self.sizes[: len(self.structure.events)]

    @property
    def cached(self) -> tuple[CachedLayer, ...]:
        """The layers of the cache at the end of the step."""
        kinds, counts = self.structure.cached, self.structure.hosted
        sizes = self.sizes[len(self.sizes) - len(kinds) - sum(counts) :].tolist()
        ends = list(accumulate(counts, initial=len(kinds)))
        hosted = [tuple(sizes[low:high]) for low, high in pairwise(ends)] or [()] * len(kinds)
        return tuple(
            CachedLayer(kind, size, hosted=on_host) for kind, size, on_host in zip(kinds, sizes, hosted, strict=False)
        )


def steps_of(trace: Trace, cached: Sequence[Sequence[CachedLayer]]) -> list[Step]:
    """Cut a traced generation into its setup, its prefill and its decode steps; events after these are dropped.

    `cached` has the layers of the cache after the prefill and after each step. Storages without bytes are in no step.
    """
    import numpy as np

    phases = [split_phase(phase) for phase in trace.phases]
    numbers = [{"setup": SETUP, PREFILL: 0, DECODE: step}.get(name) for name, step in phases]
    events_of: list[list[Event]] = [[] for _ in range(len(cached) + 1)]
    for event in trace.events:
        if (of_step := numbers[event.phase]) is not None:
            events_of[of_step + 1].append(event)
    births: dict[int, tuple[int, int]] = {}
    """For each storage the step that allocated it, and its slot there."""
    structures: dict[Structure, Structure] = {}
    """Most steps have equal structures, which share one object."""
    steps = []
    for number, events in enumerate(events_of, SETUP):
        new = [index for index in dict.fromkeys(event.storage for event in events) if index not in births]
        births.update((index, (number, slot)) for slot, index in enumerate(new))
        storages = rows_at(trace.storages, new)
        layers = cached[number] if number >= 0 else ()
        step_events = []
        for event in events:
            born, slot = births[event.storage]
            age = SETUP if born == SETUP else number - born
            step_events.append(StepEvent(age, slot, event.layer, op=event.op, stage=phases[event.phase][0]))
        structure = Structure(
            events=tuple(step_events),
            storages=tuple(_without_sizes(storage, trace.lines) for storage in storages),
            cached=tuple(layer.kind for layer in layers),
            hosted=tuple(len(layer.hosted) for layer in layers),
        )
        sizes = np.array([*(event.delta for event in events), *_sizes(storages, layers)], dtype=np.int64)
        steps.append(Step(structures.setdefault(structure, structure), sizes))
    return steps


def _without_sizes(storage: Storage, lines: Sequence[str]) -> StepStorage:
    return StepStorage(
        role=storage.role,
        layer=storage.layer,
        op=storage.op,
        dtype=storage.dtype,
        dims=len(storage.shape),
        stream=storage.stream,
        line=lines[storage.line] if storage.line >= 0 else "",
    )


def _sizes(storages: Sequence[Storage], layers: Sequence[CachedLayer]) -> Iterator[int]:
    """The sizes of a step behind those of its events, in the order of `Step`."""
    yield from (storage.bytes for storage in storages)
    yield from (dimension for storage in storages for dimension in storage.shape)
    yield from (layer.bytes for layer in layers)
    yield from (size for layer in layers for size in layer.hosted)


# -- from steps to the columns of a run -------------------------------------------------------------------------------


def columns_of(steps: Iterable[tuple[Step, Sequence[int] | None]]) -> dict[str, Any]:
    """Build the fields of a trace that come from its steps, the setup first, each with the numbers of its events to
    record (None: all). If an event of a storage is dropped, later ones must be too.
    """
    import numpy as np

    plans, phases = dict[tuple[int, int], _Plan](), dict[str, int]()
    of_storages: list[Sequence[Integers | Coded]] = []
    of_events: list[Sequence[Integers | Coded]] = []
    numbers: list[Integers] = []
    """For each step the numbers of the storages that it allocated, by their slot in the step."""
    count = 0
    for number, (step, recorded) in enumerate(steps, SETUP):
        key = id(step.structure), id(recorded)
        if key not in plans:
            plans[key] = _plan(step.structure, recorded and tuple(recorded), new_age=min(number, 0))
        plan = plans[key]
        numbers.append(plan.numbered(count))
        count += len(plan.new)
        storages = np.empty(len(plan.recorded), dtype=np.int32)
        for age, positions, slots in plan.ages:
            storages[positions] = numbers[0 if age == SETUP else number - age + 1][slots]
        labels = (f"{stage} {number}" if number > 0 else stage for stage in plan.stages)
        phase = _column(phases.setdefault(label, len(phases)) for label in labels)[plan.stage]
        of_events.append((storages, step.deltas[plan.recorded], phase, plan.layers, plan.ops))
        of_storages.append((step.sizes[plan.bytes], step.sizes[plan.sizes], *plan.storages))
    size, dimensions, role, layer, op, dtype, rank, stream, line = map(_joined, zip(*of_storages, strict=True))
    shape = Shapes(dimensions, np.cumsum(rank) - rank, rank)
    line, lines = line.numbers - 1, line.values[1:]
    unsaved, doubt = np.full(count, -1, dtype=np.int32), np.zeros(count, dtype=np.int32)
    return {
        "phases": tuple(phases),
        "storages": Columns(Storage, size, role, layer, op, dtype, shape, unsaved, stream, line, unsaved, doubt),
        "events": Columns(Event, *map(_joined, zip(*of_events, strict=True))),
        "lines": lines,
    }


def _joined(columns: Sequence[Any]) -> Any:
    """Join columns of one kind."""
    import numpy as np

    if not isinstance(columns[0], Coded):
        return np.concatenate(columns)
    table: dict[str, int] = {}
    distinct = {id(column): column for column in columns}
    codes = {
        key: _column(table.setdefault(text, len(table)) for text in column.values) for key, column in distinct.items()
    }
    return Coded(np.concatenate([codes[id(column)][column.numbers] for column in columns]), tuple(table))


class _Plan:
    """The columns that all steps of one structure share, and where their sizes go.

    `recorded` are the numbers of the events to record. `ages` lists, for each age of their storages, the positions of
    the events and the slots of the storages. `new` are the slots of the storages that a step allocates, whose age
    is `new_age`.
    """

    def __init__(self, structure: Structure, recorded: Sequence[int] | None, *, new_age: int) -> None:
        import numpy as np

        self._slots = len(structure.storages)
        self.recorded = np.arange(len(structure.events)) if recorded is None else np.array(recorded)
        events = [structure.events[number] for number in self.recorded.tolist()]
        self.stages = list(dict.fromkeys(event.stage for event in events))
        self.stage = _column(self.stages.index(event.stage) for event in events)
        self.layers = _column(event.layer for event in events)
        self.ops = _coded(event.op for event in events)
        self.new = _column(dict.fromkeys(event.slot for event in events if event.age == new_age))
        new = [structure.storages[slot] for slot in self.new.tolist()]
        self.storages = (
            _coded(storage.role for storage in new),
            _column(storage.layer for storage in new),
            _coded(storage.op for storage in new),
            _coded(storage.dtype for storage in new),
            _column(storage.dims for storage in new),
            _column(storage.stream for storage in new),
            _coded((storage.line for storage in new), {"": 0}),
        )
        self.bytes = len(structure.events) + self.new
        starts = [len(structure.events) + structure.offsets[slot] for slot in self.new.tolist()]
        ranges = (range(start, start + storage.dims) for start, storage in zip(starts, new, strict=True))
        self.sizes = _column(number for dimensions in ranges for number in dimensions)
        of_age: dict[int, list[int]] = {}
        for position, event in enumerate(events):
            of_age.setdefault(event.age, []).append(position)
        self.ages = [
            (age, np.array(positions), _column(events[position].slot for position in positions))
            for age, positions in of_age.items()
        ]

    def numbered(self, first: int) -> Integers:
        """Number the storages that a step allocates, from `first` on, by their slot; -1 for others."""
        import numpy as np

        numbers = np.full(self._slots, -1, dtype=np.int32)
        numbers[self.new] = np.arange(first, first + len(self.new))
        return numbers


_plan = lru_cache(maxsize=32)(_Plan)
"""The plan of a structure: runs of other sizes have steps of the same structures."""


def _column(values: Iterable[int]) -> Integers:
    import numpy as np

    return np.fromiter(values, dtype=np.int32)


def _coded(texts: Iterable[str], first: Mapping[str, int] = MappingProxyType({})) -> Coded:
    table = dict(first)
    return Coded(_column(table.setdefault(text, len(table)) for text in texts), tuple(table))
