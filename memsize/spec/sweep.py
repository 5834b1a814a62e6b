"""A sweep as a TOML file or a mapping describes it: models, the ways to run them, and the cells of that grid."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

from memsize.errors import InputError, ScenarioError, TargetError, UnknownValueError
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.model_request import ModelRequest
from memsize.spec.options import check_type
from memsize.spec.parallel import Parallel, on_each, spread_of
from memsize.spec.project import MODEL_KEYS, parsed_toml, refuse_unknown, section_of
from memsize.spec.scenario import COMPILED, compiled_from, scenario_named
from memsize.spec.stack import Stack
from memsize.spec.training import Training

AXES: Final = tuple(
    "target lora adapter base train scenario mode stack allocator parallel seq_len batch_size gpu".split()
)
"""The keys that may have several values, slowest first: the next cell is that of another GPU."""
INFERENCE: Final = "none"
"""The value of `train` that stands for one forward without gradients."""
MOST_CELLS: Final = 100_000
_SPREAD: Final[Mapping[str, tuple[type, ...]]] = {"parallel": (str,), "gpus": (int, str)}
"""Over how many GPUs a training is spread, and how: keys with the types that TOML gives them."""
_COMPILE: Final = "compile"
"""The key that adds to each scenario the same one compiled, as the option of a report does."""
_DEFAULTS: Final = {"scenario": "as-given", "batch_size": 1, "train": INFERENCE, "gpu": DEFAULT_GPU}

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
        run = section_of(own | {"mode": mode})
        return cls(
            settings,
            subject=run.model,
            scenario=run.scenario,
            training=run.training,
            stack=run.gpu.releases,
            parallel=spread_of(settings.get("parallel"), run.training, execute=run.execute),
        )


@dataclass(frozen=True, slots=True)
class Section:
    """Some targets with what is the same for all of them, and the values of each axis. `where` is for errors."""

    where: str
    fixed: Settings
    axes: Mapping[str, tuple[Any, ...]]

    def cells(self, matching: Callable[[str], tuple[str, ...]], gpu: Callable[[str], str]) -> Iterator[Cell]:
        """The cells of the section; `matching` gives the targets that a pattern stands for, `gpu` a GPU's full name."""
        targets = (target for pattern in self.axes["target"] for target in self._looked_up("target", matching, pattern))
        cards = (self._looked_up("gpu", gpu, name) for name in self.axes["gpu"])
        axes = {**self.axes, "target": tuple(dict.fromkeys(targets)), "gpu": tuple(dict.fromkeys(cards))}
        for values in product(*axes.values()):
            try:
                yield Cell.of({**self.fixed, **dict(zip(axes, values, strict=True))})
            except InputError as error:
                raise InputError(f"{self.where}: {error}") from None

    def _looked_up(self, key: str, look_up: Callable[[str], T], name: str) -> T:
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
        cells: dict[str, Cell] = {}
        for section in self.sections:
            if prod(map(len, section.axes.values())) > MOST_CELLS:
                raise InputError(f"{section.where}: more than {MOST_CELLS:,} cells: sweep fewer values")
            cells |= {repr(sorted(cell.settings.items())): cell for cell in section.cells(matching, gpu)}
            if len(cells) > MOST_CELLS:
                raise InputError(f"{self.name} has more than {MOST_CELLS:,} cells: sweep fewer values")
        return tuple(cells.values())


def read_grid(file: Path) -> Grid:
    """The sweep that `file` describes; raises `InputError`, naming the key, for what cannot be meant."""
    if not file.exists():
        raise InputError(f"no such file: {file} (memsize sweep --help shows what the file of a sweep holds)")
    text, data = parsed_toml(file)
    header = re.compile(r"\s*\[\[\s*target\s*\]\]")
    lines = [f"{file.name}:{n}" for n, line in enumerate(text.splitlines(), 1) if header.match(line)]
    return _grid(file.name, file.absolute().parent, data, lines=lines)


def grid_of(data: Mapping[str, Any]) -> Grid:
    """The sweep that a mapping with the keys of a file describes; files are looked for in the working folder."""
    plain = {key: list(value) if isinstance(value, tuple | set | range) else value for key, value in data.items()}
    return _grid("sweep", Path.cwd(), plain, lines=[])


def _grid(name: str, folder: Path, data: Mapping[str, Any], lines: list[str]) -> Grid:
    targets = data.get("target")
    if not targets:
        raise InputError(f'{name} needs a target, such as target = ["timm:resnet*", "model.py:Net"]')
    rest = {key: value for key, value in data.items() if key != "target"}
    if isinstance(targets, list) and all(isinstance(target, Mapping) for target in targets):
        wheres = [*lines, *[name] * len(targets)]
        parts = [(where, rest | target) for where, target in zip(wheres, targets, strict=False)]
        alone = {key: value for key, value in rest.items() if key not in _SPREAD}  # each may need the section's other
        _section(name, alone | {"target": "-"})  # what is wrong with keys for all is no section's fault
    else:
        parts = [(name, dict(data))]
    return Grid(name, folder, tuple(_section(where, section) for where, section in parts))


def _section(where: str, section: Mapping[str, Any]) -> Section:
    refuse_unknown(section, (*MODEL_KEYS, *_SPREAD, _COMPILE), where=where)
    if not section.get("target"):
        raise InputError(f'{where}: a section needs a target, such as target = "model.py:Net"')
    values = dict(_DEFAULTS) | {key: value for key, value in section.items() if key not in (*_SPREAD, _COMPILE)}
    if section.get(_COMPILE):
        values["scenario"] = [*_with_compiled(where, values["scenario"], section[_COMPILE])]
    # Each strategy on each number of GPUs, in words; none where the models are trained on one GPU.
    strategies, gpus = ([*_values(where, key, section[key])] if key in section else None for key in _SPREAD)
    try:
        spread = [str(strategy) for text in strategies or (None,) for strategy in on_each(text, gpus) if strategy]
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if spread:
        values["parallel"] = spread
    axes = {key: _values(where, key, values[key]) for key in AXES if key in values}
    fixed = {key: value for key, value in values.items() if key not in AXES}
    for key, value in fixed.items():
        _checked(where, key, value)
    return Section(where, fixed, axes)


def _values(where: str, key: str, value: Any) -> tuple[Any, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InputError(f"{where}: {key} is an empty list: leave it out, or name a value")
    for value in values:
        _checked(where, key, value)
    return tuple(dict.fromkeys(values))


def _with_compiled(where: str, scenarios: Any, modes: Any) -> Iterator[str]:
    """The scenarios, each followed by itself compiled in these modes."""
    for name in _values(where, "scenario", scenarios):
        yield name
        for mode in _values(where, _COMPILE, modes):
            if mode and COMPILED not in name:
                yield compiled_from(scenario_named(name), mode).name


def _checked(where: str, key: str, value: Any) -> None:
    """Raise `InputError` for a value that its key cannot have."""
    try:
        if key in _SPREAD:
            check_type(key, value, _SPREAD[key])
        elif key == _COMPILE:
            check_type(key, value, (bool, str))
            compiled_from(scenario_named("as-given"), value)
        elif (key, value) != ("train", INFERENCE):
            is_of_training = key in ("loss", "gradient_accumulation_steps", "ema")
            section_of({key: value} | ({"train": "adamw"} if is_of_training else {}))
    except UnknownValueError as error:
        raise InputError(f"{where}: {key}: {error}") from error
    except (InputError, ScenarioError) as error:
        text = str(error)
        raise InputError(f"{where}: {text if text.startswith(key) else f'{key}: {text}'}") from None
