"""A traced generation cut into steps that can be compared, and put together again at another length.

A step names the storages that its events are about by where they were made: so many steps ago, as the so-manyth of that
step. Two steps of one `structure` differ in nothing but their `sizes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from memsize.records.aggregates import split_phase
from memsize.records.columns import Coded, Columns, Shapes
from memsize.records.roles import Role
from memsize.records.trace import Event, Storage, Trace
from memsize.workloads.caches import CachedLayer
from memsize.workloads.generation import DECODE, PREFILL

if TYPE_CHECKING:
    import numpy as np

    from memsize.records.columns import Integers

    Sizes = np.ndarray[Any, np.dtype[np.int64]]

SETUP = -1
"""The `age` of what was there before the prefill, which is numbered on its own."""


class Happening(NamedTuple):
    """An event of a step: the storage that step − `age` made as its `place`th, in which layer and by which op.

    `stage` tells phases of one step apart.
    """

    age: int
    place: int
    layer: int
    op: str
    stage: str


class Made(NamedTuple):
    """A storage that a step makes, apart from its size. `line` is the text of the line that made it, empty for none."""

    role: Role
    layer: int
    op: str
    dtype: str
    dims: int
    stream: int
    line: str


@dataclass(frozen=True)
class Structure:
    """All of a step that does not depend on lengths. `cached` are the kinds of the layers of its cache, `hosted` is how
    many tensors each of them has on the host.
    """

    events: tuple[Happening, ...]
    storages: tuple[Made, ...]
    cached: tuple[str, ...]
    hosted: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the dimensions of each storage stand among its step's sizes, counted after those of the events."""
        return tuple(accumulate((made.dims for made in self.storages), initial=len(self.storages)))


@dataclass(frozen=True, eq=False)
class Step:
    """One step: its structure; and its sizes in this order: the difference of each event, the bytes of each storage,
    all their dimensions, the bytes of each layer of the cache, those of each of its tensors on the host.
    """

    structure: Structure
    sizes: Sizes

    @property
    def deltas(self) -> Sizes:
        """The bytes of each event."""
        return self.sizes[: len(self.structure.events)]

    @property
    def cached(self) -> tuple[CachedLayer, ...]:
        """What each layer of the cache holds at its end."""
        kinds, counts = self.structure.cached, self.structure.hosted
        sizes = self.sizes[len(self.sizes) - len(kinds) - sum(counts) :].tolist()
        ends = list(accumulate(counts, initial=len(kinds)))
        hosted = [tuple(sizes[low:high]) for low, high in pairwise(ends)] or [()] * len(kinds)
        return tuple(
            CachedLayer(kind, size, hosted=there) for kind, size, there in zip(kinds, sizes, hosted, strict=False)
        )


def steps_of(trace: Trace, cached: Sequence[Sequence[CachedLayer]]) -> list[Step]:
    """The steps of a traced generation: its setup, its prefill, and each decode step; what came after is left out.

    `cached` says what the cache held after the prefill and after each step. Storages without bytes are in no step.
    """
    import numpy as np

    numbers = [_number(phase) for phase in trace.phases]
    cut: list[list[Event]] = [[] for _ in range(len(cached) + 1)]
    for event in trace.events:
        number = numbers[event.phase]
        if number is not None:
            cut[number + 1].append(event)
    places: dict[int, tuple[int, int]] = {}
    structures: dict[Structure, Structure] = {}
    """Those of most steps are equal: one stands for all."""
    steps = []
    for number, events in enumerate(cut, SETUP):
        made: list[int] = []
        happenings = []
        for event in events:
            if event.storage not in places:
                places[event.storage] = number, len(made)
                made.append(event.storage)
            born, place = places[event.storage]
            age = SETUP if born == SETUP else number - born
            stage = split_phase(trace.phases[event.phase])[0]
            happenings.append(Happening(age, place, event.layer, event.op, stage))
        storages = [trace.storages[index] for index in made]
        layers = cached[number] if number >= 0 else ()
        kinds = tuple(
            Made(each.role, each.layer, each.op, each.dtype, len(each.shape), each.stream, _line(trace, each))
            for each in storages
        )
        sizes = [
            *(event.delta for event in events),
            *(each.bytes for each in storages),
            *(size for each in storages for size in each.shape),
            *(layer.bytes for layer in layers),
            *(size for layer in layers for size in layer.hosted),
        ]
        counts = tuple(len(layer.hosted) for layer in layers)
        structure = Structure(tuple(happenings), kinds, tuple(layer.kind for layer in layers), counts)
        steps.append(Step(structures.setdefault(structure, structure), np.array(sizes, dtype=np.int64)))
    return steps


def _line(trace: Trace, storage: Storage) -> str:
    """The line that made a storage: each record numbers its lines as it meets them."""
    return trace.lines[storage.line] if storage.line >= 0 else ""


def _number(phase: str) -> int | None:
    """Which step a phase belongs to: `SETUP`, 0 for the prefill, then the decode steps; None for what came after."""
    name, step = split_phase(phase)
    return {"setup": SETUP, PREFILL: 0, DECODE: step}.get(name)


