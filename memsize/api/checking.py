"""A project's models against the limits and baselines in its pyproject.toml."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memsize.api.fitting import fit
from memsize.api.models import report
from memsize.errors import MemsizeError, OutputError, UnknownInputError
from memsize.loading.target import line_of, parse_target
from memsize.records.baseline import Baseline, read_baselines, write_baselines
from memsize.records.check import Check, CheckedModel, Figure, Problem, Severity
from memsize.records.finding import Finding
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.project import CheckedTarget, Project, find_project, read_project
from memsize.spec.stack import Stack

if TYPE_CHECKING:
    from memsize.analysis.check import Measured

_ERROR: Final[Severity] = "error"
Judged = tuple[Figure, Finding | None]


def check(
    path: str | os.PathLike[str] = ".",
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    update: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Check:
    """Whether a project's models keep the limits and baselines of its pyproject.toml, and what is wrong where not.

    `path` is that file, or a folder: the file is then looked for from there upwards. `select` names codes of findings
    that count as errors, `ignore` codes to leave out, in addition to those in the file. `update` writes the baselines
    instead of comparing with them. `progress` is called with what is being done. The working folder is the project's
    meanwhile. A target that fails is told in its `error`.

    Raises `InputError` for a file that is missing or cannot be meant, and `OutputError` for a baseline that cannot be
    written.
    """
    project = read_project(find_project(Path(path)).absolute())
    rules = _Rules.of(project, tuple(select), tuple(ignore))
    if update and not any(target.baseline for target in project.targets):
        raise OutputError(f'{project.file.name} names no baseline: add baseline = "memsize-baseline.json" to a target')
    start, written = Path.cwd(), []
    say, count = progress or (lambda _: None), len(project.targets)
    with contextlib.chdir(project.file.parent):
        checked = [
            _checked(target, project, rules, update, start, partial(_counted, say, f"{place} of {count}"))
            for place, target in enumerate(project.targets, 1)
        ]
        for name in dict.fromkeys(target.baseline for target in project.targets if update and target.baseline):
            found = {
                target.name: baseline
                for target, (_, baseline) in zip(project.targets, checked, strict=True)
                if target.baseline == name and baseline is not None
            }
            if found and write_baselines(Path(name), found):
                written.append(os.path.relpath(name, start))
    return Check(os.path.relpath(project.file, start), tuple(model for model, _ in checked), tuple(written))


@dataclass(frozen=True, slots=True)
class _Rules:
    """Which findings are problems, and how serious each is."""

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

        told = [(self.severity[f.code], f, case) for f, case in findings if f.code not in self.ignored]
        kept = [each for each in told if each[0] != "note" or each[1].code in OWN or each[1].code in self.chosen]
        for level in ("error", "warning", "note"):
            yield from (Problem(severity, f, case) for severity, f, case in kept if severity == level)


def _counted(say: Callable[[str], None], count: str, text: str) -> None:
    say(f"{count}: {text}")


def _checked(
    target: CheckedTarget,
    project: Project,
    rules: _Rules,
    update: bool,
    start: Path,
    say: Callable[[str], None],
) -> tuple[CheckedModel, Baseline | None]:
    """What is found about one target, and its baseline of now."""
    file, line = _place(target, project)
    model = CheckedModel(target.name, os.path.relpath(file, start), line)
    say(f"checking {target.name}")
    try:
        measured = _measured(target, say)
        baseline = measured.baseline(target.settings)
        judged = [*_limits(target, measured, say), *([] if update else _growth(target, baseline))]
    except MemsizeError as error:
        return replace(model, error="; ".join(filter(None, map(str.strip, str(error).splitlines())))), None
    findings = [(finding, figure.case) for figure, finding in judged if finding]
    others = [(finding, None) for finding in measured.report.findings]
    problems = tuple(rules.problems((*findings, *others)))
    return replace(model, figures=tuple(figure for figure, _ in judged), problems=problems), baseline


def _place(target: CheckedTarget, project: Project) -> tuple[Path, int]:
    """The file and the line that a problem is shown at: the target's own, else its section's."""
    try:
        parsed = parse_target(str(target.subject.model))
    except MemsizeError:
        return project.file, target.line
    return (parsed.file, line_of(parsed)) if parsed.file else (project.file, target.line)


def _measured(target: CheckedTarget, say: Callable[[str], None]) -> Measured:
    from memsize.analysis.check import Measured
    from memsize.device.allocator_config import AllocatorConfig

    software = Stack.of(target.stack)
    subject = target.subject
    library = parse_target(str(subject.model)).library is not None
    if not (subject.has_input or library or target.training or target.execute):
        return Measured(report(subject), target.scenario)
    found = report(
        subject,
        scenarios=target.scenario,
        train=target.training,
        gpu=target.gpu or DEFAULT_GPU,
        stack=software,
        config=AllocatorConfig.parse(target.allocator, software.release) if target.allocator else None,
        execute=target.execute,
        progress=lambda text: say(f"{target.name}: {text}"),
    )
    return Measured(found, target.scenario)


def _limits(target: CheckedTarget, measured: Measured, say: Callable[[str], None]) -> Iterator[Judged]:
    from memsize.analysis.check import against_batch, against_limit

    for bound in target.limits:
        if bound.name != "fits_batch":
            yield against_limit(measured, bound)
            continue
        say(f"{target.name}: batch {bound.amount}")
        found = fit(
            replace(target.subject, batch_size=bound.amount),
            scenarios=target.scenario,
            train=target.training,
            gpu=target.gpu,
            stack=target.stack,
            config=target.allocator,
            remedies=False,
        )
        yield against_batch(found.fit_rows[0], bound)


def _growth(target: CheckedTarget, now: Baseline) -> Iterator[Judged]:
    from memsize.analysis.check import against_baseline

    if target.baseline is None:
        return
    before = read_baselines(Path(target.baseline)).get(target.name)
    if before is None:
        raise OutputError(f"{target.baseline} has no baseline of it: memsize check --update writes one")
    yield from against_baseline(now, before, target.max_growth)
