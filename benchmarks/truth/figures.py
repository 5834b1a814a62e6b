"""How good predictions are beside what was measured, and how good they are to be: one row for each promise.

Errors are those of the nearer end of the stated interval, as a share of what was measured: nothing inside. A workload
is convolutional when a convolution runs in it, for then cuDNN decides about a workspace; a patch embedding is one too.
Runs with `torch.backends.cudnn.benchmark` are told beside the promises, which are about PyTorch's default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final, Literal, cast

from benchmarks.truth.outcomes import Outcome, Truth
from benchmarks.truth.suite import SUITE
from memsize.records.measurement import Measurement
from memsize.records.verification import FigureComparison, VerifiedRun

Sense = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One measured workload beside today's prediction."""

    name: str
    checked: VerifiedRun

    @property
    def convolutional(self) -> bool:
        """Whether a convolution runs."""
        return self.checked.prediction.convolutional

    @property
    def benchmark(self) -> bool:
        """Whether it ran with `torch.backends.cudnn.benchmark`."""
        return self.checked.measurement.workload.benchmark

    def comparison(self, figure: str) -> FigureComparison | None:
        """The figure beside its measurement, None where that is missing."""
        comparison = next(candidate for candidate in self.checked.comparisons if candidate.figure == figure)
        return None if comparison.measured is None else comparison

    def tracked(self, figure: str) -> FigureComparison | None:
        """MemTracker's peak beside the same measurement."""
        own, peak = self.comparison(figure), self.checked.measurement.tracked
        return None if own is None or peak is None else own._replace(predicted=type(own.predicted)(peak, peak))


@dataclass(frozen=True, slots=True)
class Figure:
    """One promise: what is asked, of how many workloads, what memsize reaches, and MemTracker where it can be asked.

    A figure of no workload has no value, and is not reached.
    """

    what: str
    sense: Sense
    limit: float
    count: int
    value: float | None
    tracked: float | None = None

    @property
    def reached(self) -> bool:
        """Whether the promise is kept."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.sense == "at least" else self.value <= self.limit


def replayed(truth: Truth) -> list[Replayed]:
    """Every measured workload of a file beside today's prediction for the file's stack.

    Raises KeyError for one that the suite no longer has.
    """
    measured = [
        outcome for outcome in truth.outcomes if outcome.measurement is not None and not outcome.measurement.error
    ]
    rows = []
    for name, outcomes in groupby(sorted(measured, key=_name), key=_name):
        for outcome in outcomes:
            seen = cast(Measurement, outcome.measurement)
            said = SUITE[name].case.predict(truth.stack, benchmark=outcome.benchmark, recorded=seen.workspaces)
            rows.append(Replayed(name, VerifiedRun(seen, said)))
    return rows


def _name(outcome: Outcome) -> str:
    return outcome.name


def figures(rows: Sequence[Replayed]) -> list[Figure]:
    """Every promise over the measured workloads of one file."""
    usual = [row for row in rows if not row.benchmark]
    plain = [row for row in usual if not row.convolutional]
    nets = [row for row in usual if row.convolutional]
    return [
        _figure("requested exact, not convolutional", "at least", 0.5, plain, "requested", _exact),
        _figure("requested, not convolutional: median error", "at most", 0.001, plain, "requested", _median),
        _figure("requested, not convolutional: within 1 %", "at least", 0.95, plain, "requested", _within(0.01)),
        _figure("allocated, not convolutional: median error", "at most", 0.003, plain, "allocated", _median),
        _figure("allocated, not convolutional: within 2 %", "at least", 0.95, plain, "allocated", _within(0.02)),
        _figure(
            "allocated, convolutional: inside the interval", "at least", 0.95, nets, "allocated", _inside, peer=False
        ),
        _figure("allocated, convolutional: widest interval", "at most", 0.1, nets, "allocated", _widest, False),
        _figure("reserved: median error", "at most", 0.01, usual, "reserved", _median, False),
        _figure("device: inside the interval", "at least", 0.95, usual, "device", _inside, False),
        _underestimated(usual),
    ]


_Fold = Callable[[Sequence[FigureComparison]], float]


def _figure(
    what: str,
    sense: Sense,
    limit: float,
    rows: Iterable[Replayed],
    figure: str,
    fold: _Fold,
    peer: bool = True,
) -> Figure:
    rows = list(rows)
    ours = [comparison for row in rows if (comparison := row.comparison(figure)) is not None]
    theirs = [comparison for row in rows if (comparison := row.tracked(figure)) is not None] if peer else []
    value = fold(ours) if ours else None
    return Figure(what, sense, limit, len(ours), value, fold(theirs) if theirs else None)


LEAST: Final = 0.02
"""From this share on, a peak above the interval is an underestimate that nothing excuses."""


def _underestimated(rows: Sequence[Replayed]) -> Figure:
    """Workloads of which any figure is measured above the interval by more than 2 %."""

    def missed(row: Replayed) -> bool:
        return any((comparison.share or 0) < -LEAST for comparison in row.checked.comparisons)

    what = "underestimated by more than 2 %, any figure"
    return Figure(what, "at most", 0, len(rows), sum(map(missed, rows)) if rows else None)


def _errors(comparisons: Iterable[FigureComparison]) -> list[float]:
    return [abs(comparison.share or 0.0) for comparison in comparisons]


def _exact(comparisons: Sequence[FigureComparison]) -> float:
    return sum(
        comparison.predicted.low == comparison.predicted.high == comparison.measured for comparison in comparisons
    ) / len(comparisons)


def _median(comparisons: Sequence[FigureComparison]) -> float:
    return median(_errors(comparisons))


def _within(limit: float) -> _Fold:
    return lambda comparisons: sum(error <= limit for error in _errors(comparisons)) / len(comparisons)


def _inside(comparisons: Sequence[FigureComparison]) -> float:
    return sum(comparison.difference == 0 for comparison in comparisons) / len(comparisons)


def _widest(comparisons: Sequence[FigureComparison]) -> float:
    """The widest interval, as a share of what was measured."""
    return max(
        (comparison.predicted.high - comparison.predicted.low) / (comparison.measured or math.inf)
        for comparison in comparisons
    )
