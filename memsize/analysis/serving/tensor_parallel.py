"""The part of a model that one of several cards holds: its config with what vLLM divides divided.

Heads, the width between the layers of an MLP and the vocabulary are divided; heads of keys and values that are fewer
than the cards are held several times (`vllm/model_executor/models/llama.py`). The vocabulary is first padded to a
multiple of 64 (`vllm/model_executor/layers/vocab_parallel_embedding.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from memsize.errors import InputError

_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_PADDED = 64


def divided(config: Any, tp: int, name: str) -> dict[str, object]:
    """The entries of the config of one card's part. Raises `InputError` where `tp` cards cannot share the model."""
    if config is None:
        raise InputError(f"{name} has no config: without it memsize cannot divide it among cards")
    entries = vars(config)
    missing = [each for each in ("num_attention_heads", "num_key_value_heads", "vocab_size") if each not in entries]
    if missing or not hasattr(config, "head_dim"):
        entry = (missing or ["head_dim"])[0]
        raise InputError(f"{name} has no {entry} in its config: without it memsize cannot divide it among cards")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    _whole(heads, tp, "attention heads", name)
    if groups % tp and tp % groups:
        raise InputError(f"{name} has {groups} heads of keys and values: {tp} cards can neither divide nor repeat them")
    found: dict[str, object] = {
        "head_dim": config.head_dim or config.hidden_size // heads,
        "num_attention_heads": heads // tp,
        "num_key_value_heads": max(groups // tp, 1),
        "vocab_size": _whole(-(-config.vocab_size // _PADDED) * _PADDED, tp, "padded tokens in its vocabulary", name),
        "pad_token_id": None,  # it may be in another card's part
    }
    widths = {each: entries[each] for each in _WIDTHS if entries.get(each)}
    return found | {each: _whole(width, tp, f"as its {each}", name) for each, width in widths.items()}


def part_of(model: Any, tp: int, name: str) -> nn.Module:
    """The part of a model of transformers that one of `tp` cards holds, on meta. Raises as `divided` does."""
    config = copy.deepcopy(getattr(model, "config", None))
    for entry, value in divided(config, tp, name).items():
        setattr(config, entry, value)
    with torch.device("meta"):
        part: nn.Module = type(model)._from_config(config, dtype=model.dtype)
    part.generation_config = model.generation_config
    return part.eval()


def _whole(count: int, tp: int, what: str, name: str) -> int:
    if count % tp:
        raise InputError(f"{name} has {count:,} {what}: tp {tp} does not divide them")
    return count // tp
