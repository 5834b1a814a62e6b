"""A check as a document: what is wrong, target by target, and each figure beside its limit and its baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from memsize.documents import Case, Document, values_of
from memsize.documents.sections import Bar, Bars, Findings, Limit, Notes, Part, Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.check import FIGURE_FIELDS, Check, CheckedFigure, CheckedModel, Problem
from memsize.records.fields import Label
from memsize.records.finding import SEVERITIES

SCHEMA: Final = "memsize.check/1"
MOST_FIGURES: Final = 8
"""The most sizes that are drawn; sizes that break a limit or their baseline come first."""
_PARTS: Final = (
    Part("baseline", "baseline", "buffer"),
    Part("value", "now", "parameter"),
    Part("over", "over the limit", "gradient"),
)


class CheckDocument(Document[Check]):
    """A check: the limits and baselines of each target, and the ones that are broken."""

    def sections(self) -> tuple[Section, ...]:
        check = self.answer
        counts = [(sum(model.count(severity) for model in check.models), severity) for severity in SEVERITIES]
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
            *([bars] if (bars := self.bars()).bars else []),
            *([table] if rows else []),
            *listed("Baselines written", check.written),
        )

    def bars(self) -> Bars:
        """A bar for each size, below that of its baseline if it changed. If all sizes have one limit, it is drawn."""
        shown = sorted(_sizes(self.answer), key=lambda size: size.holds)[:MOST_FIGURES]
        several = len({size.target for size in shown}) > 1
        bars: list[Bar] = []
        for size in shown:
            of = f" of {size.target}" if several else ""
            if size.baseline not in (None, size.value):
                bars.append(Bar((Label(f"{size.name}{of}, was"),), (size.baseline, 0, 0)))
            within = size.value if size.limit is None else min(size.value, size.limit)
            bars.append(Bar((Label(f"{size.name}{of}"),), (0, within, size.value - within)))
        limits = {size.limit for size in shown}
        limit = limits.pop() if len(limits) == 1 else None
        return Bars("sizes", _PARTS, tuple(bars), None if limit is None else Limit("limit", limit))

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


class _Size(NamedTuple):
    """One checked size of a target, with its limit and its baseline; `holds` if neither is broken."""

    target: str
    name: str
    value: int
    limit: int | None
    baseline: int | None
    holds: bool


def _sizes(check: Check) -> Iterator[_Size]:
    for model in check.models:
        sizes = [figure for figure in model.figures if figure.unit == "bytes"]  # parameters are counted too
        for name in dict.fromkeys(figure.name for figure in sizes):
            figures = [figure for figure in sizes if figure.name == name]
            limit = next((figure.limit for figure in figures if figure.limit is not None), None)
            baseline = next((figure.baseline for figure in figures if figure.baseline is not None), None)
            if (value := figures[0].value) is not None:
                yield _Size(model.name, name, value, limit, baseline, all(figure.holds for figure in figures))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _model_sections(model: CheckedModel) -> Iterator[Section]:
    if model.error is not None:
        yield Notes(model.name, (f"error: {model.error}",))
    if model.problems:
        findings = (
            replace(p.finding, template=f"{p.severity} {p.finding.code}: {p.finding.template}") for p in model.problems
        )
        yield Findings(model.name, tuple(findings))


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
