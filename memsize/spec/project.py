"""A project's limits on its models: the `[[tool.memsize.target]]` sections of its pyproject.toml, as values.

The keys of a section, which says which model is meant and how it is run, are those of the command line's options, as
in the file of a sweep.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from memsize import files
from memsize.errors import InputError, UnknownInputError, quoted
from memsize.records.finding import SEVERITIES, Severity
from memsize.spec.model_request import ModelRequest
from memsize.spec.options import TOML_TYPES, build, check_type, option, options_of, part, values_of
from memsize.spec.scenario import scenario_named
from memsize.spec.stack import Gpu
from memsize.spec.training import Training
from memsize.units import parse_bytes

_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The keys that every section may have of a model and its run."""

    model: ModelRequest = part(ModelRequest)
    training: Training | None = part(
        Training,
        when="train",
        purpose='training steps: name an optimizer, such as {} = "adamw"',
        without=("steps", "set_to_none", "scaler"),
        optimizer={"default": None},
    )
    scenario: str = option("as-given", "How the model is stored and run.")
    gpu: Gpu = part(Gpu)
    execute: bool = option(False, "Run with real values on the CPU.")

    def __post_init__(self) -> None:
        scenario_named(self.scenario)


MODEL_KEYS: Final = tuple(options_of(ModelSection))
"""What every section may say of a model and its run."""


def section_of(values: Mapping[str, Any]) -> ModelSection:
    """The keys of `MODEL_KEYS` among `values` as a value; raises `InputError` for what cannot be meant."""
    options = options_of(ModelSection)
    for key, value in values.items():
        if key in options:
            check_type(key, value, (*TOML_TYPES[options[key].kind or "text"], *options[key].types))
    return build(ModelSection, values)


def parsed_toml(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file and its data; raises `InputError` for a file that is not TOML."""
    try:
        text = files.read(file, _MOST_BYTES).decode()
        return text, tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not TOML: {error}") from None


def refuse_unknown(section: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Raise `InputError` for a key of `section` that is none of `keys`."""
    keys = tuple(keys)
    for key in section:
        if key not in keys:
            raise UnknownInputError("key", key, keys, problem=f"{where} has no key {quoted(key)}")


NAME: Final = "pyproject.toml"
SECTION: Final = "[[tool.memsize.target]]"


Unit = Literal["bytes", "elements", "samples"]


class Meaning(NamedTuple):
    """The quantity that a limit bounds, in the units that its value may have; plain numbers are in the first."""

    title: str
    units: tuple[Unit, ...]
    of_peak: Literal["", "inference", "training", "either"] = ""
    """Whether it needs the peak of a run on a GPU."""


LIMITS: Final[dict[str, Meaning]] = {
    "parameters": Meaning("parameters, tied ones once", ("elements", "bytes")),
    "trainable": Meaning("parameters that require a gradient", ("elements",)),
    "buffers": Meaning("registered buffers", ("bytes",)),
    "stored": Meaning("all that the model holds: parameters, buffers, and tensors that are not registered", ("bytes",)),
    "activations": Meaning("bytes that one forward keeps for backward, without parameters", ("bytes",)),
    "inference_peak": Meaning("`max_memory_allocated` of a forward without gradients", ("bytes",), "inference"),
    "training_peak": Meaning("`max_memory_allocated` of training steps; needs `train`", ("bytes",), "training"),
    "reserved": Meaning("`max_memory_reserved` of training with `train`, else of inference", ("bytes",), "either"),
    "device": Meaning("the most that `nvidia-smi` may show for the process, of the same run", ("bytes",), "either"),
    "fits_batch": Meaning("a batch that has to fit the GPU, in training with `train`, else in inference", ("samples",)),
}  # fmt: skip
"""Every limit by the name that people give it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit: `amount` of `unit`, at most; of ``fits_batch`` the batch that has to fit."""

    name: str
    amount: int
    unit: Unit


def parse_limits(values: Mapping[str, object]) -> tuple[Bound, ...]:
    """The bounds that ``{"parameters": "40 MiB", "fits_batch": 16}`` names; raises `InputError` for anything else.

    A plain number of parameters counts elements, a size such as ``"40 MiB"`` their bytes.
    """
    bounds: list[Bound] = []
    for name, value in values.items():
        if name not in LIMITS:
            raise UnknownInputError("limit", name, LIMITS)
        units = LIMITS[name].units
        if isinstance(value, str) and "bytes" in units and not value.strip().isdecimal():
            try:
                bounds.append(Bound(name, parse_bytes(value), "bytes"))
            except InputError as error:
                raise InputError(f"the limit {name}: {error}") from None
            continue
        amount = int(value.replace("_", "")) if isinstance(value, str) and re.fullmatch("[0-9_]+", value) else value
        if isinstance(amount, bool) or not isinstance(amount, int) or amount < (units[0] == "samples"):
            example = "'40 MiB'" if "bytes" in units else "16" if units[0] == "samples" else "10_000_000"
            raise InputError(f"the limit {name} is {quoted(str(value))}: write it like {example}")
        bounds.append(Bound(name, amount, units[0]))
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a figure may exceed its baseline: by a `share` of it, and by `amount` bytes."""

    share: float = 0.0
    amount: int = 0

    @classmethod
    def parse(cls, value: object) -> Growth:
        """``"1%"``, a size such as ``"2 MiB"``, or bytes; raises `InputError` for anything else."""
        text = str(value).strip()
        if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text):
            return cls(share=float(match[1]) / 100)
        try:
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise InputError(text)
            return cls(amount=parse_bytes(text))
        except InputError:
            raise InputError(f"max_growth is {quoted(text)}: write it like '1%' or '2 MiB'") from None

    def most(self, baseline: int) -> int:
        """The most that a figure may be."""
        return baseline + int(baseline * self.share) + self.amount


@dataclass(frozen=True, kw_only=True)
class CheckedTarget:
    """One section: a target and how it is `run`, and its limits. `line` is that of the section in the file."""

    name: str
    run: ModelSection
    line: int = 1
    limits: tuple[Bound, ...] = ()
    baseline: str | None = None
    max_growth: Growth = field(default_factory=Growth)

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings, as texts, that its figures depend on beside the code; a baseline is for one of them."""
        values = {"batch_size": 1, "mode": "train", "scenario": self.run.scenario} | values_of(self.run)
        texts = {key: _setting_text(value) for key, value in values.items()}
        return {key: text for key, text in texts.items() if text}


def _setting_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item!r}" for name, item in sorted(value.items()))
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Project:
    """A project's file, its targets, and which findings count: `severity` by code, those to `select` or `ignore`."""

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
        if (folder / NAME).is_file() and section_in(parsed_toml(folder / NAME)[1]):
            return folder / NAME
    raise InputError(f"no {NAME} here or above has a {SECTION}: memsize init TARGET writes one")


