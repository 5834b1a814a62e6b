"""Cut a traced generation into steps that can be compared.

The events of a step identify a storage by its age, the number of steps since it was allocated, and its slot among the
storages of that step. Two steps with the same `structure` differ in their `sizes` alone.
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
"""The number of the setup, before the prefill, and the `age` of its storages."""


class StepEvent(NamedTuple):
    """An event of a step, in a layer and by an op, about the storage in `slot` of the step `age` steps before.

    `stage` tells phases of one step apart.
    """

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
    """One step: its structure and its sizes.

    The order of the sizes: the bytes that each event adds, the bytes of each storage, the dimensions of all storages,
    the bytes of each layer of the cache, the bytes of all their tensors on the host.
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
    births: dict[int, tuple[int, int]] = {}
    """For each storage the step that allocated it, and its slot there."""
    structures: dict[Structure, Structure] = {}
    """Most steps have equal structures, which share one object."""
    steps = []
    for number, events in enumerate(_events_of_steps(trace, len(cached) + 1), SETUP):
        storages = [trace.storages[index] for index in _allocated(events, number, births)]
        layers = cached[number] if number >= 0 else ()
        structure = Structure(
            events=tuple(_step_event(event, number, births=births, phases=trace.phases) for event in events),
            storages=tuple(_step_storage(storage, trace.lines) for storage in storages),
            cached=tuple(layer.kind for layer in layers),
            hosted=tuple(len(layer.hosted) for layer in layers),
        )
        steps.append(Step(structures.setdefault(structure, structure), _sizes(events, storages, layers)))
    return steps


def _events_of_steps(trace: Trace, count: int) -> list[list[Event]]:
    """Sort events into `count` steps, the setup first."""
    numbers = [_number(phase) for phase in trace.phases]
    steps: list[list[Event]] = [[] for _ in range(count)]
    for event in trace.events:
        number = numbers[event.phase]
        if number is not None:
            steps[number + 1].append(event)
    return steps


def _number(phase: str) -> int | None:
    """Return the step of a phase: `SETUP`, 0 for the prefill, then the decode steps; None for later phases."""
    name, step = split_phase(phase)
    return {"setup": SETUP, PREFILL: 0, DECODE: step}.get(name)


def _allocated(events: Sequence[Event], number: int, births: dict[int, tuple[int, int]]) -> list[int]:
    """List the storages that first occur in the events of step `number`, and enter them in `births`."""
    new = [storage for storage in dict.fromkeys(event.storage for event in events) if storage not in births]
    births.update((storage, (number, slot)) for slot, storage in enumerate(new))
    return new


def _step_event(event: Event, number: int, *, births: dict[int, tuple[int, int]], phases: Sequence[str]) -> StepEvent:
    born, slot = births[event.storage]
    age = SETUP if born == SETUP else number - born
    return StepEvent(age, slot, event.layer, op=event.op, stage=split_phase(phases[event.phase])[0])


def _step_storage(storage: Storage, lines: Sequence[str]) -> StepStorage:
    return StepStorage(
        role=storage.role,
        layer=storage.layer,
        op=storage.op,
        dtype=storage.dtype,
        dims=len(storage.shape),
        stream=storage.stream,
        line=lines[storage.line] if storage.line >= 0 else "",
    )


def _sizes(events: Sequence[Event], storages: Sequence[Storage], layers: Sequence[CachedLayer]) -> Sizes:
    """Collect the sizes of a step in the order of `Step`."""
    import numpy as np

    sizes = [
        *(event.delta for event in events),
        *(storage.bytes for storage in storages),
        *(dimension for storage in storages for dimension in storage.shape),
        *(layer.bytes for layer in layers),
        *(size for layer in layers for size in layer.hosted),
    ]
    return np.array(sizes, dtype=np.int64)
