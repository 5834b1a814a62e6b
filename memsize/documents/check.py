"""A check as a document: what is wrong, target by target, and each figure beside its limit and its baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from memsize.documents import Case, Document, values_of
from memsize.documents.sections import Bar, Bars, Findings, Limit, Notes, Part, Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.check import FIGURE_FIELDS, Check, CheckedFigure, CheckedModel, Problem
from memsize.records.fields import Label
from memsize.records.finding import SEVERITIES

SCHEMA: Final = "memsize.check/1"
MOST_FIGURES: Final = 8
"""The most figures that are drawn."""
_WRITTEN: Final = "Baselines written"
_PARTS: Final = (
    Part("value", "within the limit", "parameter"),
    Part("over", "over the limit", "gradient"),
)


class CheckDocument(Document[Check]):
    """A check: the limits and baselines of each target, and the ones that are broken."""

    def sections(self) -> tuple[Section, ...]:
        check = self.answer
        problems = [problem for model in check.models for problem in _joined(model)]
        counts = [(sum(problem.severity == severity for problem in problems), severity) for severity in SEVERITIES]
        parts = [_counted(count, word) for count, word in counts if count]
        failed = sum(model.error is not None for model in check.models)
        targets = _counted(len(check.models), "target")
        verdict = f"{', '.join(parts)} in {targets}" if parts else "" if failed else f"All limits hold ({targets})"
        if failed:
            verdict = "; ".join(filter(None, (", ".join(parts), f"{failed:,} of {targets} could not be checked")))
        rows = [CheckedFigure(model, figure) for model in check.models for figure in model.figures]
        table = Table.of("figures", "Figures", FIGURE_FIELDS, rows).without_empty("limit", "baseline", "change")
        return (
            Title(verdict, ((check.project,),)),
            *(section for model in check.models for section in _model_sections(model)),
            *self.opening(),
            *([table] if rows else []),
            *listed(_WRITTEN, check.written),
        )

    def is_verdict(self, section: Section) -> bool:
        return isinstance(section, Findings | Notes) and section.title != _WRITTEN

    def bars(self) -> Bars:
        """A bar for each figure in per cent of its limit, or of what its baseline allows; the ones above it first."""
        several = len(self.answer.models) > 1
        bars: list[Bar] = []
        for model in self.answer.models:
            for figure in model.figures:
                most = figure.limit if figure.baseline is None else figure.allowed
                if most and figure.value is not None and figure.unit != "samples":
                    share = -(-100 * figure.value // most)  # rounded up, so that more than the limit is more than 100 %
                    label = Label(f"{figure.case} of {model.name}" if several else figure.case)
                    bars.append(Bar((label,), (min(share, 100), max(share - 100, 0))))
        shown = sorted(bars, key=lambda bar: -bar.total)[:MOST_FIGURES]
        return Bars("figures in % of their limits", _PARTS, tuple(shown), Limit("limit", 100), kind="percent")

    def figures(self, unit: str) -> dict[str, Any]:
        check, fields = self.answer, FIGURE_FIELDS.without("target")
        return {
            "schema": SCHEMA,
            "project": check.project,
            "status": check.status(),
            "targets": [
                {
                    **values_of(model, "name", "file", "line", "error"),
                    "figures": [fields.record(CheckedFigure(model, figure)) for figure in model.figures],
                    "problems": [
                        {"severity": p.severity, "code": p.finding.code, "case": p.case}
                        | {"layers": p.finding.layers, "bytes": p.finding.bytes, "text": p.finding.text(unit)}
                        for p in model.problems
                    ],
                }
                for model in check.models
            ],
            "written": check.written,
        }

    def cases(self, unit: str) -> tuple[Case, ...]:
        return tuple(case for model in self.answer.models for case in _cases(model, unit))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _model_sections(model: CheckedModel) -> Iterator[Section]:
    if model.error is not None:
        yield Notes(model.name, (f"error: {model.error}",))
    if problems := _joined(model):
        findings = (
            replace(p.finding, template=f"{p.severity} {p.finding.code}: {p.finding.template}") for p in problems
        )
        yield Findings(model.name, tuple(findings))


def _joined(model: CheckedModel) -> list[Problem]:
    """The problems of a target, those of figures that grew as one: a layer that is widened makes all of them grow."""
    grown = [problem for problem in model.problems if problem.finding.code == "grew"]
    if len(grown) < 2:
        return [*model.problems]
    first = next((problem for problem in grown if problem.finding.bytes is not None), grown[0])
    shares = (f"{{name{n}}} {problem.finding.values['share']}" for n, problem in enumerate(grown))
    names = {f"name{n}": problem.finding.values["name"] for n, problem in enumerate(grown)}
    _, mostly, blamed = first.finding.template.partition(", mostly")
    template = f"{', '.join(shares)}{mostly}{blamed or '.'}"
    finding = replace(first.finding, template=template, values={**first.finding.values, **names})
    rest = (problem for problem in model.problems if problem not in grown)
    return [*rest, replace(first, finding=finding)]


def _cases(model: CheckedModel, unit: str) -> Iterator[Case]:
    base = Case(model.name, "", model.file, model.line)
    if model.error is not None:
        yield base._replace(name="target", code="target", severity="error", text=model.error, failed_to_run=True)

    def case(name: str, problem: Problem | None) -> Case:
        if problem is None:
            return base._replace(name=name)
        finding = problem.finding
        return base._replace(name=name, code=finding.code, severity=problem.severity, text=finding.text(unit))

    about = {problem.case: problem for problem in model.problems if problem.case}
    for figure in model.figures:
        yield case(figure.case, about.get(figure.case))
    for problem in model.problems:
        if problem.case is None:
            yield case(problem.finding.code, problem)
