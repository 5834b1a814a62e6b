"""`Check`: a project's models compared with their limits and baselines, and the problems of each.

Baselines are figures of a project's models in a file that is committed, one line for each layer: only figures that
depend on the model alone, no version, no time, no workspace of a library. A file that is newer, damaged or not ours is
refused in one line, and never overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple

from memsize import files
from memsize.errors import InputError, OutputError
from memsize.records.answer import Answer
from memsize.records.codec import coder
from memsize.records.fields import Cell, Change, Fields, FlatTable, Label, Sized, field, shown
from memsize.records.finding import SEVERITIES, Finding, Severity


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
    field("target", "target", "name", 90, "the target, by the name in its section", get="model.name"),
    field("figure", "figure", "text", 100, "the figure that is limited or compared", get="figure.name"),
    field("unit", get="figure.unit"),
    field("value", "value", "text", 95, "its value now", get="figure.value"),
    field("limit", "limit", "text", 85, "upper limit of the value; for fits_batch, the batch that has to fit"),
    field("baseline", "baseline", "text", 80, "its value in the baseline", get="figure.baseline"),
    shown("change", "change", "change", 75, "growth since the baseline", cell=lambda row, _: row.change),
    field("allowed", get="figure.allowed"),
    field("holds", "holds", "text", 98, "whether it keeps its limit and its baseline", get="figure.holds"),
    get={"limit": "figure.limit"},
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
    field("target", get="model.name"),
    field("file", get="model.file"),
    field("line", get="model.line"),
    field("severity", get="problem.severity"),
    field("code", get="problem.finding.code"),
    field("case", get="problem.case"),
    field("text", get=lambda row: row.problem.finding.text()),
)


@dataclass(frozen=True, slots=True, repr=False)
class Check(Answer):
    """A project's models against their limits and baselines, in `project`, its file; `written` are new baselines."""

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
        """The exit status: 0 if all is well, 1 for a problem as bad as `fail_on`, 2 for a target without figures."""
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


# -- baselines ---------------------------------------------------------------------------------------------------------

SCHEMA: Final = "memsize.baseline"
NEWEST: Final = 1
_MOST_BYTES: Final = 1 << 26


class LayerFigures(NamedTuple):
    """The bytes that a layer itself stores, and those that it keeps for backward."""

    stored: int
    kept: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """One target: how it was run, its figures by name, and its layers."""

    settings: Mapping[str, str]
    figures: Mapping[str, int]
    layers: Mapping[str, LayerFigures]


def read_baselines(path: Path) -> dict[str, Baseline]:
    """Return the baselines in a file by target; an empty dict where there is no file.

    Raises `InputError` for a file that holds no baselines, is damaged, or was written by a newer memsize.
    """
    try:
        data: Any = files.parse_json(files.read(path, _MOST_BYTES))
        match data:
            case {"schema": str(schema), "targets": dict(targets)} if schema.partition("/")[0] == SCHEMA:
                number = schema.partition("/")[2]
            case _:
                raise InputError(f"{path} is not a baseline of memsize")
        if not number.isdecimal() or int(number) > NEWEST:
            raise InputError(f"{path} was written by a newer memsize ({schema:.40})")
        return {name: coder(Baseline).read(target) for name, target in targets.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def write_baselines(path: Path, baselines: Mapping[str, Baseline]) -> bool:
    """Write `baselines` into a file, beside those of other targets, whole or not at all. Return True if it changed.

    Raises `OutputError` where the file exists and cannot be read, or cannot be written.
    """
    try:
        present = read_baselines(path)
    except InputError as error:
        raise OutputError(f"{error}; it is not overwritten") from None
    wanted = {**present, **baselines}
    if wanted == present and path.exists():
        return False
    files.write(path, _text(wanted), overwrite=True)
    return True


def _text(baselines: Mapping[str, Baseline]) -> str:
    """Format the file: sorted, with one line for each figure and layer, so that its diffs are readable."""
    targets = []
    for name in sorted(baselines):
        parts = coder(Baseline).write(baselines[name]).items()
        figures = ",\n".join(f"      {_dumps(part)}: {_object(values)}" for part, values in parts)
        targets.append(f"    {_dumps(name)}: {{\n{figures}\n    }}")
    joined = ",\n".join(targets)
    return f'{{\n  "schema": "{SCHEMA}/{NEWEST}",\n  "targets": {{\n{joined}\n  }}\n}}\n'


def _object(values: Mapping[str, Any]) -> str:
    inner = ",\n".join(f"        {_dumps(name)}: {_dumps(value)}" for name, value in values.items())
    return f"{{\n{inner}\n      }}" if inner else "{}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
