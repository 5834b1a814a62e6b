"""Where to look next: the events of a size that was not run, from those of sizes that were.

Runs of different sizes usually make the same events with other numbers of bytes. Each event is then extended along the
line, or the parabola, through the runs at hand, and the whole is replayed like a run. A forecast is never an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from memsize.analysis.fit.footprint import Footprint
from memsize.device.allocator import replay
from memsize.errors import InputError
from memsize.records.roles import Role

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int], np.dtype[np.float64]]

FIXED: Final[frozenset[Role]] = frozenset(
    {"parameter", "buffer", "gradient", "optimizer state", "master weight", "workspace"}
)
"""Roles whose bytes are those of the model, whatever it is given."""
_REPLAYED: Final = 50_000
"""How many events may be replayed to look at every size: about a tenth of a second."""
_LOOKS: Final = 8
"""How many sizes are looked at otherwise, below what tensors alone allow, and beyond the edge."""


class Forecast:
    """The events of other sizes, from one to three runs that made the same events."""

    def __init__(self, runs: Sequence[Footprint], *, powers: bool = False) -> None:
        import numpy as np

        self.config = runs[0].config
        self.runs = tuple(sorted(runs, key=lambda run: run.size))
        self._storages = [storage for storage, _ in runs[0].pairs]
        self._signs = np.sign(np.array([delta for _, delta in runs[0].pairs], dtype=np.float64))
        self._amounts = [np.abs(np.array([delta for _, delta in run.pairs], dtype=np.float64)) for run in self.runs]
        self._exponents = _exponents(runs[0], powers) if len(runs) == 1 else None

    def pairs(self, size: int) -> list[tuple[int, int]]:
        """The events of `size` as the allocator takes them."""
        return list(zip(self._storages, self._deltas(size).astype(int).tolist(), strict=True))

    def requested(self, size: int) -> int:
        """The most bytes that tensors of `size` ask for at one moment."""
        return int(self._deltas(size).cumsum().max(initial=0))

    def fits(self, size: int, capacity: int) -> bool:
        """Whether `size` would fit `capacity`."""
        try:
            return replay(self.pairs(size), self.config, capacity=capacity).out_of_memory is None
        except InputError:  # rounding broke a storage that is resized in place
            return False

    def largest(self, capacity: int, most: int, step: int = 1, least: int = 0) -> int:
        """The largest multiple of `step` up to `most` that would fit; `least`, which is known to fit, where none would.

        Tensors alone say from where on nothing can fit. From there down each size is replayed, some of them, or all
        where that is quick; then the edge is found by halving, and a few sizes beyond it are tried.
        """
        low = least // step
        top = _last(lambda k: self.requested(k * step) <= capacity, low, most // step)
        looks = top - low if (top - low) * len(self._storages) <= _REPLAYED else _LOOKS
        for k in range(top, max(top - looks, low), -1):
            if self.fits(k * step, capacity):
                return k * step
        low = _last(lambda k: self.fits(k * step, capacity), low, max(top - looks, low))
        beyond = range(min(low + _LOOKS, top - looks), low, -1)
        return next((k * step for k in beyond if self.fits(k * step, capacity)), low * step)

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

    storages, size = run.trace.storages, run.size

    def exponent(index: int) -> int:
        storage = storages[index]
        if storage.role in FIXED:
            return 0
        dims = sum(1 for dim in storage.shape if dim and dim % size == 0)
        return dims if powers else min(dims, 1)

    return np.array([exponent(storage) for storage, _ in run.pairs], dtype=np.float64)


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
    straight = Forecast([first, last]).pairs(middle.size)
    off = np.abs(np.array([s for _, s in straight]) - np.array([s for _, s in middle.pairs]))
    return runs if off.max(initial=0) > 1 else runs[:2]
