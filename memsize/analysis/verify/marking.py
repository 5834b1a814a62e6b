"""Which operation of which layer makes the allocations of a real step.

The ledger listens to one more step, as it does in a trace, and notes how many allocations the allocator had made before
and after each operation. Listening changes a few things in PyTorch (composite formulas avoid in-place operations while
a dispatch mode is active), so that the step which is measured runs without it; its allocations get their places from
the marked one by matching sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from memsize.analysis.verify.history import Change
from memsize.analysis.verify.matching import Pair, gaps, matched
from memsize.records.measurement import NOWHERE, Log, Place, log_of
from memsize.tracing.ledger import Ledger
from memsize.tracing.module_calls import Calls
from memsize.tracing.run import Setup
from memsize.workloads.optimizers import steps_watched


class Mark(NamedTuple):
    """The allocations from `start` up to `stop` are made at `place`."""

    start: int
    stop: int
    place: Place


class Marks(Ledger):
    """A ledger that also notes what the allocator counts. `count` says how many allocations it has made so far."""

    def __init__(self, device: str, count: Callable[[], int]) -> None:
        super().__init__(device)
        self.marks: list[Mark] = []
        self._counted = count
        self._paths: list[str] = []

    @contextmanager
    def listening(self, setup: Setup) -> Iterator[list[Mark]]:
        """While open, operations on the setup's model are marked."""
        calls = Calls(setup.model, self)
        calls.complete = True  # no table is wanted: only which module is running
        self._paths = [seen.path for seen in calls.seen]
        with calls.watched(), steps_watched(self), self:
            yield self.marks
        self.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self._counted()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        stop = self._counted()
        if stop > start:
            clock = self.clock
            layer = self._paths[clock.layer] if clock.layer >= 0 else None
            self.marks.append(Mark(start, stop, Place(clock.phases[clock.phase], layer, func._overloadpacket.__name__)))
        return result


def placed(events: Sequence[Change], marked: Sequence[Change], marks: Sequence[Mark]) -> Log:
    """The log of `events`, each allocation at the place that the marked step has it; ends have no place of their own.

    `marks` count the allocations of `marked` from 0.
    """
    sizes = [event.delta for event in events if event.delta > 0]
    others = [event.delta for event in marked if event.delta > 0]
    places = dict.fromkeys(range(len(sizes)), NOWHERE)
    places |= {index: _place(marks, other) for index, other in _same(sizes, others)}
    numbers = iter(range(len(sizes)))
    return log_of((*event, places[next(numbers)] if event.delta > 0 else NOWHERE) for event in events)


def _same(sizes: Sequence[int], others: Sequence[int]) -> Iterator[Pair]:
    """Which allocation of one step is which of the other.

    A router sends other tokens to an expert in each step: between two that are the same, as many of other sizes are
    the same in order.
    """
    pairs = matched(sizes, others)
    yield from pairs
    for low, high, other_low, other_high in gaps(pairs, len(sizes), len(others)):
        if high - low == other_high - other_low:
            yield from zip(range(low, high), range(other_low, other_high), strict=True)


def _place(marks: Sequence[Mark], index: int) -> Place:
    """The place of the allocation with that number. Marks rise and do not overlap."""
    found = bisect_right(marks, index, key=lambda mark: mark.start) - 1
    return marks[found].place if found >= 0 and index < marks[found].stop else NOWHERE
