"""`Memory`, the fixture `memsize`: questions about models, held against the limits of the test that asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from memsize import api
from memsize.analysis.check import Measured, against_batch, against_limit
from memsize.errors import InputError
from memsize.records.aggregates import totals
from memsize.records.check import Figure
from memsize.records.finding import Finding
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.report import Report, ScenarioResult
from memsize.spec.project import LIMITS, Bound, parse_limits

if TYPE_CHECKING:
    from memsize.analysis.step import StepTrace
    from memsize.records.fit import Fit


class Memory:
    """memsize in one test: reports, traces and fits of models, held against the test's limits. A limit of the test that
    an answer exceeds fails it.

    Every limit has to be checked by one of the test's questions: one that none can tell is an error when the test ends.
    """

    def __init__(self, test: pytest.Item) -> None:
        self._test, self._bounds = test, _limits(test)
        self._unchecked = {bound.name for bound in self._bounds}
        self._failed_before = test.session.testsfailed

    def report(self, model: Any, size: Any = None, **options: Any) -> Report:
        """`memsize.report` of a model: as it is, unless `scenarios` are named. Each of them is held to the limits."""
        peaks = {LIMITS[bound.name].of_peak for bound in self._bounds} - {""}
        options = {"scenarios": "as-given"} | ({"gpu": DEFAULT_GPU} if peaks else {}) | options
        answer: Report = api.report(model, size, **options)
        for result in answer.scenario_results:
            self._check(answer, result)
        if not answer.scenario_results:  # without an input: what the model stores
            self._check(answer, ScenarioResult("", "", "unavailable"))
        return answer

    def trace(self, model: Any, size: Any = None, **options: Any) -> StepTrace:
        """`memsize.trace` of a training step, or of an inference with ``optimizer=None``, held to the limits."""
        answer: StepTrace = api.trace(model, size, **options)
        inference = options.get("optimizer", "adamw") is None
        result = ScenarioResult(
            answer.trace.scenario,
            answer.trace.scenario,
            "run",
            totals=totals(answer.trace),
            trace=answer.trace,
            inference=answer.peak if inference else None,
            training=None if inference else answer.peak,
        )
        self._check(Report(answer.trace.model, answer.trace, (result,)), result)
        return answer

    def fit(self, model: Any, size: Any = None, **options: Any) -> Fit:
        """`memsize.fit`; with a limit ``fits_batch`` it asks whether that batch fits, and fails where it doesn't."""
        batches = [bound for bound in self._bounds if bound.unit == "samples"]
        for bound in batches:
            options = {"batch_size": bound.amount, "remedies": False} | options
        options = {"scenarios": "as-given"} | options
        answer: Fit = api.fit(model, size, **options)
        self._hold(against_batch(row, bound) for bound in batches for row in answer.fit_rows)
        return answer

    def close(self) -> None:
        """Fail where a limit of the test was never checked."""
        if self._unchecked and self._test.session.testsfailed == self._failed_before:
            hint = '; train="adamw" asks for training steps' if "training_peak" in self._unchecked else ""
            hint = "; memsize.fit does" if "fits_batch" in self._unchecked else hint
            named = f"memsize_limit({', '.join(sorted(self._unchecked))})"
            pytest.fail(f"{named}: no call of the test checks it{hint}", pytrace=False)

    def _check(self, report: Report, result: ScenarioResult) -> None:
        measured = Measured(report, result.name)
        estimates = {"": True, "inference": result.inference, "training": result.training}
        estimates["either"] = result.training or result.inference
        bounds = [bound for bound in self._bounds if bound.unit != "samples" and estimates[LIMITS[bound.name].of_peak]]
        self._hold(against_limit(measured, bound) for bound in bounds)

    def _hold(self, judged: Iterable[tuple[Figure, Finding | None]]) -> None:
        broken = []
        for figure, finding in judged:
            self._unchecked.discard(figure.name)
            if finding is not None:
                broken.append(finding.text())
        if broken:
            self._unchecked.clear()
            pytest.fail("\n".join(broken), pytrace=False)


def _limits(test: pytest.Item) -> tuple[Bound, ...]:
    """The limits of a test's markers, those nearest to it last."""
    options: dict[str, object] = {}
    for mark in reversed(list(test.iter_markers("memsize_limit"))):
        if mark.args:
            pytest.fail('memsize_limit names its limits: memsize_limit(parameters="40 MiB")', pytrace=False)
        options |= mark.kwargs
    try:
        return parse_limits(options)
    except InputError as error:
        refused = str(error)
    pytest.fail(refused, pytrace=False)
