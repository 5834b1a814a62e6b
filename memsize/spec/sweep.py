"""A sweep as a TOML file or a mapping describes it: models, the ways to run them, and the cells of that grid."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

from memsize.errors import InputError, ScenarioError, TargetError, UnknownValueError, quoted
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.model_request import ModelRequest
from memsize.spec.parallel import Parallel, on_each, spread_of
from memsize.spec.scenario import scenario_named
from memsize.spec.section import MODEL_KEYS, Keys, check_type, parsed_toml, refuse_unknown, subject_of, training_of
from memsize.spec.stack import Stack
from memsize.spec.training import Training

AXES: Final[tuple[str, ...]] = (
    "target",
    "train",
    "scenario",
    "mode",
    "stack",
    "allocator",
    "parallel",
    "seq_len",
    "batch_size",
    "gpu",
)
"""The keys that may have several values, slowest first: the next cell is that of another GPU."""
INFERENCE: Final = "none"
"""The value of `train` that stands for one forward without gradients."""
MOST_CELLS: Final = 100_000
_SPREAD: Final = ("parallel", "gpus")
"""What together says over how many GPUs a training is spread, and how."""
_KEYS: Final[Keys] = {**MODEL_KEYS, "parallel": (str,), "gpus": (int, str)}
_DEFAULTS: Final[Mapping[str, object]] = {
    "scenario": "as-given",
    "batch_size": 1,
    "train": INFERENCE,
    "gpu": DEFAULT_GPU,
}

T = TypeVar("T")
Settings = Mapping[str, Any]
"""What a section says, one value for each key."""


@dataclass(frozen=True)
class Cell:
    """One model run in one way on one GPU. `settings` is what makes it this cell, by the keys of the file."""

    settings: Settings
    subject: ModelRequest
    scenario: str
    training: Training | None
    stack: Stack
    parallel: Parallel | None

    @classmethod
    def of(cls, settings: Settings) -> Cell:
        """The cell that `settings` describe; raises `InputError` for what cannot be meant together."""
        own = {key: value for key, value in settings.items() if (key, value) != ("train", INFERENCE)}
        mode = settings.get("mode", "eval" if settings["train"] == INFERENCE else "train")
        subject, training = subject_of(own | {"mode": mode}), training_of(own)
        parallel = spread_of(settings.get("parallel"), training, execute=settings.get("execute", False))
        return cls(settings, subject, settings["scenario"], training, Stack.of(settings.get("stack")), parallel)


@dataclass(frozen=True, slots=True)
class Section:
    """Some targets with what is the same for all of them, and the values of each axis. `where` is for errors."""

    where: str
    fixed: Settings
    axes: Mapping[str, tuple[Any, ...]]

    def cells(self, matching: Callable[[str], tuple[str, ...]], gpu: Callable[[str], str]) -> Iterator[Cell]:
        """The cells of the section; `matching` gives the targets that a pattern stands for, `gpu` a GPU's full name."""
        targets = (target for pattern in self.axes["target"] for target in self._told("target", matching, pattern))
        cards = (self._told("gpu", gpu, name) for name in self.axes["gpu"])
        axes = {**self.axes, "target": tuple(dict.fromkeys(targets)), "gpu": tuple(dict.fromkeys(cards))}
        for values in product(*axes.values()):
            try:
                yield Cell.of({**self.fixed, **dict(zip(axes, values, strict=True))})
            except InputError as error:
                raise InputError(f"{self.where}: {error}") from None

    def _told(self, key: str, look_up: Callable[[str], T], name: str) -> T:
        try:
            return look_up(name)
        except TargetError as error:
            raise TargetError(f"{self.where}: {key}: {error}") from error
        except InputError as error:
            raise InputError(f"{self.where}: {key}: {error}") from error


@dataclass(frozen=True, slots=True)
class Grid:
    """A sweep: its name, the folder that its files are in, and its sections."""

    name: str
    folder: Path
    sections: tuple[Section, ...]

    def cells(self, matching: Callable[[str], tuple[str, ...]], gpu: Callable[[str], str]) -> tuple[Cell, ...]:
        """The cells of all sections, each once; what is looked up as `Section.cells` has it.

        Raises `InputError` where they are too many or cannot be meant, and `TargetError` where a pattern matches
        nothing.
        """
        found: dict[str, Cell] = {}
        for section in self.sections:
            _refuse_many(section)
            found |= {repr(sorted(cell.settings.items())): cell for cell in section.cells(matching, gpu)}
            if len(found) > MOST_CELLS:
                raise InputError(f"{self.name} has more than {MOST_CELLS:,} cells: sweep fewer values")
        return tuple(found.values())


