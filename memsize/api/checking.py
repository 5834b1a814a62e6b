"""A project's models against the limits and baselines in its pyproject.toml."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memsize.api.fitting import fit
from memsize.api.keywords import takes
from memsize.api.models import report
from memsize.errors import InputError, MemsizeError, OutputError, UnknownInputError
from memsize.loading.target import line_of, parse_target
from memsize.records.baseline import Baseline, read_baselines, write_baselines
from memsize.records.check import Check, CheckedModel, Figure, Problem, Severity
from memsize.records.finding import Finding
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.project import CheckedTarget, Project, find_project, read_project
from memsize.spec.requests import CheckRequest, FitRequest, ReportRequest

if TYPE_CHECKING:
    from memsize.analysis.check import Measured

_ERROR: Final[Severity] = "error"
Judged = tuple[Figure, Finding | None]


@takes(CheckRequest)
def check(request: CheckRequest, *, progress: Callable[[str], None] | None = None) -> Check:
    """Whether a project's models keep the limits and baselines of its pyproject.toml, and what is wrong where not.

    `paths` is that file, or a folder: the file is then looked for from there upwards. `select` names codes of findings
    that count as errors, `ignore` codes to leave out, in addition to those in the file. `update` writes the baselines
    instead of comparing with them. `progress` is called with what is being done. The working folder is the project's
    meanwhile. A target that fails is told in its `error`.

    Raises `InputError` for a file that is missing or cannot be meant, and `OutputError` for a baseline that cannot be
    written.
    """
    if len(request.projects) > 1:
        raise InputError("a check is of one project: ask about each by itself")
    project = read_project(find_project(request.projects[0]).absolute())
    rules = _Rules.of(project, _codes(request.select), _codes(request.ignore))
    if request.update and not any(target.baseline for target in project.targets):
        raise OutputError(f'{project.file.name} names no baseline: add baseline = "memsize-baseline.json" to a target')
    start, report_progress, count = Path.cwd(), progress or (lambda _: None), len(project.targets)
    with contextlib.chdir(project.file.parent):
        checks = [
            _TargetCheck(
                target,
                project,
                rules,
                request.update,
                start,
                partial(_counted, report_progress, f"{number} of {count}"),
            )
            for number, target in enumerate(project.targets, 1)
        ]
        checked = [check.result() for check in checks]
        written = _write_baselines(project, checked, start) if request.update else ()
    return Check(os.path.relpath(project.file, start), tuple(model for model, _ in checked), tuple(written))


_Checked = tuple[CheckedModel, Baseline | None]


def _write_baselines(project: Project, checked: Sequence[_Checked], start: Path) -> tuple[str, ...]:
    """Write the baselines of now to the files that the project names, and return those that changed."""
    written = []
    for name in dict.fromkeys(target.baseline for target in project.targets if target.baseline):
        baselines = {
            target.name: baseline
            for target, (_, baseline) in zip(project.targets, checked, strict=True)
            if target.baseline == name and baseline is not None
        }
        if baselines and write_baselines(Path(name), baselines):
            written.append(os.path.relpath(name, start))
    return tuple(written)


def _codes(codes: str | Iterable[str]) -> tuple[str, ...]:
    parts = codes.split(",") if isinstance(codes, str) else codes
    return tuple(code.strip() for code in parts if code.strip())


@dataclass(frozen=True, slots=True)
class _Rules:
    """The findings that are problems, and how serious each is."""

    severity: dict[str, Severity]
    chosen: frozenset[str]
    ignored: frozenset[str]

    @classmethod
    def of(cls, project: Project, select: tuple[str, ...], ignore: tuple[str, ...]) -> _Rules:
        from memsize.analysis.findings.report_rules import SEVERITY

        chosen, ignored = {*project.select, *select}, {*project.ignore, *ignore}
        for code in (*chosen, *ignored, *project.severity):
            if code not in SEVERITY:
                raise UnknownInputError("finding", code, SEVERITY)
        own: dict[str, Severity] = {**dict.fromkeys(chosen, _ERROR), **project.severity}
        return cls({**SEVERITY, **own}, frozenset(own), frozenset(ignored))

    def problems(self, findings: Iterable[tuple[Finding, str | None]]) -> Iterator[Problem]:
        """The problems among `findings`, each with the case that it is about, the most serious first."""
        from memsize.analysis.findings.report_rules import OWN

        shown = [
            Problem(severity, finding, case)
            for finding, case in findings
            if finding.code not in self.ignored
            and ((severity := self.severity[finding.code]) != "note" or finding.code in {*OWN, *self.chosen})
        ]
        for level in ("error", "warning", "note"):
            yield from (problem for problem in shown if problem.severity == level)


def _counted(report_progress: Callable[[str], None], count: str, text: str) -> None:
    report_progress(f"{count}: {text}")


@dataclass(frozen=True, slots=True)
class _TargetCheck:
    """One target of a project to check, from the folder `start`."""

    target: CheckedTarget
    project: Project
    rules: _Rules
    update: bool
    start: Path
    report_progress: Callable[[str], None]

    def result(self) -> _Checked:
        """The checked model, and its baseline of now."""
        target = self.target
        file, line = _line(target, self.project)
        model = CheckedModel(target.name, os.path.relpath(file, self.start), line)
        self.report_progress(f"checking {target.name}")
        try:
            measured = _measured(target, self.report_progress)
            baseline = measured.baseline(target.settings)
            judged = [
                *_limits(target, measured, self.report_progress),
                *([] if self.update else _growth(target, baseline)),
            ]
        except MemsizeError as error:
            return replace(model, error="; ".join(filter(None, map(str.strip, str(error).splitlines())))), None
        findings = [(finding, figure.case) for figure, finding in judged if finding]
        others = [(finding, None) for finding in measured.report.findings]
        problems = tuple(self.rules.problems((*findings, *others)))
        return replace(model, figures=tuple(figure for figure, _ in judged), problems=problems), baseline


def _line(target: CheckedTarget, project: Project) -> tuple[Path, int]:
    """The file and the line that a problem is shown at: the target's own, else its section's."""
    try:
        parsed = parse_target(str(target.run.model.model))
    except MemsizeError:
        return project.file, target.line
    return (parsed.file, line_of(parsed)) if parsed.file else (project.file, target.line)


def _measured(target: CheckedTarget, report_progress: Callable[[str], None]) -> Measured:
    from memsize.analysis.check import Measured

    run = target.run
    library = parse_target(str(run.model.model)).library is not None
    if not (run.model.has_input or library or run.training or run.execute):
        return Measured(report(run.model), run.scenario)
    request = ReportRequest(
        model=run.model,
        training=run.training,
        gpu=replace(run.gpu, name=run.gpu.name or DEFAULT_GPU),
        execute=run.execute,
        scenarios=run.scenario,
    )
    answer = report(request, progress=lambda text: report_progress(f"{target.name}: {text}"))
    return Measured(answer, run.scenario)


def _limits(target: CheckedTarget, measured: Measured, report_progress: Callable[[str], None]) -> Iterator[Judged]:
    from memsize.analysis.check import against_batch, against_limit

    run = target.run
    for bound in target.limits:
        if bound.name != "fits_batch":
            yield against_limit(measured, bound)
            continue
        report_progress(f"{target.name}: batch {bound.amount}")
        request = FitRequest(
            model=replace(run.model, batch_size=bound.amount),
            scenarios=run.scenario,
            training=run.training,
            gpu=run.gpu,
            remedies=False,
        )
        yield against_batch(fit(request).fit_rows[0], bound)


def _growth(target: CheckedTarget, now: Baseline) -> Iterator[Judged]:
    from memsize.analysis.check import against_baseline

    if target.baseline is None:
        return
    before = read_baselines(Path(target.baseline)).get(target.name)
    if before is None:
        raise OutputError(f"{target.baseline} has no baseline of it: memsize check --update writes one")
    yield from against_baseline(now, before, target.max_growth)
