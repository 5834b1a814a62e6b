"""`Memory`, the fixture `memsize`: questions about models, held against the limits of the test that asks; and the
outcome of a session's checks, as one worker or all of them saw it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tabulate import tabulate

from memsize import api, files
from memsize.analysis.check import Measured, against_batch, against_limit
from memsize.errors import InputError
from memsize.records.aggregates import own_rows, totals
from memsize.records.check import Figure
from memsize.records.finding import Finding
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.report import Report, ScenarioResult
from memsize.records.trace import Trace
from memsize.spec.project import LIMITS, Bound, parse_limits
from memsize.units import Bytes, format_bytes

if TYPE_CHECKING:
    from memsize.analysis.step import StepTrace
    from memsize.records.fit import Fit


class Memory:
    """memsize in one test: reports, traces and fits of models, held against the test's limits. A limit of the test that
    an answer exceeds fails it.

    Every limit has to be checked by one of the test's questions: one that none can tell is an error when the test ends.
    """

    def __init__(self, test: pytest.Item, outcome: Outcome, update: bool) -> None:
        self._test, self._outcome, self._update = test, outcome, update
        self._bounds = _limits(test)
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

    def table(self, model: Any, size: Any = None, *, name: str = "", **options: Any) -> Report:
        """Compare the layers of a model with a stored file of the test, and fail where they differ.

        The file stands beside the test's in ``memsize_tables``; ``pytest --memsize-update`` writes it. A test with
        several tables gives each a `name`.
        """
        report = self.report(model, size, **options)
        end = f"--{name}" if name else ""
        path = folder_of(self._test) / f"{stem_of(self._test)}{end}.txt"
        text = layer_table(report.trace)
        stored = path.read_text(encoding="utf-8") if path.exists() else None
        is_written = self._update and stored != text
        (self._outcome.written if is_written else self._outcome.compared).append(str(path))
        if stored == text:
            return report
        if is_written:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, text, overwrite=True)
        elif stored is None:
            why = f"no layer table is stored: pytest --memsize-update writes {os.path.relpath(path)}"
            pytest.fail(why, pytrace=False)
        else:
            changed = difference(stored, text, path)
            pytest.fail(f"the layers changed (pytest --memsize-update accepts it):\n{changed}", pytrace=False)
        return report

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
            self._outcome.checked(self._test.nodeid, figure)
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


# -- layer tables: exact figures in aligned columns, so that a difference can be read ----------------------------------

_HEAD: Final = ("layer", "type", "output", "parameters", "stored", "new output", "kept")


def layer_table(trace: Trace) -> str:
    """One line for each layer with its own figures: elements of its parameters, and bytes."""
    rows = []
    for row in own_rows(trace):
        stored = row.parameter_bytes + row.buffer_bytes + row.attribute_bytes
        outputs = ", ".join(str(output.spec) for output in row.outputs)
        rows.append(
            (row.path or "(model)", row.type, outputs, row.parameters, stored, row.output_bytes, row.saved_bytes)
        )
    sums = totals(trace)
    rows.append(("total", "", "", sums.parameters, sums.stored, sums.output_bytes, sums.saved_bytes))
    texts = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in (_HEAD, *rows)]
    sides = ("left",) * 3 + ("right",) * 4
    return f"{tabulate(texts, tablefmt='plain', colalign=sides, disable_numparse=True)}\n"


def difference(stored: str, current: str, path: Path) -> str:
    """Show what changed from the stored table to this one, the heading and the lines around it included."""
    # Columns may have become wider: that alone changes no figure.
    before, after = ([re.sub("  +", "  ", line) for line in text.splitlines()] for text in (stored, current))
    lines = unified_diff(before, after, f"{path.name} (stored)", "now", n=1, lineterm="")
    return "\n".join(lines)


# -- the session -------------------------------------------------------------------------------------------------------

_FOLDER: Final = "memsize_tables"
_LONGEST_NAME: Final = 100


def folder_of(test: pytest.Item) -> Path:
    """The folder of the tables of a test's file."""
    return test.path.parent / _FOLDER / test.path.stem


def stem_of(test: pytest.Item) -> str:
    """Name the files of a test's tables: the test with its parameters, in characters that any disk takes."""
    parts = test.nodeid.split("::")[1:]
    return re.sub(r"[^\w.\[\]=,-]+", "-", ".".join(parts))[:_LONGEST_NAME].rstrip(".-")


@dataclass
class Outcome:
    """Figures beside their limits, test by test; the tables that were compared and written."""

    figures: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def checked(self, test: str, figure: Figure) -> None:
        """Note a figure of a test beside its limit; two questions may tell the same."""
        line = f"{test}: {figure.name} {_drawn(figure)}"
        if line not in self.figures:
            self.figures.append(line)

    def add(self, other: dict[str, Any]) -> None:
        """Take over what another worker found."""
        for name, values in other.items():
            mine = getattr(self, name)
            mine += [value for value in values if value not in mine]

    def lines(self) -> list[str]:
        """The summary."""
        lines = sorted(self.figures)
        for paths, outcome in ((self.compared, "compared with what is stored"), (self.written, "written")):
            if paths:
                lines.append(f"{len(paths)} layer table{'' if len(paths) == 1 else 's'} {outcome}")
        return lines


def _drawn(figure: Figure) -> str:
    if figure.limit is None or figure.value is None:
        return f"{figure.limit:,} does not fit" if figure.limit else str(figure.value)
    if figure.unit == "samples":
        return f"{figure.limit:,} fits"
    drawn = (format_bytes(Bytes(n)) if figure.unit == "bytes" else f"{n:,}" for n in (figure.value, figure.limit))
    value, limit = drawn
    share = f" ({figure.value / figure.limit:.0%})" if figure.limit else ""
    return f"{value} of {limit}{share}" + ("" if figure.holds else ": over")
