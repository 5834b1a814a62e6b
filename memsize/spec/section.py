"""A section of a TOML file that says which model is meant and how it is run, as values.

The keys are those of the command line's options, the same in every file: pyproject.toml's `[[tool.memsize.target]]` and
the file of a sweep.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from memsize import files
from memsize.errors import InputError, UnknownInputError, quoted
from memsize.spec.inputs import parse_input
from memsize.spec.model_request import ModelRequest
from memsize.spec.training import Training

Keys = Mapping[str, tuple[type, ...]]
"""What a section may say, and the types that TOML gives it."""

_MOST_BYTES: Final = 1 << 20

MODEL_KEYS: Final[Keys] = {
    "target": (str,),
    "input": (str, list),
    "inputs": (str,),
    "arguments": (dict,),
    "batch_size": (int,),
    "seq_len": (int,),
    "mode": (str,),
    "train": (str,),
    "loss": (str,),
    "accumulate": (int,),
    "ema": (bool,),
    "scenario": (str,),
    "gpu": (str,),
    "stack": (str,),
    "allocator": (str,),
    "execute": (bool,),
}
"""What every section may say of a model and its run."""


def parsed_toml(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file and what it holds; raises `InputError` for what is no TOML."""
    try:
        text = files.read(file, _MOST_BYTES).decode()
        return text, tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no TOML: {error}") from None


def check_type(key: str, value: object, types: tuple[type, ...]) -> None:
    """Raise `InputError` for a value of none of the types that its key has."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InputError(f"{key} is {quoted(str(value))}: it should be {_words(types)}")


def subject_of(section: Mapping[str, Any]) -> ModelRequest:
    """The model of a section, and its input."""
    given = section.get("input", [])
    texts = [given] if isinstance(given, str) else given
    if not all(isinstance(text, str) for text in texts):
        raise InputError('input is a text such as "3,64,64", or a list of such texts')
    specs = tuple(map(parse_input, texts))
    if specs and "inputs" in section:
        raise InputError("give the inputs as input or as inputs, not as both")
    return ModelRequest(
        section["target"],
        specs,
        source=section.get("inputs"),
        batch_size=section.get("batch_size", 1),
        seq_len=section.get("seq_len"),
        arguments=section.get("arguments", {}),
        mode=section.get("mode", "train"),
    )


def training_of(section: Mapping[str, Any]) -> Training | None:
    """The training steps of a section, None for inference."""
    given = {key: section[key] for key in ("loss", "accumulate", "ema") if key in section}
    if "train" not in section:
        if given:
            raise InputError(f'{next(iter(given))} is for training steps: name an optimizer, such as train = "adamw"')
        return None
    return Training(section["train"], **given)


def refuse_unknown(kind: str, given: Mapping[str, Any], known: Any, where: str) -> None:
    """Raise `InputError` for a key of `given` that is not known `where` it stands."""
    for key in given:
        if key not in known:
            raise UnknownInputError(kind, key, known, problem=f"{where} has no {kind} {quoted(key)}")


def _words(types: tuple[type, ...]) -> str:
    words = {str: "a text", list: "a list", dict: "a table", int: "a whole number", bool: "true or false"}
    return " or ".join(words[each] for each in types)
