"""Training on texts of varying lengths: what the allocator reserves, by its settings and by the order of the lengths.

A training is traced at a few lengths. Steps at the lengths between are polynomials of these (`Curve`), and steps of any
lengths are joined to one run: its gradients and outputs are freed in the step after, whatever that one's length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from statistics import median_low
from typing import Final, NamedTuple

from memsize.analysis.generation.step_polynomials import ALIGNED, Curve
from memsize.analysis.generation.steps import Step, StepEvent, Structure
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.replay import replay
from memsize.errors import InputError
from memsize.records.aggregates import split_phase
from memsize.records.timeline import LengthRow
from memsize.records.trace import Trace
from memsize.spec.vary import Lengths
from memsize.units import MiB

_STEPS: Final = 48
"""The steps that are joined to a run."""
_DRAWS: Final = 3
"""The random orders of which the median is expected."""
_FEW: Final = 6
"""Up to so many different lengths are all traced: a polynomial takes as many."""
_SPLIT_SIZE: Final = 128 * MiB
TRACED_STEPS: Final = 3


def rows_of(
    trace: Callable[[int], Trace], lengths: Lengths, batch: int, config: AllocatorConfig, capacity: int
) -> tuple[LengthRow, ...]:
    """Replay a training on batches of these `lengths` under several settings. `trace` runs three steps of one length;
    the allocator has `capacity` bytes, and gives back what it cached before it runs out.

    Raises `InputError` for a training whose steps don't repeat.
    """
    batches = lengths.batches(_STEPS, batch)
    buckets = [min(1 << (length - 1).bit_length(), int(lengths)) for length in batches]
    trainings = _trainings(trace, {*batches, *buckets})
    row = partial(_row, trainings, capacity)
    return (
        row("as it is", _orders(batches), config),
        row("longest first", [sorted(batches, reverse=True)], config),
        row("buckets: powers of two", _orders(buckets), config),
        row("expandable_segments", _orders(batches), replace(config, expandable_segments=True)),
        row("max_split_size_mb:128", _orders(batches), replace(config, max_split_size=_SPLIT_SIZE)),
    )


def _orders(batches: Sequence[int]) -> list[list[int]]:
    """Some random orders, and two that fragment: growing, where each step needs more than any block that is free, and
    long ones between short ones.
    """
    orders = [random.Random(seed).sample(batches, len(batches)) for seed in range(_DRAWS)]
    growing = sorted(batches)
    half = len(growing) // 2
    between = chain.from_iterable(zip_longest(growing[:half], growing[half:]))
    return [*orders, growing, [length for length in between if length is not None]]


def _row(
    trainings: Mapping[int, _Training], capacity: int, setting: str, orders: list[list[int]], config: AllocatorConfig
) -> LengthRow:
    runs = [list(joined([trainings[length] for length in order])) for order in orders]
    replays = [replay(run, config, capacity=capacity) for run in runs]
    reserved = [math.inf if result.out_of_memory else result.reserved.bytes for result in replays]
    expected, worst = (
        None if size == math.inf else int(size) for size in (median_low(reserved[:_DRAWS]), max(reserved))
    )
    return LengthRow(setting, max(result.requested.bytes for result in replays), expected, worst)


# -- steps that are traced, interpolated and joined -------------------------------------------------------------------


def _trainings(trace: Callable[[int], Trace], lengths: set[int]) -> dict[int, _Training]:
    curve = Curve(lambda length: _as_one(trace(length)), degree=2)
    if len(lengths) <= _FEW:
        return {length: _cut(curve.trace(length)) for length in lengths}
    pieces = curve.pieces(range(min(lengths), max(lengths) + 1), period=ALIGNED)
    return {
        length: _cut(piece.interpolated(length) or curve.trace(length))
        for piece in pieces
        for length in lengths & {*piece.lengths}
    }


def _as_one(trace: Trace) -> Step:
    """A training as one step, whose events have the number of the training's step as their age."""
    import numpy as np

    phases = [split_phase(phase) for phase in trace.phases]
    events = tuple(
        StepEvent(phases[event.phase][1], event.storage, event.layer, op=event.op, stage=phases[event.phase][0])
        for event in trace.events
    )
    sizes = np.array([event.delta for event in trace.events], dtype=np.int64)
    return Step(Structure(events, storages=(), cached=()), sizes)


Event = tuple[int, int, int]
"""Which step made a storage (`_THIS`, `_LAST`, `_SETUP`), the number of the storage there, and the bytes."""
_THIS, _LAST, _SETUP = range(3)


class _Training(NamedTuple):
    """The events of a training on texts of one length: of its setup, its first step and a later one.

    Storages that a step frees for the one before are numbered in its order; `of_first` and `of_later` have the numbers
    that they have in the first step and in a later one.
    """

    setup: list[Event]
    first: list[Event]
    later: list[Event]
    of_first: list[int]
    of_later: list[int]


def training_of(trace: Trace) -> _Training:
    """Cut a traced training of three steps into parts that can be joined to a run."""
    return _cut(_as_one(trace))


def _cut(whole: Step) -> _Training:
    parts: list[list[Event]] = [[] for _ in range(TRACED_STEPS + 1)]
    births: dict[int, tuple[int, int]] = {}
    new, freed = [0] * len(parts), [dict[int, int]() for _ in parts]
    for event, delta in zip(whole.structure.events, whole.deltas.tolist(), strict=True):
        step = event.age
        if event.slot not in births:
            births[event.slot] = step, new[step]
            new[step] += 1
        born, number = births[event.slot]
        if born == step or not born:
            parts[step].append((_THIS if born == step else _SETUP, number, delta))
        elif born == step - 1:
            parts[step].append((_LAST, freed[step].setdefault(number, len(freed[step])), delta))
        else:
            raise InputError(f"{_FIXED}: a step frees what one before the last has made")
    if [event[:2] for event in parts[2]] != [event[:2] for event in parts[3]]:
        raise InputError(f"{_FIXED}: they differ from each other")
    return _Training(parts[0], parts[1], parts[3], list(freed[2]), list(freed[3]))


_FIXED: Final = "the steps of this training cannot be joined to a run of varying lengths"


def joined(trainings: Sequence[_Training]) -> Iterator[tuple[int, int]]:
    """The events of a run whose steps are those of `trainings`, one after the other: storages, and bytes."""
    yield from ((number, delta) for _, number, delta in trainings[0].setup)
    count = 1 + max((number for _, number, _ in trainings[0].setup), default=-1)
    last: list[int] = []
    """The storages that a step frees for the one before, in its order."""
    live: dict[int, int] = {}
    for position, training in enumerate(trainings):
        start = count
        for born, number, delta in training.later if position else training.first:
            storage = (start + number, last[number] if born == _LAST else -1, number)[born]
            if born == _LAST and delta < 0:
                delta = -live[storage]  # the texts of the step before had another length
            live[storage] = live.get(storage, 0) + delta
            count = max(count, storage + 1)
            yield storage, delta
        last = [start + number for number in (training.of_later if position else training.of_first)]
        live = {storage: live[storage] for storage in last}
