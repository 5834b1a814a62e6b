"""The largest size that fits: a forecast says where to look, and runs of that size and the next decide.

A size fits, needs more memory than there is, or is refused by the model. Refused sizes reveal the rule behind them: a
floor (a batch norm wants two samples), a divisor (groups of four), a ceiling (1,024 positions).

Runs of different sizes usually make the same events with other numbers of bytes. A forecast extends each event along
the line, or the parabola, through the available runs, and replays the whole like a run. It is never the answer itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from memsize.analysis.fit.footprint import Footprint
from memsize.device.allocation_events import AllocationEvents
from memsize.device.replay import replay
from memsize.errors import ForwardError, InputError
from memsize.records.roles import FIXED
from memsize.records.trace import Storage

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int], np.dtype[np.float64]]

Measure = Callable[[int], Footprint]
"""Runs a size; raises `ForwardError` where the model refuses it."""

MOST_RUNS: Final = 8
"""Runs per answer."""
LIMIT: Final = 2**20
"""The largest size that is tried."""
STARTS: Final = (13, 8, 60, 840, 1, 2)
"""The sizes that are tried first: a prime, which divides no other dimension, then sizes with many divisors."""
_COARSEST: Final = 4096
_FAR: Final = 4096
"""The first jump may always go at least this far."""
_JUMPS: Final = 2
"""How often a forecast that points beyond a size which does not fit is still followed."""
_REPLAYED: Final = 50_000
"""How many events may be replayed to check every size: about a tenth of a second's worth."""
_LOOKS: Final = 8
"""How many sizes are checked otherwise, below what the tensors alone allow, and beyond the edge: fewer where a run has
so many events that these are more than may be replayed.
"""


def largest(
    measure: Measure,
    capacity: int,
    *,
    start: int | None = None,
    known: Mapping[int, Footprint] | None = None,
    refused: Mapping[int, str] | None = None,
    most: int = LIMIT,
    runs: int = MOST_RUNS,
    powers: bool = False,
) -> Search:
    """The largest size that fits `capacity` bytes, by at most `runs` calls of `measure`.

    `start` is a size that is known to run, `known` are runs made before, `refused` what the model refused then.
    `powers` lets the first guess grow faster than the size, as attention's scores do with a sequence.

    Raises `ForwardError` where the model runs at no size tried.
    """
    search = Search(measure, capacity, {**(known or {})}, {**(refused or {})}, most, powers)
    search.run(start, runs)
    return search


