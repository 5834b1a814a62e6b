"""A traced generation cut into steps that can be compared, and put together again at another length.

A step names the storages that its events are about by where they were made: so many steps ago, as the so-manyth of that
step. Two steps of one `structure` differ in nothing but their `sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from memsize.analysis.flow import Flow
from memsize.records.aggregates import split_phase
from memsize.records.roles import Role
from memsize.records.trace import Event, Storage, Trace
from memsize.workloads.caches import CachedLayer
from memsize.workloads.generation import DECODE, PREFILL

if TYPE_CHECKING:
    import numpy as np

    Sizes = np.ndarray[Any, np.dtype[np.int64]]

_event: Callable[[Iterable[Any]], Event] = partial(tuple.__new__, Event)
_storage: Callable[[Iterable[Any]], Storage] = partial(tuple.__new__, Storage)
"""Make named tuples of their values in order: in a third of the time that their constructors take."""
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
        steps.append(Step(structure, np.array(sizes, dtype=np.int64)))
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
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    lines: tuple[str, ...]


def put_together(steps: Iterable[tuple[Step, Sequence[int] | None]]) -> Put:
    """The run that makes `steps`, the setup first; of some only the events of these numbers (None: all of them).

    An event of a storage that was left out before must be left out too.
    """
    phases: dict[str, int] = {}
    lines: dict[str, int] = {}
    storages: list[Storage] = []
    events: list[Event] = []
    for number, (step, plan, about) in enumerate(_planned(steps, lines), SETUP):
        storages.extend(plan.storages(step))
        labels = {stage: f"{stage} {number}" if number > 0 else stage for stage in dict.fromkeys(plan.stages)}
        inside = [phases.setdefault(labels[stage], len(phases)) for stage in plan.stages]
        columns = about.tolist(), step.deltas[plan.kept].tolist(), inside, plan.layers, plan.ops
        events.extend(map(_event, zip(*columns, strict=True)))
    return Put(tuple(phases), tuple(storages), tuple(events), tuple(lines))


def flow_together(steps: Iterable[tuple[Step, Sequence[int] | None]]) -> Flow:
    """The events of the run that `put_together` makes, without its record."""
    import numpy as np

    storages: list[Sizes] = []
    deltas: list[Sizes] = []
    streams: dict[int, int] = {}
    count = 0
    for step, plan, about in _planned(steps, {}):
        storages.append(about)
        deltas.append(step.deltas[plan.kept])
        streams |= {count + place: stream for place, stream in enumerate(plan.streams) if stream}
        count += len(plan.made)
    return Flow(np.concatenate(storages), np.concatenate(deltas), streams)


def _planned(
    steps: Iterable[tuple[Step, Sequence[int] | None]], lines: dict[str, int]
) -> Iterator[tuple[Step, _Plan, Sizes]]:
    """Each step with its plan, and the numbers of the storages that its events are about."""
    import numpy as np

    numbered: list[Sizes] = []
    """For each step the numbers of the storages that it made, by their places."""
    plans: dict[tuple[int, int], _Plan] = {}
    count = 0
    for number, (step, kept) in enumerate(steps, SETUP):
        key = id(step.structure), id(kept)
        plan = plans.get(key) or plans.setdefault(key, _Plan(step.structure, kept, min(number, 0), lines))
        own = np.full(len(step.structure.storages), -1)
        own[plan.made] = np.arange(count, count + len(plan.made))
        count += len(plan.made)
        numbered.append(own)
        about = np.empty(len(plan.kept), dtype=np.int64)
        for age, at, places in plan.ages:
            about[at] = numbered[0 if age == SETUP else number - age + 1][places]
        yield step, plan, about


class _Plan:
    """What the steps of one structure put into a record: the numbers of the events that are `kept`, by the `ages` of
    their storages the positions and places of those, and the places and `streams` of those that are `made`, which are
    of age `new`. The numbers of lines are those in `lines`, to which new ones are added.
    """

    def __init__(self, structure: Structure, kept: Sequence[int] | None, new: int, lines: dict[str, int]) -> None:
        import numpy as np

        self.kept = list(range(len(structure.events))) if kept is None else list(kept)
        happenings = [structure.events[index] for index in self.kept]
        self.layers = [each.layer for each in happenings]
        self.ops = [each.op for each in happenings]
        self.stages = [each.stage for each in happenings]
        self.made = list(dict.fromkeys(each.place for each in happenings if each.age == new))
        made = [structure.storages[place] for place in self.made]
        self._roles = [each.role for each in made]
        self._layers = [each.layer for each in made]
        self._ops = [each.op for each in made]
        self._dtypes = [each.dtype for each in made]
        self.streams = [each.stream for each in made]
        self._lines = [lines.setdefault(each.line, len(lines)) if each.line else -1 for each in made]
        starts = [len(structure.events) + structure.offsets[place] for place in self.made]
        self._shapes = [slice(start, start + each.dims) for start, each in zip(starts, made, strict=True)]
        self._bytes = [len(structure.events) + place for place in self.made]
        of_age: dict[int, list[int]] = {}
        for position, each in enumerate(happenings):
            of_age.setdefault(each.age, []).append(position)
        self.ages = [(age, at, np.array([happenings[n].place for n in at])) for age, at in of_age.items()]

    def storages(self, step: Step) -> Iterator[Storage]:
        """The storages that `step` makes of them, as a record has them."""
        sizes = step.sizes.tolist()
        taken = step.sizes[self._bytes].tolist()
        shapes = [tuple(sizes[dimensions]) for dimensions in self._shapes]
        where = self._roles, self._layers, self._ops, self._dtypes, shapes, repeat(-1), self.streams, self._lines
        return map(_storage, zip(taken, *where, repeat(-1), strict=False))
