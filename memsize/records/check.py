"""`Check`: a project's models compared with their limits and baselines, and the problems of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

from memsize.records.answer import Answer
from memsize.records.cells import Cell, Change, Label, Sized
from memsize.records.fields import CHANGE, NAME, TEXT, Fields, FlatTable, field, shown
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
        """The name of this check: the figure's own for its limit, with ``, growth`` for its growth."""
        return self.name if self.baseline is None else f"{self.name}, growth"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of one target. `case` is the `case` of a `Figure`, None for a finding of the report."""

    severity: Severity
    finding: Finding
    case: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The figures and problems of one target, defined at `line` of `file`, a path relative to the project's folder.

    `error` says why there are no figures: what is wrong with the call, the target or its baseline.
    """

    name: str
    file: str
    line: int
    figures: tuple[Figure, ...] = ()
    problems: tuple[Problem, ...] = ()
    error: str | None = None

    def count(self, severity: Severity) -> int:
        """Count the problems of this severity."""
        return sum(problem.severity == severity for problem in self.problems)


class CheckedFigure(NamedTuple):
    """One figure of a target."""

    model: CheckedModel
    figure: Figure

    def sized(self, size: int | None) -> Cell:
        """A value of the figure in its unit."""
        return size if size is None or self.figure.unit != "bytes" else Sized(size)

    @property
    def change(self) -> Cell:
        """The relative change of the value from its baseline; None without a baseline or a value."""
        value, baseline = self.figure.value, self.figure.baseline
        return Change((value - baseline) / baseline) if baseline and value is not None else None


FIGURE_FIELDS: Final = Fields[CheckedFigure](
    field("target", "target", NAME, 90, "the target, by the name in its section", get=lambda row: row.model.name),
    field("figure", "figure", TEXT, 100, "what is limited or compared", get=lambda row: row.figure.name),
    field("unit", get=lambda row: row.figure.unit),
    field("value", "value", TEXT, 95, "what it is now", get=lambda row: row.figure.value),
    field("limit", "limit", TEXT, 85, "the most that it may be; of fits_batch the batch that has to fit"),
    field("baseline", "baseline", TEXT, 80, "what it was", get=lambda row: row.figure.baseline),
    shown("change", "change", CHANGE, 75, "how far the value is above its baseline", cell=lambda row, _: row.change),
    field("allowed", get=lambda row: row.figure.allowed),
    field("holds", "holds", TEXT, 98, "whether it keeps its limit and its baseline", get=lambda row: row.figure.holds),
    get={"limit": lambda row: row.figure.limit},
    cell={
        "target": lambda row, _: Label(row.model.name),
        "value": lambda row, _: "does not fit" if row.figure.value is None else row.sized(row.figure.value),
        "limit": lambda row, _: row.sized(row.figure.limit),
        "baseline": lambda row, _: row.sized(row.figure.baseline),
        "holds": lambda row, _: "ok" if row.figure.holds else "broken",
    },
)


class CheckedProblem(NamedTuple):
    """One problem of a target."""

    model: CheckedModel
    problem: Problem


PROBLEM_FIELDS: Final = Fields[CheckedProblem](
    field("target", get=lambda row: row.model.name),
    field("file", get=lambda row: row.model.file),
    field("line", get=lambda row: row.model.line),
    field("severity", get=lambda row: row.problem.severity),
    field("code", get=lambda row: row.problem.finding.code),
    field("case", get=lambda row: row.problem.case),
    field("text", get=lambda row: row.problem.finding.text()),
)


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
        """The findings behind all problems, target by target."""
        return tuple(problem.finding for model in self.models for problem in model.problems)

    def worst(self) -> Severity | None:
        """The severity of the most serious problem; None where there is none."""
        severities = {problem.severity for model in self.models for problem in model.problems}
        return next((severity for severity in SEVERITIES if severity in severities), None)

    def status(self, fail_on: Severity | Literal["never"] = "error") -> int:
        """The exit status: 0 where all is well, 1 where a problem is as serious as `fail_on`, 2 where a target has no
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
        figures = (CheckedFigure(model, figure) for model in self.models for figure in model.figures)
        problems = (CheckedProblem(model, problem) for model in self.models for problem in model.problems)
        return {"figures": FIGURE_FIELDS.flat(figures), "problems": PROBLEM_FIELDS.flat(problems)}