@dataclass
class Search:
    """The search for the largest size that fits `capacity` bytes, and what it found.

    `runs` and `refused` are the sizes that the model ran with, and those that it failed with and why; `looked` lists
    those that were run for this search, in their order. No size is below `least` or beyond `most`.
    """

    measure: Measure
    capacity: int
    runs: dict[int, Footprint]
    refused: dict[int, str]
    most: int = LIMIT
    powers: bool = False
    least: int = 1
    looked: tuple[int, ...] = ()
    _nudges: int = 0
    _jumps: int = 0

    # -- what was found -----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The largest size that fits, 0 for none."""
        return self._bracket()[0]

    @property
    def bound(self) -> int | None:
        """The smallest larger size that needs more memory or that the model refused, if one was run."""
        return self._bracket()[1]

    @property
    def largest(self) -> Footprint | None:
        """The run of the largest size that fits; None where not even the smallest size fits."""
        return self.runs.get(self.size)

    @property
    def above(self) -> Footprint | None:
        """The run of `bound`; None where the model refused it."""
        return None if self.bound is None else self.runs.get(self.bound)

    @property
    def closed(self) -> bool:
        """Whether no size lies between `size` and `bound`. Where one does, the search ran out of runs."""
        return self._closed(*self._bracket())

    @property
    def endless(self) -> bool:
        """Whether even the largest size that is tried fits."""
        return self.size == self.most

    @property
    def ceiling(self) -> str | None:
        """Why the model refuses the next size, where it does."""
        return self.refused.get(self.bound) if self.size and self.bound is not None else None

    @property
    def monotone(self) -> bool:
        """Whether no size below the answer was found to need too much memory."""
        return all(run.fits(self.capacity) for size, run in self.runs.items() if size < self.size)

    # -- the runs -----------------------------------------------------------------------------------------------------

    def run(self, start: int | None, runs: int = MOST_RUNS) -> None:
        """Run up to `runs` sizes, `start` first; raises `ForwardError` where the model runs with none of them."""
        first = (max(start, self.least), *STARTS) if start else STARTS
        sizes = dict.fromkeys(size for size in first if self.least <= size <= self.most) or {self.most: None}
        # Where all of them were refused before, the model says it once more.
        starts = iter([size for size in sizes if size not in self.refused] or sizes)
        failure: ForwardError | None = None
        while not self.runs and len(self.looked) < runs and (size := next(starts, None)):
            failure = self._look(size)
        if not self.runs:
            assert failure is not None
            raise failure
        while len(self.looked) < runs and (size := self._next()) is not None:
            self._look(size)

    def _look(self, size: int) -> ForwardError | None:
        self.looked += (size,)
        try:
            self.runs[size] = self.measure(size)
        except ForwardError as error:
            self.refused[size] = str(error)
            return error
        return None

    # -- which sizes there are ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The least divisor that all sizes that ran have in common and no refused one has; 1 where none is needed."""
        # Of 1 and 2 a floor is the likelier reason: a batch norm wants more than one value.
        beyond = max(self.runs) if self._ended else self.most
        refused = [size for size in self.refused if 2 < size <= beyond]
        if not refused:
            return 1
        common = math.gcd(*self.runs)
        steps = (d for d in range(2, min(common, _COARSEST) + 1) if common % d == 0)
        return next((d for d in steps if all(size % d for size in refused)), 1)

    @property
    def _ended(self) -> bool:
        """Whether sizes have an end: a multiple of every divisor they can have was refused beyond all that ran."""
        most, common = max(self.runs), math.gcd(*self.runs)
        return any(size > most and size % common == 0 for size in self.refused)

    def _up(self, size: int, by: int = 1) -> int:
        """The `by`-th size after `size` that the model may run with."""
        step = self.step
        found = max(size // step * step + by * step, -(-self.least // step) * step)
        while found in self.refused and found < min(self.runs):
            found += step
        return found

    def _bracket(self) -> tuple[int, int | None]:
        """The largest size that fits (0: none), and the smallest above it that doesn't or that the model refuses."""
        low = max((size for size, run in self.runs.items() if run.fits(self.capacity)), default=0)
        step, least = self.step, min(self.runs)
        short = [size for size, run in self.runs.items() if size > low and not run.fits(self.capacity)]
        refused = [size for size in self.refused if size > max(low, least) and size % step == 0]
        return low, min((*short, *refused), default=None)

    # -- where to look ------------------------------------------------------------------------------------------------

    def _next(self) -> int | None:
        """The size to run next; None where the answer is final."""
        low, high = self._bracket()
        if low >= self.most:
            return None
        if self._closed(low, high):
            return self._finer(low, high)
        return self._named(low, high) or self._pointed(low, high, self._up(low))

    def _closed(self, low: int, high: int | None) -> bool:
        after = self._up(low)
        return after > self.most or (high is not None and after >= high)

    def _finer(self, low: int, high: int | None) -> int | None:
        """The size next to the answer that only a divisor rules out: is it really refused?"""
        beside = low + 1
        if self.step == 1 or beside in self.refused or beside in self.runs or beside > self.most or low == 0:
            return None
        return beside if high is None or beside < high else None

    def _named(self, low: int, high: int | None) -> int | None:
        """A size that the model's own refusal names, 1,024 in a message about 1,100 positions; then what follows it."""
        # Of 54 made-up tables of 77 to 4,096 positions this answers all exactly, in 4 runs; without it none is within
        # the runs there are, and all take up to 20.
        beyond = [size for size in self.refused if size > low]
        if low == 0 or not beyond or high in self.runs:
            return None
        size, tried = min(beyond), {*self.runs, *self.refused}
        named = {int(digits) for digits in re.findall(r"\d+", self.refused[size])}
        if low not in named:
            inside = (n for n in sorted(named - tried) if low < n < size - 1 and n % self.step == 0)
            return next(inside, None)
        after = self._up(low) if self._ended else low + math.gcd(*self.runs)
        return None if after in tried else after

    def _pointed(self, low: int, high: int | None, after: int) -> int:
        """Where the forecast points, if that is well inside the bracket; else ever farther in from where it points."""
        if high is not None and self._differ:
            return max(after, (low + high) // 2 // self.step * self.step)
        size, step, stride = self._forecast(low), self.step, 2**self._nudges
        least, most = self._up(low, stride), self.most if high is None else high - stride * step
        if least <= size <= most and size not in self.refused:
            self._nudges = 0 if size > least else self._nudges + 1
            return size
        if high is not None and size > high and size not in {*self.refused, *self.runs} and self._jumps < _JUMPS:
            # Beyond what does not fit something may fit again: requests of 10 MiB get segments of their own size.
            self._jumps += 1
            return size
        self._nudges += 1
        if high is None:
            return min(least, self.most // step * step)
        # Far apart, the middle is that of their magnitudes.
        between = math.isqrt(low * high) if high > 4 * low > 0 else (low + high) // 2
        middle = max(after, between // step * step)
        if high in self.refused or (size >= high > 2 * low):
            return middle
        return min(middle, least) if size < least else max(middle, most // step * step)

    @property
    def _differ(self) -> bool:
        """Whether no two runs made the same events, as of a model with a loop over its tokens: a forecast follows none
        of them from one size to another.
        """
        return len(self.runs) > 3 and len({run.shape for run in self.runs.values()}) == len(self.runs)

    def _forecast(self, low: int) -> int:
        found = forecast(self.runs, self.capacity, powers=self.powers)
        if found is None:
            return 0
        # What points far away from all runs is not worth much: it only says in which direction to go. A multiple of
        # what ran is refused for being too large only, not for a divisor that sizes have to have.
        ran = max(self.runs)
        farthest = 2 * ran if self.powers and len(found.runs) == 1 else ran * max(64, -(-_FAR // ran))
        return min(found.largest(self.capacity, self.most, self.step, low), farthest)


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
        """The events of `size` one by one."""
        return list(self.flow(size))

    def flow(self, size: int) -> AllocationEvents:
        """The events of `size` as the allocator takes them."""
        return replace(self._flow, deltas=self._deltas(size).astype(int))

    def requested(self, size: int) -> int:
        """The most bytes that tensors of `size` ask for at one moment."""
        return int(self._deltas(size).cumsum().max(initial=0))

    def fits(self, size: int, capacity: int) -> bool:
        """Whether `size` would fit `capacity`."""
        try:
            flow, total = self.flow(size), self.config.card_of(capacity)
            replayed = replay(
                flow, self.config, capacity=capacity, total=total, streams=flow.streams, emptied=flow.emptied
            )
            return replayed.out_of_memory is None
        except InputError:  # rounding broke a storage that is resized in place
            return False

    def largest(self, capacity: int, most: int, step: int = 1, least: int = 0) -> int:
        """The largest multiple of `step` up to `most` that would fit; `least`, which is known to fit, where none would.

        Tensors alone say from where on nothing can fit. From there down each size is replayed, some of them, or all
        where that is quick; then the edge is found by halving, and a few sizes beyond it are tried. Where one of these
        fits (rows that are padded waste the least at every eighth), others as far apart may fit as well.
        """

        def fits(k: int) -> bool:
            return self.fits(k * step, capacity)

        low = least // step
        top = _last(lambda k: self.requested(k * step) <= capacity, low, most // step)
        events = len(self._flow.storages)
        looks = max(1, min(_LOOKS, _REPLAYED // events))
        if (top - low) * events <= _REPLAYED:
            looks = top - low
        below = max(top - looks, low)
        if found := next(filter(fits, range(top, below, -1)), None):
            return found * step
        low = _edge(fits, low, self._about(capacity, top * step) // step, below)
        far = next(filter(fits, range(min(low + _LOOKS, below), low, -1)[:looks]), low)
        apart = far - low
        if apart > 1:
            far = low + apart * _last(lambda n: fits(low + n * apart), 1, (below - low) // apart)
        return far * step

    def _about(self, capacity: int, top: int) -> int:
        """About the largest size that fits, from what is reserved by the run that comes closest to it."""
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
    """For each event how its bytes grow with the size, guessed from one run: a dimension that the size divides varies.

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
    """The largest number up to `most` for which `holds`, if it holds from `least` up to some number and not beyond."""
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
    """The same number as `_last` gives, looked for around another one."""
    about = min(max(about, least), most)
    if about == least or holds(about):
        return _last(holds, about, most)
    return about - 1 - _last(lambda down: not holds(about - down), 0, about - least - 1)


def forecast(runs: Mapping[int, Footprint], capacity: int, *, powers: bool = False) -> Forecast | None:
    """The best forecast that `runs` allow near `capacity`; None where there is no run."""
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
    """The largest run of each need: where memory grows in steps, two runs of one step would point nowhere.

    Runs that all need the same say that nothing grows: two of them stay.
    """
    ascending = sorted(runs, key=lambda run: run.size)
    edges = list({run.requested: run for run in ascending}.values())
    return edges if len(edges) > 1 or len(runs) < 2 else [ascending[0], ascending[-1]]


def _spread(runs: list[Footprint]) -> list[Footprint]:
    """Three runs only where they don't lie on one line, so that rounding cannot bend what is straight."""
    if len(runs) < 3:
        return runs
    import numpy as np

    first, middle, last = sorted(runs, key=lambda run: run.size)
    off = np.abs(Forecast([first, last]).flow(middle.size).deltas - middle.flow.deltas)
    return runs if off.max(initial=0) > 1 else runs[:2]
