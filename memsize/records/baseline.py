"""Baselines: the figures of a project's models in a file that is committed, one line for each layer.

They hold only figures that depend on the model alone: no version, no time, no workspace of a library. A file
that is newer, damaged or not ours is refused in one line, and never overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from memsize import files
from memsize.errors import InputError, OutputError
from memsize.records.codec import coder

SCHEMA: Final = "memsize.baseline"
NEWEST: Final = 1
_MOST_BYTES: Final = 1 << 26


class LayerFigures(NamedTuple):
    """The bytes that a layer itself stores, and those that it keeps for backward."""

    stored: int
    kept: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """One target: how it was run, its figures by name, and its layers."""

    settings: Mapping[str, str]
    figures: Mapping[str, int]
    layers: Mapping[str, LayerFigures]


def read_baselines(path: Path) -> dict[str, Baseline]:
    """Return the baselines in a file by target; an empty dict where there is no file.

    Raises `InputError` for a file that holds no baselines, is damaged, or was written by a newer memsize.
    """
    try:
        data: Any = files.parse_json(files.read(path, _MOST_BYTES))
        match data:
            case {"schema": str(schema), "targets": dict(targets)} if schema.partition("/")[0] == SCHEMA:
                number = schema.partition("/")[2]
            case _:
                raise InputError(f"{path} is not a baseline of memsize")
        if not number.isdecimal() or int(number) > NEWEST:
            raise InputError(f"{path} was written by a newer memsize ({schema:.40})")
        return {name: coder(Baseline).read(target) for name, target in targets.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def write_baselines(path: Path, baselines: Mapping[str, Baseline]) -> bool:
    """Write `baselines` into a file, beside those of other targets, whole or not at all. Return True if it changed.

    Raises `OutputError` where the file exists and cannot be read, or cannot be written.
    """
    try:
        present = read_baselines(path)
    except InputError as error:
        raise OutputError(f"{error}; it is not overwritten") from None
    wanted = {**present, **baselines}
    if wanted == present and path.exists():
        return False
    files.write(path, _text(wanted), overwrite=True)
    return True


def _text(baselines: Mapping[str, Baseline]) -> str:
    """Format the file: sorted, with one line for each figure and layer, so that its diffs are readable."""
    targets = []
    for name in sorted(baselines):
        parts = coder(Baseline).write(baselines[name]).items()
        figures = ",\n".join(f"      {_dumps(part)}: {_object(values)}" for part, values in parts)
        targets.append(f"    {_dumps(name)}: {{\n{figures}\n    }}")
    joined = ",\n".join(targets)
    return f'{{\n  "schema": "{SCHEMA}/{NEWEST}",\n  "targets": {{\n{joined}\n  }}\n}}\n'


def _object(values: Mapping[str, Any]) -> str:
    inner = ",\n".join(f"        {_dumps(name)}: {_dumps(value)}" for name, value in values.items())
    return f"{{\n{inner}\n      }}" if inner else "{}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
