"""A traced generation cut into steps that can be compared.

A step names the storages that its events are about by where they were made: so many steps ago, as the so-manyth of that
step. Two steps of one `structure` differ in nothing but their `sizes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from memsize.records.aggregates import split_phase
from memsize.records.roles import Role
from memsize.records.trace import Event, Storage, Trace
from memsize.workloads.caches import CachedLayer
from memsize.workloads.generation import DECODE, PREFILL

if TYPE_CHECKING:
    import numpy as np

    Sizes = np.ndarray[Any, np.dtype[np.int64]]

SETUP = -1
"""The `age` of what was there before the prefill, which is numbered on its own."""


class StepEvent(NamedTuple):
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

    events: tuple[StepEvent, ...]
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
            happenings.append(StepEvent(age, place, event.layer, event.op, stage))
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