def usual_gpu() -> str | None:
    """The GPU of answers that name none: ``MEMSIZE_GPU``, or else `gpu` of the nearest ``[tool.memsize]``."""
    if named := os.environ.get("MEMSIZE_GPU"):
        return named
    try:
        gpu = section_in(parsed_toml(find_project(Path()))[1]).get("gpu")
    except (InputError, OSError):  # most folders belong to no such project
        return None
    return gpu if isinstance(gpu, str) else None


def usual_values(request: type, keys: Collection[str]) -> dict[str, Any]:
    """The `usual_gpu` as a value of a request, where its `keys` name neither a GPU nor a budget in its stead."""
    gpu = options_of(request).get("gpu")
    if gpu is None or gpu.positional or {"gpu", "budget"} & {*keys}:
        return {}
    usual = usual_gpu()
    return {} if usual is None else {"gpu": usual}


def read_project(file: Path) -> Project:
    """The sections of `file`; raises `InputError`, naming the line, for what cannot be meant."""
    text, data = parsed_toml(file)
    section = section_in(data)
    refuse_unknown(section, ("target", "gpu", "select", "ignore", "severity"), where=f"{file.name}: [tool.memsize]")
    check_type("gpu", section.get("gpu", ""), (str,))
    usual = {"gpu": section["gpu"]} if "gpu" in section else {}
    sections = section.get("target", [])
    if not (isinstance(sections, list) and all(isinstance(section, dict) for section in sections)):
        raise InputError(f"{file.name}: write targets as {SECTION}, with two brackets")
    if not sections:
        raise InputError(f"{file.name} has no {SECTION}: memsize init TARGET writes one")
    header = re.compile(r"\s*\[\[\s*tool\s*\.\s*memsize\s*\.\s*target\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)] + [1] * len(sections)
    targets: list[CheckedTarget] = []
    for line, target in zip(lines, sections, strict=False):
        try:
            targets.append(parse_section(usual | target, line))
        except InputError as error:
            raise InputError(f"{file.name}:{line}: {error}") from None
    names = [target.name for target in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f'{file.name}: two targets are {quoted(twice)}: give each a name = "…" of its own')
    select, ignore = (_codes(file, section, key) for key in ("select", "ignore"))
    severities = section.get("severity", {})
    if not (isinstance(severities, dict) and all(value in SEVERITIES for value in severities.values())):
        example = '{ unused-parameters = "error" }'
        raise InputError(f"{file.name}: severity is a table such as {example}, with error, warning or note")
    return Project(file, tuple(targets), select, ignore=ignore, severity=severities)


def section_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section of memsize in the data of a pyproject.toml; empty where there is none."""
    tool = data.get("tool")
    section = tool.get("memsize") if isinstance(tool, dict) else None
    return section if isinstance(section, dict) else {}


_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "limits": (dict,),
    "baseline": (str,),
    "max_growth": (str, int),
}
"""What a section may say beside how its model is run, and the types that TOML gives it."""


def parse_section(section: Mapping[str, Any], line: int = 1) -> CheckedTarget:
    """One section as a value; raises `InputError` for a key or a value that cannot be meant."""
    refuse_unknown(section, ("name", *MODEL_KEYS, *_KEYS), where=SECTION)
    for key in set(section) & set(_KEYS):
        check_type(key, section[key], _KEYS[key])
    if not section.get("target"):
        raise InputError(f'{SECTION} needs a target, such as target = "model.py:Net"')
    target = CheckedTarget(
        name=section.get("name", section["target"]),
        run=section_of(section),
        line=line,
        limits=parse_limits(section.get("limits", {})),
        baseline=section.get("baseline"),
        max_growth=Growth.parse(section.get("max_growth", 0)),
    )
    for bound in target.limits:
        if LIMITS[bound.name].of_peak == "training" and target.run.training is None:
            raise InputError(f'the limit {bound.name} needs training steps: name an optimizer, such as train = "adamw"')
    if "max_growth" in section and target.baseline is None:
        raise InputError('max_growth compares with a baseline: name its file, such as baseline = "memsize.json"')
    return target


def _codes(file: Path, section: Mapping[str, Any], key: str) -> tuple[str, ...]:
    codes = section.get(key, [])
    if not (isinstance(codes, list) and all(isinstance(code, str) for code in codes)):
        raise InputError(f'{file.name}: {key} is a list of codes, such as ["unused-parameters"]')
    return tuple(codes)
