"""From which size on something is so: autocast pays, activations outweigh parameters, the peak leaves the optimizer.

A forecast says where to look; runs of that size and the one before say whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from memsize.analysis.fit.footprint import Footprint, phase_name
from memsize.analysis.fit.forecast import Forecast
from memsize.errors import ForwardError
from memsize.records.roles import Role

Kind = Literal["autocast", "activations", "peak"]
FARTHEST: Final = 2**16
"""The largest size at which a crossing is looked for."""
_LOOKS: Final = 6


@dataclass(frozen=True, slots=True)
class Crossing:
    """The least size from which on something is so: run, and run at the size before, where it is not.

    `size` None: it is not so at any size that was looked at. `scenario` is what was run, `other` what it is compared
    with.
    """

    kind: Kind
    size: int | None
    scenario: str
    other: str = ""


def first_size(foretold: Callable[[int], bool], measured: Callable[[int], bool], most: int = FARTHEST) -> int | None:
    """The least size for which `measured` holds while it doesn't for the one before; None where none was found.

    `foretold` says where to look and costs next to nothing. A size that the model refuses counts as one before.
    """
    if not foretold(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if foretold(middle) else (middle, high)
    seen: dict[int, bool] = {}

    def holds(size: int) -> bool:
        if size not in seen:
            try:
                seen[size] = size > 0 and measured(size)
            except ForwardError:
                seen[size] = False
        return seen[size]

    while len(seen) < _LOOKS:
        if not holds(high):
            high += 1
        elif holds(high - 1):
            high -= 1
        else:
            return high
    return None


def most_of(run: Footprint, role: Role) -> int:
    """The most bytes of a role that are alive at one moment of a run."""
    roles = [storage.role for storage in run.trace.storages]
    return max(accumulate((d for storage, d in run.pairs if roles[storage] == role), initial=0))


def most_beside(run: Footprint, role: Role) -> int:
    """The most bytes of all other roles that are alive at one moment of a run."""
    roles = [storage.role for storage in run.trace.storages]
    return max(accumulate((d for storage, d in run.pairs if roles[storage] != role), initial=0))


def peak_phase(run: Footprint) -> str:
    """The phase that a run's peak falls in."""
    return _phase(run, run.unbounded.requested.event)


def foretold_most(forecast: Forecast, role: Role, size: int) -> int:
    """`most_of`, foretold for a size."""
    storages = forecast.runs[0].trace.storages
    return max(accumulate((d for storage, d in forecast.pairs(size) if storages[storage].role == role), initial=0))


def foretold_phase(forecast: Forecast, size: int) -> str:
    """`peak_phase`, foretold for a size."""
    live = list(accumulate(delta for _, delta in forecast.pairs(size)))
    return _phase(forecast.runs[0], live.index(max(live)))


def _phase(run: Footprint, event: int) -> str:
    return phase_name(run.trace.phases[run.trace.events[event].phase]) if event >= 0 else ""
