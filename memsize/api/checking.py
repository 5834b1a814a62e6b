"""A project's models against the limits and baselines in its pyproject.toml, and the first section of one."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memsize import files
from memsize.api.fitting import fit
from memsize.api.keywords import takes
from memsize.api.models import report
from memsize.device.cards import card
from memsize.errors import InputError, MemsizeError, OutputError, UnknownInputError
from memsize.loading.target import line_of, parse_target
from memsize.records.check import (
    Baseline,
    Check,
    CheckedModel,
    Figure,
    Problem,
    read_baselines,
    write_baselines,
)
from memsize.records.finding import Finding, Severity
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.file_requests import CheckRequest
from memsize.spec.options import values_of
from memsize.spec.project import (
    NAME,
    SECTION,
    CheckedTarget,
    Project,
    find_project,
    parse_section,
    parsed_toml,
    read_project,
    section_in,
)
from memsize.spec.requests import FitRequest, InitRequest, ReportRequest
from memsize.spec.scenario import scenario_named
from memsize.spec.stack import Gpu
from memsize.units import UNITS

if TYPE_CHECKING:
    from memsize.analysis.check import Measured


@takes(CheckRequest)
def check(request: CheckRequest, *, progress: Callable[[str], None] | None = None) -> Check:
    """Whether a project's models keep the limits and baselines of its pyproject.toml, and what is wrong where not.

    `paths` is that file, or a folder: the file is then looked for from there upwards. `select` and `ignore` add to the
    codes in the file. The working folder is the project's meanwhile. A target that fails is told in its `error`.

    Raises `InputError` for a file that is missing or cannot be meant, and `OutputError` for a baseline that cannot be
    written.
    """
    if len(request.projects) > 1:
        raise InputError("a check covers one project: check each by itself")
    project = read_project(find_project(request.projects[0]).absolute())
    select, ignore = (
        tuple(filter(None, map(str.strip, codes.split(",") if isinstance(codes, str) else codes)))
        for codes in (request.select, request.ignore)
    )
    rules = _Rules.of(project, select, ignore)
    if request.update and not any(target.baseline for target in project.targets):
        raise OutputError(f'{project.file.name} names no baseline: add baseline = "memsize-baseline.json" to a target')
    start = Path.cwd()
    with contextlib.chdir(project.file.parent):
        checked = []
        for number, target in enumerate(project.targets, 1):
            count = f"{number} of {len(project.targets)}: "
            report_progress = partial(lambda count, text: progress(count + text) if progress else None, count)
            checked.append(_checked(target, project, rules, request.update, start, report_progress))
        written = []
        for name in dict.fromkeys(target.baseline for target in project.targets if target.baseline):
            baselines = {
                target.name: baseline
                for target, (_, baseline) in zip(project.targets, checked, strict=True)
                if target.baseline == name and baseline is not None
            }
            if request.update and baselines and write_baselines(Path(name), baselines):
                written.append(os.path.relpath(name, start))
    return Check(os.path.relpath(project.file, start), tuple(model for model, _ in checked), tuple(written))


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
        own: dict[str, Severity] = {**dict[str, Severity].fromkeys(chosen, "error"), **project.severity}
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


def _checked(
    target: CheckedTarget,
    project: Project,
    rules: _Rules,
    update: bool,
    start: Path,
    report_progress: Callable[[str], None],
) -> tuple[CheckedModel, Baseline | None]:
    """The checked model, seen from the folder `start`, and its baseline of now."""
    from memsize.analysis.check import against_baseline, against_batch, against_limit

    file, line = project.file, target.line
    with contextlib.suppress(MemsizeError):  # a problem is shown at the target's own line, else its section's
        parsed = parse_target(str(target.run.model.model))
        file, line = (parsed.file, line_of(parsed)) if parsed.file else (file, line)
    model = CheckedModel(target.name, os.path.relpath(file, start), line)
    report_progress(f"checking {target.name}")
    run = target.run
    try:
        measured = _measured(target, report_progress)
        baseline = measured.baseline(target.settings)
        judged: list[tuple[Figure, Finding | None]] = []
        for bound in target.limits:
            if bound.name != "fits_batch":
                judged.append(against_limit(measured, bound))
                continue
            report_progress(f"{target.name}: batch {bound.amount}")
            sized = replace(run.model, batch_size=bound.amount)
            request = FitRequest(
                model=sized, scenarios=run.scenario, training=run.training, gpu=run.gpu, remedies=False
            )
            judged.append(against_batch(fit(request).fit_rows[0], bound))
        if target.baseline is not None and not update:
            before = read_baselines(Path(target.baseline)).get(target.name)
            if before is None:
                raise OutputError(f"{target.baseline} has no baseline of it: memsize check --update writes one")
            judged += against_baseline(baseline, before, target.max_growth)
    except MemsizeError as error:
        return replace(model, error="; ".join(filter(None, map(str.strip, str(error).splitlines())))), None
    findings = [(finding, figure.case) for figure, finding in judged if finding]
    others = [(finding, None) for finding in measured.report.findings]
    problems = tuple(rules.problems((*findings, *others)))
    return replace(model, figures=tuple(figure for figure, _ in judged), problems=problems), baseline


def _measured(target: CheckedTarget, report_progress: Callable[[str], None]) -> Measured:
    from memsize.analysis.check import Measured

    run = target.run
    library = parse_target(str(run.model.model)).library is not None
    if not (run.model.has_input or library or run.training or run.execute):
        return Measured(report(ReportRequest(model=run.model, gpu=run.gpu)), run.scenario)
    request = ReportRequest(
        model=run.model,
        training=run.training,
        gpu=replace(run.gpu, name=run.gpu.name or DEFAULT_GPU),
        execute=run.execute,
        scenarios=run.scenario,
    )
    answer = report(request, progress=lambda text: report_progress(f"{target.name}: {text}"))
    return Measured(answer, run.scenario)


# -- the first section: a target with limits somewhat above what it needs today ---------------------------------------

_ROOM: Final = 1.1
"""A first limit is a tenth above what the model needs."""


@takes(InitRequest)
def init(request: InitRequest) -> tuple[Path, str]:
    """Append a section about a model to the nearest pyproject.toml, or to a new one in `folder`: the file, and what
    was added. The rest of the file stays as it is, byte for byte.

    Raises `InputError` where the file is not TOML, and `OutputError` where it cannot hold the section.
    """
    scenario = scenario_named(request.scenario).name
    if not isinstance(request.model.model, str):
        raise InputError(f"{NAME} names its models: give a target, such as model.py:Net, and no module")
    parse_target(request.model.model)
    gpu = card(request.gpu.name or DEFAULT_GPU).name
    from memsize.analysis.check import Measured

    folder = Path(request.folder).absolute()
    file = next((above / NAME for above in (folder, *folder.parents) if (above / NAME).is_file()), folder / NAME)
    report_request = ReportRequest(model=request.model)
    if request.model.has_input or request.training:
        report_request = replace(report_request, scenarios=scenario, training=request.training, gpu=Gpu(name=gpu))
    measured = Measured(report(report_request), scenario)
    limits = {"parameters": _above(measured.figures()["parameter_bytes"])}
    if measured.result is not None:
        limits["inference_peak"] = _above(measured.peak("inference").allocated)
        if request.training is not None:
            limits["training_peak"] = _above(measured.peak("training").allocated)
    before, data = parsed_toml(file) if file.exists() else ("", {})
    targets = section_in(data).get("target") or ()
    names = {str(target.get("name", target.get("target"))) for target in targets if isinstance(target, dict)}
    section = _section(request, limits, file, names)
    parse_section(tomllib.loads(section)["tool"]["memsize"]["target"][0])
    newline = "\r\n" if "\r\n" in before else "\n"
    gap = "" if not before else newline if before.endswith("\n") else newline * 2
    text = before + gap + section.replace("\n", newline)
    try:
        tomllib.loads(text)
    except ValueError as error:
        raise OutputError(f"{file.name} cannot take a {SECTION} at its end ({error}): add it by hand") from None
    files.write(file, text.encode(), overwrite=True)
    return file, section


def _above(size: int) -> str:
    wanted = max(int(size * _ROOM), 1)
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if wanted >= UNITS[unit])
    amount = wanted / UNITS[unit]
    digits = max(0, 1 - math.floor(math.log10(amount)))
    rounded = math.ceil(amount * 10**digits) / 10**digits
    return f"{rounded:g} {unit}"


def _section(request: InitRequest, limits: Mapping[str, object], file: Path, names: set[str]) -> str:
    """The section as text, with a name of its own where there is one of that target. A path is that from the folder of
    the file.
    """
    values = values_of(request) | {"limits": limits}
    values.pop("folder", None)
    for key in {"target", "inputs"} & values.keys():
        values[key] = _from(file.parent, str(values[key]))
    if specs := [str(spec) for spec in values.get("input", ())]:
        values["input"] = specs[0] if len(specs) == 1 else specs
    if (target := values["target"]) in names:
        others = (f"{target} {number}" for number in itertools.count(2))
        values = {"name": next(name for name in others if name not in names), **values}
    lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
    more = (
        '# baseline = "memsize-baseline.json"  # memsize check --update writes it',
        '# max_growth = "1%"  # beyond the baseline',
    )
    return "\n".join((SECTION, *lines, *more, ""))


def _from(folder: Path, target: str) -> str:
    path, colon, name = target.partition(":")
    if not Path(path).is_file():
        return target
    return Path(os.path.relpath(path, folder)).as_posix() + colon + name


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case Mapping():
            return f"{{ {', '.join(f'{name} = {_toml(entry)}' for name, entry in value.items())} }}"
    raise InputError(
        f"{value!r} cannot be written to a {NAME}: build the model in a function that takes no such argument"
    )
