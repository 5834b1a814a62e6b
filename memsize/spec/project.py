"""What a project asks of its models: the `[[tool.memsize.target]]` sections of its pyproject.toml, as values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from memsize.errors import InputError, quoted
from memsize.records.check import SEVERITIES, Severity
from memsize.spec.limits import LIMITS, Bound, Growth, parse_limits
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import scenario_named
from memsize.spec.section import MODEL_KEYS, Keys, check_type, parsed_toml, refuse_unknown, subject_of, training_of
from memsize.spec.stack import Stack
from memsize.spec.training import Training

NAME: Final = "pyproject.toml"
SECTION: Final = "[[tool.memsize.target]]"


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """One section: a target, how it is run, and what it must hold. `line` is that of the section in the file."""

    name: str
    subject: ModelRequest
    line: int
    training: Training | None = None
    scenario: str = "as-given"
    gpu: str | None = None
    stack: str | None = None
    allocator: str | None = None
    execute: bool = False
    limits: tuple[Bound, ...] = ()
    baseline: str | None = None
    max_growth: Growth = field(default_factory=Growth)

    @property
    def settings(self) -> dict[str, str]:
        """What its figures depend on beside the code, as texts: a baseline is for one such setting."""
        subject, training = self.subject, self.training
        given = {
            "target": str(subject.model),
            "input": " ".join(map(str, subject.specs)),
            "inputs": subject.source or "",
            "arguments": ", ".join(f"{name}={value!r}" for name, value in sorted(subject.arguments.items())),
            "batch_size": subject.batch_size,
            "seq_len": subject.seq_len or "",
            "mode": subject.mode,
            "scenario": self.scenario,
            "train": training.optimizer if training else "",
            "loss": (training.loss if training else None) or "",
            "accumulate": training.accumulate if training and training.accumulate > 1 else "",
            "ema": training.ema or "" if training else "",
            "gpu": self.gpu or "",
            "stack": self.stack or "",
        }
        return {name: str(value) for name, value in given.items() if value != ""}


@dataclass(frozen=True, slots=True)
class Project:
    """A project's file, the targets in it, and which findings count: `severity` by code, those to `select` or to
    `ignore`.
    """

    file: Path
    targets: tuple[CheckedTarget, ...]
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, Severity] = field(default_factory=dict)


def find_project(start: Path) -> Path:
    """The nearest pyproject.toml with a section of memsize's, from `start` upwards (a folder, or the file itself).

    Raises `InputError` where there is none.
    """
    if start.is_file():
        return start
    if not start.is_dir():
        raise InputError(f"no such file or folder: {start}")
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / NAME).is_file() and _section(parsed_toml(folder / NAME)[1]):
            return folder / NAME
    raise InputError(f"no {NAME} here or above has a {SECTION}: memsize check --init TARGET writes one")


def read_project(file: Path) -> Project:
    """The sections of `file`; raises `InputError`, naming the line, for what cannot be meant."""
    text, data = parsed_toml(file)
    section = _section(data)
    refuse_unknown("key", section, ("target", "select", "ignore", "severity"), f"{file.name}: [tool.memsize]")
    sections = section.get("target", [])
    if not (isinstance(sections, list) and all(isinstance(each, dict) for each in sections)):
        raise InputError(f"{file.name}: write targets as {SECTION}, with two brackets")
    if not sections:
        raise InputError(f"{file.name} has no {SECTION}: memsize check --init TARGET writes one")
    places = [*_lines(text), *[1] * len(sections)]
    targets = tuple(_told(file, line, each) for line, each in zip(places, sections, strict=False))
    names = [target.name for target in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{file.name}: two targets are {quoted(twice)}: give each a name = "…" of its own')
    select, ignore = (_codes(file, section, key) for key in ("select", "ignore"))
    return Project(file, targets, select, ignore, _severities(file, section))


def _section(data: Mapping[str, Any]) -> dict[str, Any]:
    tool = data.get("tool")
    found = tool.get("memsize") if isinstance(tool, dict) else None
    return found if isinstance(found, dict) else {}


def _lines(text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*tool\s*\.\s*memsize\s*\.\s*target\s*\]\]", line):
            yield number


def _told(file: Path, line: int, section: Mapping[str, Any]) -> CheckedTarget:
    try:
        return parse_section(section, line)
    except InputError as error:
        raise InputError(f"{file.name}:{line}: {error}") from None


_KEYS: Final[Keys] = {
    "name": (str,),
    **MODEL_KEYS,
    "limits": (dict,),
    "baseline": (str,),
    "max_growth": (str, int),
}
"""What a section may say, and the types that TOML gives it."""


def parse_section(section: Mapping[str, Any], line: int = 1) -> CheckedTarget:
    """One section as a value; raises `InputError` for a key or a value that cannot be meant."""
    refuse_unknown("key", section, _KEYS, SECTION)
    for key, value in section.items():
        check_type(key, value, _KEYS[key])
    if not section.get("target"):
        raise InputError(f'{SECTION} needs a target, such as target = "model.py:Net"')
    target = CheckedTarget(
        section.get("name", section["target"]),
        subject_of(section),
        line,
        training_of(section),
        scenario_named(section.get("scenario", "as-given")).name,
        section.get("gpu"),
        str(Stack.parse(section["stack"])) if "stack" in section else None,
        section.get("allocator"),
        section.get("execute", False),
        parse_limits(section.get("limits", {})),
        section.get("baseline"),
        Growth.parse(section.get("max_growth", 0)),
    )
    _refuse_contradictions(target, section)
    return target


def _refuse_contradictions(target: CheckedTarget, section: Mapping[str, Any]) -> None:
    for bound in target.limits:
        if LIMITS[bound.name].of_peak == "training" and target.training is None:
            raise InputError(f'the limit {bound.name} needs training steps: name an optimizer, such as train = "adamw"')
    if "max_growth" in section and target.baseline is None:
        raise InputError('max_growth compares with a baseline: name its file, such as baseline = "memsize.json"')


def _codes(file: Path, section: Mapping[str, Any], key: str) -> tuple[str, ...]:
    given = section.get(key, [])
    if not (isinstance(given, list) and all(isinstance(code, str) for code in given)):
        raise InputError(f'{file.name}: {key} is a list of codes, such as ["unused-parameters"]')
    return tuple(given)


def _severities(file: Path, section: Mapping[str, Any]) -> dict[str, Severity]:
    given = section.get("severity", {})
    if not (isinstance(given, dict) and all(value in SEVERITIES for value in given.values())):
        example = '{ unused-parameters = "error" }'
        raise InputError(f"{file.name}: severity is a table such as {example}, with error, warning or note")
    return given
