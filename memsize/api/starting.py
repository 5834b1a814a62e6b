"""The first section of a project: a target with limits somewhat above what it needs today, appended to the file."""

from __future__ import annotations

import itertools
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from memsize import files
from memsize.api.keywords import takes
from memsize.api.models import report
from memsize.device.cards import card
from memsize.errors import InputError, OutputError
from memsize.loading.target import parse_target
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.project import NAME, SECTION, parse_section
from memsize.spec.requests import InitRequest, ReportRequest
from memsize.spec.scenario import scenario_named
from memsize.spec.stack import Gpu
from memsize.spec.training import Training
from memsize.units import UNITS

_ROOM: Final = 1.1
"""A first limit is a tenth above what the model needs."""


@takes(InitRequest)
def init(request: InitRequest) -> tuple[Path, str]:
    """Append a section about a model to the nearest pyproject.toml, or to a new one in `folder`: the file, and what
    was added. The rest of the file stays as it is, byte for byte.

    Raises `InputError` where the file is no TOML, and `OutputError` where it cannot hold the section.
    """
    scenario = scenario_named(request.scenario).name
    parse_target(str(request.model.model))
    gpu = card(request.gpu.name or DEFAULT_GPU).name
    from memsize.analysis.check import Measured

    file = _nearest(Path(request.folder))
    report_request = ReportRequest(model=request.model)
    if request.model.has_input or request.training:
        report_request = replace(report_request, scenarios=scenario, training=request.training, gpu=Gpu(name=gpu))
    measured = Measured(report(report_request), scenario)
    before = _text(file)
    section = _section(request, dict(_limits(measured, request.training)), file, _names(before))
    parse_section(tomllib.loads(section)["tool"]["memsize"]["target"][0])
    _append(file, before, section)
    return file, section


def _nearest(folder: Path) -> Path:
    for parent in (folder.absolute(), *folder.absolute().parents):
        if (parent / NAME).is_file():
            return parent / NAME
    return folder.absolute() / NAME


def _text(file: Path) -> str:
    """The text of a TOML file, empty where there is none."""
    try:
        text = file.read_bytes().decode() if file.exists() else ""
        tomllib.loads(text)
    except ValueError as error:
        raise InputError(f"{file} is no TOML: {error}") from None
    return text


def _limits(measured: Any, train: Training | None) -> Iterator[tuple[str, object]]:
    figures = measured.figures()
    yield "parameters", _above(figures["parameter_bytes"])
    if measured.result is not None:
        yield "inference_peak", _above(measured.peak("inference").allocated)
        if train is not None:
            yield "training_peak", _above(measured.peak("training").allocated)


def _above(size: int) -> str:
    """A round size somewhat above `size`."""
    wanted = max(int(size * _ROOM), 1)
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if wanted >= UNITS[unit])
    amount = wanted / UNITS[unit]
    digits = max(0, 1 - math.floor(math.log10(amount)))
    rounded = math.ceil(amount * 10**digits) / 10**digits
    return f"{rounded:g} {unit}"


def _names(text: str) -> set[str]:
    """The names of the sections that a file has already."""
    tool = tomllib.loads(text).get("tool")
    section = tool.get("memsize") if isinstance(tool, dict) else None
    targets = section.get("target") if isinstance(section, dict) else None
    return {str(target.get("name", target.get("target"))) for target in targets or () if isinstance(target, dict)}


def _section(request: InitRequest, limits: Mapping[str, object], file: Path, names: set[str]) -> str:
    """The section as text, with a name of its own where there is one of that target. A path is that from the folder of
    the file.
    """
    model, train, scenario = request.model, request.training, request.scenario
    specs = [str(spec) for spec in model.specs]
    steps = train.gradient_accumulation_steps if train else 1
    target = _from(file.parent, str(model.model))
    others = (f"{target} {number}" for number in itertools.count(2))
    values = {
        "name": next(name for name in others if name not in names) if target in names else None,
        "target": target,
        "input": specs[0] if len(specs) == 1 else specs,
        "inputs": model.source and _from(file.parent, str(model.source)),
        "arguments": dict(model.arguments),
        "batch_size": model.batch_size if model.batch_size != 1 else None,
        "seq_len": model.seq_len,
        "mode": "eval" if model.mode == "eval" else None,
        "train": train.optimizer if train else None,
        "loss": train.loss if train else None,
        "gradient_accumulation_steps": steps if steps > 1 else None,
        "ema": train.ema or None if train else None,
        "scenario": scenario if scenario != "as-given" else None,
        "gpu": request.gpu.name,
        "limits": limits,
    }
    lines = [f"{name} = {_toml(value)}" for name, value in values.items() if value not in (None, [], {}, "")]
    more = (
        '# baseline = "memsize-baseline.json"  # written by memsize check --update; then nothing may grow by more than',
        '# max_growth = "1%"',
    )
    return "\n".join((SECTION, *lines, *more, ""))


def _from(folder: Path, target: str) -> str:
    """A target whose path is that from `folder`."""
    path, colon, name = target.partition(":")
    if not Path(path).is_file():
        return target
    return Path(os.path.relpath(path, folder)).as_posix() + colon + name


def _toml(value: object) -> str:
    """A value as TOML writes it; raises `InputError` for one that it cannot."""
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
    raise InputError(f"{value!r} cannot stand in a {NAME}: build the model in a function that takes no such argument")


def _append(file: Path, before: str, section: str) -> None:
    newline = "\r\n" if "\r\n" in before else "\n"
    gap = "" if not before else newline if before.endswith("\n") else newline * 2
    text = before + gap + section.replace("\n", newline)
    try:
        tomllib.loads(text)
    except ValueError as error:
        raise OutputError(f"{file.name} cannot take a {SECTION} at its end ({error}): add it by hand") from None
    files.write(file, text.encode(), overwrite=True)
