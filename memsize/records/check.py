"""`Check`: what a project's limits and baselines say of its models, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding

Severity = Literal["error", "warning", "note"]
"""How serious a problem is: an error breaks a check."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The most serious first."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a target: its value, its limit, and what it was in the baseline and may have grown to.

    `unit` says what is counted. Of ``"samples"`` the `limit` is the batch that has to fit, and the `value` is None
    where it doesn't.
    """

    name: str
    unit: Literal["bytes", "elements", "samples"]
    value: int | None
    limit: int | None = None
    baseline: int | None = None
    allowed: int | None = None
    holds: bool = True

    @property
    def case(self) -> str:
        """What is checked: the limit of the figure, or its growth."""
        return self.name if self.baseline is None else f"{self.name}, growth"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to tell about a target: its code and sentence are the finding's. `case` is that of a `Figure`, None for
    a finding of the report.
    """

    severity: Severity
    finding: Finding
    case: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What was found about one target. `file` and `line` are where it is defined, relative to the project's folder.

    `error` says why there are no figures: what is wrong with the call, the target or its baseline.
    """

    name: str
    file: str
    line: int
    figures: tuple[Figure, ...] = ()
    problems: tuple[Problem, ...] = ()
    error: str | None = None

    def count(self, severity: Severity) -> int:
        """How many problems are that serious."""
        return sum(problem.severity == severity for problem in self.problems)


@dataclass(frozen=True, slots=True, repr=False)
class Check(Answer):
    """A project's models against their limits and baselines. `project` is its file, `written` the baselines that were
    written.
    """

    kind: ClassVar = "check"

    project: str
    models: tuple[CheckedModel, ...]
    written: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, target by target."""
        return tuple(problem.finding for model in self.models for problem in model.problems)

    def worst(self) -> Severity | None:
        """The severity of the most serious problem; None where there is none."""
        found = {problem.severity for model in self.models for problem in model.problems}
        return next((severity for severity in SEVERITIES if severity in found), None)

    def status(self, fail_on: Severity | Literal["never"] = "error") -> int:
        """The exit status: 0 where all holds, 1 where a problem is as serious as `fail_on`, 2 where a target has no
        figures.
        """
        if any(model.error for model in self.models):
            return 2
        worst = self.worst()
        if worst is None or fail_on == "never":
            return 0
        return int(SEVERITIES.index(worst) <= SEVERITIES.index(fail_on))

    def tables(self) -> dict[str, FlatTable]:
        """`figures`: one row per figure; `problems`: one row per problem."""
        figures = (
            (m.name, f.name, f.unit, f.value, f.limit, f.baseline, f.allowed, f.holds)
            for m in self.models
            for f in m.figures
        )
        problems = (
            (m.name, m.file, m.line, p.severity, p.finding.code, p.case, p.finding.text())
            for m in self.models
            for p in m.problems
        )
        return {
            "figures": FlatTable(
                ("target", "figure", "unit", "value", "limit", "baseline", "allowed", "holds"), figures
            ),
            "problems": FlatTable(("target", "file", "line", "severity", "code", "case", "text"), problems),
        }