def _refuse_many(section: Section) -> None:
    if prod(map(len, section.axes.values())) > MOST_CELLS:
        raise InputError(f"{section.where}: more than {MOST_CELLS:,} cells: sweep fewer values")


def read_grid(file: Path) -> Grid:
    """The sweep that `file` describes; raises `InputError`, naming the key, for what cannot be meant."""
    text, data = parsed_toml(file)
    return _grid(file.name, file.absolute().parent, data, [f"{file.name}:{line}" for line in _lines(text)])


def grid_of(data: Mapping[str, Any]) -> Grid:
    """The sweep that a mapping with the keys of a file describes; files are looked for in the working folder."""
    return _grid("sweep", Path.cwd(), {key: _plain(value) for key, value in data.items()}, [])


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple | set | range) else value


def _grid(name: str, folder: Path, data: Mapping[str, Any], places: list[str]) -> Grid:
    targets = data.get("target")
    if not targets:
        raise InputError(f'{name} needs a target, such as target = ["timm:resnet*", "model.py:Net"]')
    rest = {key: value for key, value in data.items() if key != "target"}
    if isinstance(targets, list) and all(isinstance(each, Mapping) for each in targets):
        wheres = [*places, *[name] * len(targets)]
        parts = [(where, rest | each) for where, each in zip(wheres, targets, strict=False)]
        alone = {key: value for key, value in rest.items() if key not in _SPREAD}  # each may need the section's other
        _section(name, alone | {"target": "-"})  # what is wrong with keys for all is no section's fault
    else:
        parts = [(name, dict(data))]
    return Grid(name, folder, tuple(_section(where, given) for where, given in parts))


def _lines(text: str) -> Iterator[int]:
    """The lines on which sections begin."""
    return (n for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*target\s*\]\]", line))


def _section(where: str, given: Mapping[str, Any]) -> Section:
    refuse_unknown("key", given, _KEYS, where)
    if not given.get("target"):
        raise InputError(f'{where}: a section needs a target, such as target = "model.py:Net"')
    values = dict(_DEFAULTS) | {key: value for key, value in given.items() if key not in _SPREAD}
    if parallels := _parallels(where, given):
        values["parallel"] = parallels
    axes = {key: _values(where, key, values[key]) for key in AXES if key in values}
    fixed = {key: value for key, value in values.items() if key not in AXES}
    for key, value in fixed.items():
        _checked(where, key, value)
    return Section(where, fixed, axes)


def _parallels(where: str, given: Mapping[str, Any]) -> list[str]:
    """Each strategy on each number of GPUs, in words; none where the models are trained on one GPU."""
    strategies, gpus = ([*_values(where, key, given[key])] if key in given else None for key in _SPREAD)
    try:
        return [str(each) for text in strategies or (None,) for each in on_each(text, gpus) if each]
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _values(where: str, key: str, given: Any) -> tuple[Any, ...]:
    values = given if isinstance(given, list) else [given]
    if not values:
        raise InputError(f"{where}: {key} is an empty list: leave it out, or name a value")
    for value in values:
        _checked(where, key, value)
    return tuple(dict.fromkeys(values))


def _checked(where: str, key: str, value: Any) -> None:
    """Raise `InputError` for a value that its key cannot have."""
    try:
        check_type(key, value, _KEYS[key])
        _PARSERS.get(key, lambda _: None)(value)
    except UnknownValueError as error:
        raise InputError(f"{where}: {key}: {error}") from error
    except (InputError, ScenarioError) as error:
        text = str(error)
        raise InputError(f"{where}: {text if text.startswith(key) else f'{key}: {text}'}") from None


def _train(value: str) -> None:
    if value != INFERENCE:
        Training(value)


def _sizes(key: str) -> Callable[[int], None]:
    def check(value: int) -> None:
        if value < 1:
            raise InputError(f"{key} is {value}: it must be at least 1")

    return check


def _mode(value: str) -> None:
    if value not in ("train", "eval"):
        raise InputError(f"mode is {quoted(value)}: it is train or eval")


_PARSERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "input": lambda value: subject_of({"target": "", "input": value}),
    "batch_size": _sizes("batch_size"),
    "seq_len": _sizes("seq_len"),
    "accumulate": _sizes("accumulate"),
    "train": _train,
    "mode": _mode,
    "loss": lambda value: Training(loss=value),
    "scenario": scenario_named,
    "stack": Stack.parse,
}
