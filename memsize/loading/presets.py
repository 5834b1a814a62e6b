"""The configs of the Hub's most used models, which ship with memsize: `presets.jsonl`, a line for each.

A line has the Hub id, other ids with the entries of their configs that differ, the published number of parameters, and
the facts of the config that memory depends on, with their source and its date; for a pipeline of diffusers its index
and the config of each part. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from memsize.errors import TargetError, UnknownTargetError, nearest, quoted
from memsize.units import format_bytes

_FILE: Final = Path(__file__).with_name("presets.jsonl")
_FORMATS: Final = {"float32": 32, "float16 or bfloat16": 16, "4 bits": 4}
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model of the Hub: its config, and its published number of `parameters` as people write it, ``8.03B``."""

    id: str
    parameters: str
    source: str
    date: str
    config: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def note(self) -> str:
        return f"its config is the preset {self.id} of {self.date}, from {self.source}"

    @property
    def cache_per_token(self) -> int | None:
        """The bytes of keys and values that a token of 16-bit cache takes; None where the facts do not tell.

        That is so of layers that forget what leaves a window, and of those that keep something smaller in their place.
        """
        names = ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("hidden_size", "n_embd")
        layers, heads, size = (self.config.get(name) or self.config.get(old) for name, old in names)
        is_other = self.config.get("sliding_window") or "kv_lora_rank" in self.config
        is_decoder = self.config.get("architectures", [""])[0].endswith(("ForCausalLM", "LMHeadModel"))
        if is_other or not (is_decoder and layers and heads and size):
            return None
        head = self.config.get("head_dim") or size // heads
        return int(2 * layers * self.config.get("num_key_value_heads", heads) * head * 2)

    @property
    def figures(self) -> str:
        """Sentences on what follows from its published facts, without a run."""
        count = float(self.parameters[:-1]) * {"M": 1e6, "B": 1e9}[self.parameters[-1]]
        sizes = ", ".join(f"{format_bytes(int(count * bits / 8))} in {name}" for name, bits in _FORMATS.items())
        cache = self.cache_per_token
        tokens = f" A token of its KV cache takes {format_bytes(cache, 'KiB')} in 16 bits." if cache else ""
        return f"{self.id} has {self.parameters} parameters: {sizes}.{tokens}"


SAVED_CONFIG: Final = "hf:config.json, or of a pipeline diffusers:FOLDER"
"""The targets for a config that was saved where there was a network."""


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by their Hub ids, other ids with almost the same config included."""
    shipped: dict[str, Preset] = {}
    for line in map(json.loads, _FILE.read_text(encoding="utf-8").splitlines()):
        others = line.pop("also")
        shipped[line["id"]] = preset = Preset(**line)
        shipped |= {name: replace(preset, config={**preset.config, **own}) for name, own in others.items()}
    return MappingProxyType(shipped)


def is_hub_id(text: str) -> bool:
    """Whether `text` is written as a Hub id, ``org/name``, or names a preset, as ``gpt2`` does. It names no file,
    module or folder, nor one in a folder ``org``.
    """
    path = Path(text)
    if "/" not in text:
        return text in presets() and not path.exists() and not path.with_name(f"{text}.py").exists()
    is_one = _HUB_ID.fullmatch(text) is not None and path.suffix not in (".py", ".json")
    return is_one and not path.exists() and not path.parent.is_dir()


def unknown_id(name: str) -> TargetError:
    """Return the error for a Hub id without a config here, with the nearest presets."""
    problem = (
        f"no folder, file, preset or cached config is called {quoted(name)} (--online fetches its config; one that you "
        f"saved is {SAVED_CONFIG})"
    )
    if not nearest(name, tuple(presets())):
        return TargetError(problem)
    return UnknownTargetError("preset", name, presets(), problem=problem)
