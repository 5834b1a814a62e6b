"""The configs of the Hub's most used models, which ship with memsize: `presets.jsonl`, a line for each.

A line has the Hub id, other ids with the same config, the published number of parameters, and the facts of the config
that memory depends on, with their source and its date. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_FILE: Final = Path(__file__).with_name("presets.jsonl")
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model of the Hub: its config, and its published number of `parameters` as people write it, ``8.03B``."""

    id: str
    also: tuple[str, ...]
    parameters: str
    source: str
    date: str
    config: Mapping[str, Any]

    @property
    def note(self) -> str:
        """The origin of the config."""
        return f"its config is the preset {self.id} of {self.date}, from {self.source}"


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by their Hub ids, other ids with the same config included."""
    lines = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    shipped = [Preset(**{**line, "also": tuple(line["also"])}) for line in lines]
    return MappingProxyType({name: preset for preset in shipped for name in (preset.id, *preset.also)})


def is_hub_id(text: str) -> bool:
    """Whether `text` is written as a Hub id, ``org/name``, and names no file or folder, nor one in a folder ``org``."""
    path = Path(text)
    is_one = _HUB_ID.fullmatch(text) is not None and path.suffix not in (".py", ".json")
    return is_one and not path.exists() and not path.parent.is_dir()
