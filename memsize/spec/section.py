"""A section of a TOML file that says which model is meant and how it is run, as values.

The keys are those of the command line's options, the same in every file: pyproject.toml's `[[tool.memsize.target]]` and
the file of a sweep.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memsize import files
from memsize.errors import InputError, UnknownInputError, quoted
from memsize.spec.model_request import ModelRequest
from memsize.spec.options import TOML_TYPES, build, check_type, option, options_of, part
from memsize.spec.scenario import scenario_named
from memsize.spec.stack import Gpu
from memsize.spec.training import Training

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


def refuse_unknown(kind: str, section: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Raise `InputError` for a key of `section` that is none of `keys`."""
    keys = tuple(keys)
    for key in section:
        if key not in keys:
            raise UnknownInputError(kind, key, keys, problem=f"{where} has no {kind} {quoted(key)}")
