"""Forecast the memory of sizes that were not run, from up to three runs of other sizes.

Runs of different sizes usually make the same events with other numbers of bytes. A forecast extends each event along
the line, or the parabola, through the available runs, and replays the whole like a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from memsize.analysis.fit.footprint import Footprint, replay_with_capacity
from memsize.device.allocation_events import AllocationEvents
from memsize.errors import InputError
from memsize.records.roles import FIXED
from memsize.records.trace import Storage

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int], np.dtype[np.float64]]

_MOST_EVENTS: Final = 50_000
"""How many events may be replayed to check every size: about a tenth of a second's worth."""
_MOST_REPLAYS: Final = 8
"""How many sizes are replayed otherwise, below the limit of the tensors alone, and beyond the edge: fewer for runs of
so many events that these exceed `_MOST_EVENTS`.
"""


class Forecast:
    """The events of other sizes, from one to three runs that made the same events."""

    def __init__(self, runs: Sequence[Footprint], *, powers: bool = False) -> None:
        import numpy as np

        self.config = runs[0].config
        self.runs = tuple(sorted(runs, key=lambda run: run.size))
        self._flow = runs[0].flow
        self._signs = np.sign(self._flow.deltas.astype(np.float64))
        self._amounts = [np.abs(run.flow.deltas.astype(np.float64)) for run in self.runs]
        self._exponents = _exponents(runs[0], powers) if len(runs) == 1 else None

    def pairs(self, size: int) -> list[tuple[int, int]]:
        """List the events of `size`: storages, and the bytes that they gain or lose."""
        return list(self.flow(size))

    def flow(self, size: int) -> AllocationEvents:
        """Return the events of `size` as the allocator takes them."""
        return replace(self._flow, deltas=self._deltas(size).astype(int))

    def requested(self, size: int) -> int:
        """Return the most bytes that tensors of `size` request at one moment."""
        return int(self._deltas(size).cumsum().max(initial=0))

    def fits(self, size: int, capacity: int) -> bool:
        """Whether `size` would fit `capacity`."""
        try:
            return replay_with_capacity(self.flow(size), self.config, capacity).out_of_memory is None
        except InputError:  # rounding broke a storage that is resized in place
            return False

    def largest(self, capacity: int, most: int, step: int = 1, least: int = 0) -> int:
        """Return the largest multiple of `step` up to `most` that would fit, or `least`, which fits, if none would.

        The bytes that tensors request give an upper limit. Below it sizes are replayed: all where that is quick, else a
        few, and then the edge is found by bisection.
        """

        def fits(multiple: int) -> bool:
            return self.fits(multiple * step, capacity)

        low = least // step
        top = _last(lambda multiple: self.requested(multiple * step) <= capacity, low, most // step)
        events = len(self._flow.storages)
        replays = max(1, min(_MOST_REPLAYS, _MOST_EVENTS // events))
        if (top - low) * events <= _MOST_EVENTS:
            replays = top - low
        below = max(top - replays, low)
        if near := next(filter(fits, range(top, below, -1)), None):
            return near * step
        edge = _edge(fits, low, self._about(capacity, top * step) // step, below)
        return self._beyond(fits, edge, below, replays) * step

    @staticmethod
    def _beyond(fits: Callable[[int], bool], edge: int, below: int, replays: int) -> int:
        """Look for a larger number that `fits` beyond the edge: rows that are padded waste the least at every eighth,
        so others as far apart may fit as well.
        """
        beyond = range(min(edge + _MOST_REPLAYS, below), edge, -1)[:replays]
        apart = next(filter(fits, beyond), edge) - edge
        if apart < 2:
            return edge + apart
        return edge + apart * _last(lambda steps: fits(edge + steps * apart), 1, (below - edge) // apart)

    def _about(self, capacity: int, top: int) -> int:
        """Estimate the largest size that fits from the bytes reserved by the closest run."""
        near = min(self.runs, key=lambda run: abs(run.requested - capacity))
        if near.size == top:
            return top
        slope = (self.requested(top) - near.requested) / (top - near.size)
        return near.size + int((capacity - near.unbounded.reserved.bytes) / slope) if slope > 0 else top

    def _deltas(self, size: int) -> Array:
        amounts = self._at(size).round().clip(min=1)
        return amounts * self._signs  # type: ignore[no-any-return]

    def _at(self, size: int) -> Any:
        sizes, amounts = [run.size for run in self.runs], self._amounts
        if self._exponents is not None:
            return amounts[0] * (size / sizes[0]) ** self._exponents
        line = amounts[0] + (amounts[-1] - amounts[0]) * ((size - sizes[0]) / (sizes[-1] - sizes[0]))
        if len(sizes) < 3:
            return line
        # Newton's form: what the middle run shows beyond the line of the other two, as a parabola through both.
        middle = amounts[0] + (amounts[-1] - amounts[0]) * ((sizes[1] - sizes[0]) / (sizes[-1] - sizes[0]))
        # Only upwards: memory grows faster than its input, in steps, or not at all, and steps are no parabola.
        bend = ((amounts[1] - middle) / ((sizes[1] - sizes[0]) * (sizes[1] - sizes[-1]))).clip(min=0)
        return line + bend * ((size - sizes[0]) * (size - sizes[-1]))


def _exponents(run: Footprint, powers: bool) -> Array:
    """Guess from one run how the bytes of each event grow with the size: dimensions that the size divides vary.

    With `powers`, two such dimensions grow as the square: the scores of an attention.
    """
    import numpy as np

    size = run.size

    def exponent(storage: Storage) -> int:
        if storage.role in FIXED:
            return 0
        dims = sum(1 for dim in storage.shape if dim and dim % size == 0)
        return dims if powers else min(dims, 1)

    return np.fromiter(map(exponent, run.trace.storages), dtype=np.float64)[run.flow.storages]


def _last(holds: Callable[[int], bool], least: int, most: int) -> int:
    """Bisect for the largest number up to `most` for which `holds`, if it holds from `least` up to some number."""
    if most <= least or holds(most):
        return most
    low, high = least, least + 1
    while high < most and holds(high):
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _edge(holds: Callable[[int], bool], least: int, about: int, most: int) -> int:
    """Find the same number as `_last` by looking around a guess, `about`."""
    about = min(max(about, least), most)
    if about == least or holds(about):
        return _last(holds, about, most)
    return about - 1 - _last(lambda down: not holds(about - down), 0, about - least - 1)


def forecast(runs: Mapping[int, Footprint], capacity: int, *, powers: bool = False) -> Forecast | None:
    """Make the best forecast that `runs` allow near `capacity`; None where there is no run."""
    groups: dict[int, list[Footprint]] = {}
    for run in runs.values():
        groups.setdefault(run.shape, []).append(run)
    if not groups:
        return None

    def distance(run: Footprint) -> int:
        return abs(run.requested - capacity)

    ordered = [sorted(_edges(group), key=distance) for group in groups.values()]
    best = min(ordered, key=lambda group: (len(group) < 2, distance(group[0])))
    return Forecast(_spread(best[:3]), powers=powers)


def _edges(runs: list[Footprint]) -> list[Footprint]:
    """Select the largest run of each need: where memory grows in steps, two runs of one step would point nowhere.

    Two runs are selected where all need the same, which shows that nothing grows.
    """
    ascending = sorted(runs, key=lambda run: run.size)
    edges = list({run.requested: run for run in ascending}.values())
    return edges if len(edges) > 1 or len(runs) < 2 else [ascending[0], ascending[-1]]


def _spread(runs: list[Footprint]) -> list[Footprint]:
    """Drop one of three runs that lie on one line, so that rounding cannot bend it."""
    if len(runs) < 3:
        return runs
    import numpy as np

    first, middle, last = sorted(runs, key=lambda run: run.size)
    off = np.abs(Forecast([first, last]).flow(middle.size).deltas - middle.flow.deltas)
    return runs if off.max(initial=0) > 1 else runs[:2]
