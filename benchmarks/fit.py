"""The largest batch of a ResNet-50 that trains on a T4, in-process and warm: over the default scenarios, and asked."""

from __future__ import annotations

from collections.abc import Iterator

import memsize
from benchmarks.measure import Line, compared, in_turn
from benchmarks.resnet import SIZE, ResNet50
from memsize.analysis.fit.search import MOST_RUNS
from memsize.records.fit import Fit

LIMIT = 5.0
"""Seconds that the whole question may take on two cores."""


def fit_of(model: ResNet50, **options: object) -> Fit:
    """The fit of training steps on a T4."""
    return memsize.fit(model, SIZE, train="adamw", gpu="t4", **options)  # type: ignore[arg-type]


def lines(quick: bool) -> Iterator[Line]:
    """The search over six scenarios, its runs, and the remedies of a batch that does not fit."""
    model = ResNet50()
    scenarios = "fp32" if quick else None
    fit = fit_of(model, scenarios=scenarios)
    search, remedies = in_turn(
        [lambda: fit_of(model, scenarios=scenarios), lambda: fit_of(model, scenarios="fp32", batch_size=256)],
        1 if quick else 5,
    )
    yield compared("ResNet-50 on a T4, largest batch, default scenarios", search, "the limit", LIMIT, 1.0)
    most = max(len(row.looked) for row in fit.fit_rows)
    yield Line("runs for one answer, at most", str(most), "the limit", str(MOST_RUNS), most / MOST_RUNS, 1.0)
    yield compared("ResNet-50 on a T4, remedies for batch 256", remedies, "the limit", LIMIT, 1.0)
