"""Search for the largest size that fits (a batch, a sequence length, …): a bisection, guided by forecasts.

Each step runs one size and so narrows the bracket: the largest size that fits, and the smallest above it that does not.
A forecast of the memory at other sizes says where to look; it is never the answer itself. The search ends where the two
ends of the bracket are neighbours.

The model may refuse sizes. These reveal the rule behind them: a floor (a batch norm wants two samples), a divisor
(groups of four), a ceiling (1,024 positions).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from memsize.analysis.fit.footprint import Footprint, forecast
from memsize.errors import ForwardError

Measure = Callable[[int], Footprint]
"""Runs a size; raises `ForwardError` where the model refuses it."""

MOST_RUNS: Final = 8
"""Runs per answer."""
LIMIT: Final = 2**20
"""The largest size that is tried."""
FIRST_SIZES: Final = (13, 8, 60, 840, 1, 2)
"""The sizes that are tried first: a prime, which divides no other dimension, then sizes with many divisors."""
_LARGEST_DIVISOR: Final = 4096
_FIRST_JUMP: Final = 4096
"""The first forecast may always go at least this far."""
_MOST_JUMPS: Final = 2
"""How often a forecast beyond a size that does not fit is still followed."""


@dataclass
class Search:
    """The search for the largest size that fits `capacity` bytes, and its result.

    `runs` and `refused` are the sizes that the model ran with, and those that it failed with and why; some may be known
    before. `measured` lists the sizes that were run for this search, in their order. No size is below `least` or above
    `most`. `powers` lets the first forecast grow faster than the size, as attention's scores do with a sequence.
    """

    measure: Measure
    capacity: int
    runs: dict[int, Footprint]
    refused: dict[int, str]
    most: int = LIMIT
    powers: bool = False
    least: int = 1
    measured: tuple[int, ...] = ()
    _misses: int = 0
    """How many forecasts in a row were of no use."""
    _jumps: int = 0

    @property
    def size(self) -> int:
        """The largest size that fits, 0 for none."""
        return self._bracket()[0]

    @property
    def next_size(self) -> int | None:
        """The smallest larger size that needs more memory or that the model refused, if one was run."""
        return self._bracket()[1]

    @property
    def largest_run(self) -> Footprint | None:
        """The run of the largest size that fits; None where not even the smallest size fits."""
        return self.runs.get(self.size)

    @property
    def next_run(self) -> Footprint | None:
        """The run of `next_size`; None where the model refused it."""
        return None if self.next_size is None else self.runs.get(self.next_size)

    @property
    def closed(self) -> bool:
        """Whether no size lies between `size` and `next_size`. Where one does, the search ran out of runs."""
        return self._is_closed(*self._bracket())

    @property
    def endless(self) -> bool:
        """Whether even the largest size that is tried fits."""
        return self.size == self.most

    @property
    def ceiling(self) -> str | None:
        """Why the model refuses the next size, where it does."""
        return self.refused.get(self.next_size) if self.size and self.next_size is not None else None

    @property
    def monotone(self) -> bool:
        """Whether all smaller sizes that were run fit."""
        return all(run.fits(self.capacity) for size, run in self.runs.items() if size < self.size)

    def run(self, start: int | None, most_runs: int = MOST_RUNS) -> None:
        """Run up to `most_runs` sizes, `start` first; raises `ForwardError` where the model runs with none of them."""
        first = (max(start, self.least), *FIRST_SIZES) if start else FIRST_SIZES
        sizes = dict.fromkeys(size for size in first if self.least <= size <= self.most) or {self.most: None}
        # If all of them were refused before, run them again to have an error to raise.
        candidates = iter([size for size in sizes if size not in self.refused] or sizes)
        failure: ForwardError | None = None
        while not self.runs and len(self.measured) < most_runs and (candidate := next(candidates, None)):
            failure = self._run_size(candidate)
        if not self.runs:
            assert failure is not None
            raise failure
        while len(self.measured) < most_runs and (size := self._next()) is not None:
            self._run_size(size)

    def _run_size(self, size: int) -> ForwardError | None:
        self.measured += (size,)
        try:
            self.runs[size] = self.measure(size)
        except ForwardError as error:
            self.refused[size] = str(error)
            return error
        return None

    @property
    def step(self) -> int:
        """The smallest divisor that all accepted sizes share and no refused size has; 1 where none is needed."""
        # Of 1 and 2 a floor is the likelier reason: a batch norm wants more than one value.
        last = max(self.runs) if self._has_ceiling else self.most
        refused = [size for size in self.refused if 2 < size <= last]
        if not refused:
            return 1
        common = math.gcd(*self.runs)
        divisors = (d for d in range(2, min(common, _LARGEST_DIVISOR) + 1) if common % d == 0)
        return next((d for d in divisors if all(size % d for size in refused)), 1)

    @property
    def _has_ceiling(self) -> bool:
        """Whether a larger size than all accepted ones was refused that no divisor can explain."""
        most, common = max(self.runs), math.gcd(*self.runs)
        return any(size > most and size % common == 0 for size in self.refused)

    def _up(self, size: int, by: int = 1) -> int:
        """Return the `by`-th size after `size` that the model may run with."""
        step = self.step
        larger = max(self._floor(size) + by * step, -(-self.least // step) * step)
        while larger in self.refused and larger < min(self.runs):
            larger += step
        return larger

    def _floor(self, size: int) -> int:
        return size // self.step * self.step

    def _bracket(self) -> tuple[int, int | None]:
        low = max((size for size, run in self.runs.items() if run.fits(self.capacity)), default=0)
        step, least = self.step, min(self.runs)
        too_large = [size for size, run in self.runs.items() if size > low and not run.fits(self.capacity)]
        refused = [size for size in self.refused if size > max(low, least) and size % step == 0]
        return low, min((*too_large, *refused), default=None)

    def _is_closed(self, low: int, high: int | None) -> bool:
        after = self._up(low)
        return after > self.most or (high is not None and after >= high)

    def _next(self) -> int | None:
        low, high = self._bracket()
        if low >= self.most:
            return None
        if not self._is_closed(low, high):
            return self._from_message(low, high) or self._inside(low, high)
        # If only a supposed divisor rules out the neighbour of the answer, is it really refused?
        neighbour = low + 1
        if self.step == 1 or neighbour in {*self.refused, *self.runs} or neighbour > self.most or low == 0:
            return None
        return neighbour if high is None or neighbour < high else None

    def _from_message(self, low: int, high: int | None) -> int | None:
        """Choose a size that the model's refusal names, such as 1,024 in an error about 1,100 positions; then the next.

        Of 54 made-up tables of 77 to 4,096 positions this answers all exactly, in 4 runs; without it none is within the
        allowed runs, and all take up to 20.
        """
        beyond = [size for size in self.refused if size > low]
        if low == 0 or not beyond or high in self.runs:
            return None
        size, done = min(beyond), {*self.runs, *self.refused}
        named = {int(digits) for digits in re.findall(r"\d+", self.refused[size])}
        if low not in named:
            inside = (n for n in sorted(named - done) if low < n < size - 1 and n % self.step == 0)
            return next(inside, None)
        after = self._up(low) if self._has_ceiling else low + math.gcd(*self.runs)
        return None if after in done else after

    def _inside(self, low: int, high: int | None) -> int:
        """Choose a size inside the bracket: the forecast, if it leaves enough room on both sides, else by bisection.

        Each forecast in a row that is of no use doubles the room, so that the ends of the bracket move.
        """
        shapes = {run.shape for run in self.runs.values()}
        if high is not None and len(self.runs) > 3 and len(shapes) == len(self.runs):
            # No two runs made the same events, as with a loop over tokens: no forecast follows from them.
            return max(self._up(low), self._floor((low + high) // 2))
        size, room = self._forecast(low), 2**self._misses
        first = self._up(low, room)
        last = self.most if high is None else high - room * self.step
        if first <= size <= last and size not in self.refused:
            self._misses = 0 if size > first else self._misses + 1
            return size
        is_new = size not in {*self.refused, *self.runs}
        if high is not None and size > high and is_new and self._jumps < _MOST_JUMPS:
            # Requests of 10 MiB get segments of their own size, so larger sizes may fit again.
            self._jumps += 1
            return size
        self._misses += 1
        if high is None:
            return min(first, self._floor(self.most))
        far_apart = high > 4 * low > 0
        middle = max(self._up(low), self._floor(math.isqrt(low * high) if far_apart else (low + high) // 2))
        if high in self.refused or size >= high > 2 * low:
            return middle
        return min(middle, first) if size < first else max(middle, self._floor(last))

    def _forecast(self, low: int) -> int:
        ahead = forecast(self.runs, self.capacity, powers=self.powers)
        if ahead is None:
            return 0
        # Far away from all runs a forecast only gives the direction. A multiple of an accepted size can be refused for
        # being too large only, not for a divisor.
        largest = max(self.runs)
        unreliable = self.powers and len(ahead.runs) == 1
        farthest = 2 * largest if unreliable else largest * max(64, -(-_FIRST_JUMP // largest))
        return min(ahead.largest(self.capacity, self.most, self.step, least=low), farthest)