class Put(NamedTuple):
    """Steps put together: the phases, storages, events and lines of a record."""

    phases: tuple[str, ...]
    storages: Columns[Storage]
    events: Columns[Event]
    lines: tuple[str, ...]


def put_together(steps: Iterable[tuple[Step, Sequence[int] | None]]) -> Put:
    """The run that makes `steps`, the setup first; of some only the events of these numbers (None: all of them).

    An event of a storage that was left out before must be left out too.
    """
    import numpy as np

    phases: dict[str, int] = {}
    tables = _Tables({}, {}, {}, {})
    plans: dict[tuple[int, int], _Plan] = {}
    numbered: list[Integers] = []
    """For each step the numbers of the storages that it made, by their places."""
    made: list[Sequence[Integers]] = []
    happened: list[Sequence[Integers]] = []
    count = 0
    for number, (step, kept) in enumerate(steps, SETUP):
        key = id(step.structure), id(kept)
        plan = plans.get(key) or plans.setdefault(key, _Plan(step.structure, kept, min(number, 0), tables))
        numbered.append(plan.numbered(count))
        count += len(plan.made)
        labels = (f"{stage} {number}" if number > 0 else stage for stage in plan.stages)
        inside = np.array([phases.setdefault(label, len(phases)) for label in labels], dtype=np.int32)
        about = np.empty(len(plan.kept), dtype=np.int32)
        for age, at, places in plan.ages:
            about[at] = numbered[0 if age == SETUP else number - age + 1][places]
        happened.append((about, step.deltas[plan.kept], inside[plan.stage], plan.layers, plan.ops))
        made.append((step.sizes[plan.bytes], step.sizes[plan.sizes], *plan.storages))
    taken, sizes, role, layer, op, dtype, rank, stream, line = map(np.concatenate, zip(*made, strict=True))
    about, deltas, phase, within, by = map(np.concatenate, zip(*happened, strict=True))
    shape, none = Shapes(sizes, np.cumsum(rank) - rank, rank), np.full(count, -1, dtype=np.int32)
    ops = tuple(tables.ops)
    stored = Coded(role, tuple(tables.roles)), layer, Coded(op, ops), Coded(dtype, tuple(tables.dtypes)), shape
    return Put(
        tuple(phases),
        Columns(Storage, taken, *stored, none, stream, line, none),
        Columns(Event, about, deltas, phase, within, Coded(by, ops)),
        tuple(tables.lines),
    )


class _Tables(NamedTuple):
    """The numbers of the texts that columns have."""

    roles: dict[str, int]
    ops: dict[str, int]
    dtypes: dict[str, int]
    lines: dict[str, int]


class _Plan:
    """What the steps of one structure put into a record: the numbers of the events that are `kept`, by the `ages` of
    their storages the positions and places of those, and the places of those that are `made`, which are of age `new`;
    and what of the columns is the same for all of them.
    """

    def __init__(self, structure: Structure, kept: Sequence[int] | None, new: int, tables: _Tables) -> None:
        import numpy as np

        self._places = len(structure.storages)
        self.kept = np.arange(len(structure.events)) if kept is None else np.array(kept)
        happenings = [structure.events[index] for index in self.kept.tolist()]
        self.stages = list(dict.fromkeys(each.stage for each in happenings))
        self.stage = _column(self.stages.index(each.stage) for each in happenings)
        self.layers = _column(each.layer for each in happenings)
        self.ops = _coded((each.op for each in happenings), tables.ops)
        self.made = _column(dict.fromkeys(each.place for each in happenings if each.age == new))
        made = [structure.storages[place] for place in self.made.tolist()]
        self.storages = (
            _coded((each.role for each in made), tables.roles),
            _column(each.layer for each in made),
            _coded((each.op for each in made), tables.ops),
            _coded((each.dtype for each in made), tables.dtypes),
            _column(each.dims for each in made),
            _column(each.stream for each in made),
            _column(tables.lines.setdefault(each.line, len(tables.lines)) if each.line else -1 for each in made),
        )
        self.bytes = len(structure.events) + self.made
        starts = [len(structure.events) + structure.offsets[place] for place in self.made.tolist()]
        self.sizes = _column(
            n for start, each in zip(starts, made, strict=True) for n in range(start, start + each.dims)
        )
        of_age: dict[int, list[int]] = {}
        for position, each in enumerate(happenings):
            of_age.setdefault(each.age, []).append(position)
        self.ages = [(age, np.array(at), _column(happenings[n].place for n in at)) for age, at in of_age.items()]

    def numbered(self, first: int) -> Integers:
        """By their places, the numbers of the storages that a step makes, from `first` on; -1 for others."""
        import numpy as np

        own = np.full(self._places, -1, dtype=np.int32)
        own[self.made] = np.arange(first, first + len(self.made))
        return own


def _column(values: Iterable[int]) -> Integers:
    import numpy as np

    return np.fromiter(values, dtype=np.int32)


def _coded(texts: Iterable[str], table: dict[str, int]) -> Integers:
    return _column(table.setdefault(text, len(table)) for text in texts)
