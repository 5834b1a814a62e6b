"""Speculative decoding of a server, as vLLM's `--speculative-config` has it, or with the names of SGLang's options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from memsize.errors import InputError, UnknownInputError, quoted

METHODS: Final = ("eagle3", "eagle", "mtp", "draft_model", "ngram")
_WITHOUT_MODEL: Final = ("mtp", "ngram")
_NO_MEMORY: Final = (
    "prompt_lookup_max",
    "prompt_lookup_min",
    "draft_tensor_parallel_size",
    "max_model_len",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
"""Entries that change nothing here: ngram looks tokens up on the CPU, a draft is divided as its target is, and SGLang's
cache has no room of its own for a tree of drafted tokens.
"""
_OF_SGLANG: Final = {
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_num_steps": "num_speculative_tokens",
}
_ALGORITHMS: Final = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
}
"""What SGLang calls the methods (`srt/speculative/spec_info.py`)."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Before each step `tokens` tokens are drafted by a `method` of `METHODS`, with the weights of `model`: any target
    of memsize; None where they are in the model's own checkpoint, or there are none.
    """

    method: str
    tokens: int
    model: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> Speculation | None:
        """Read vLLM's JSON, or one of SGLang's options. Raises `InputError` for what a server refuses or memsize does
        not cover.
        """
        if text is None:
            return None
        example = '{"method": "eagle3", "model": "hf:head/config.json", "num_speculative_tokens": 3}'
        try:
            entries = json.loads(text)
        except ValueError:
            entries = None
        if not isinstance(entries, dict):
            raise InputError(f"speculative_config is {quoted(text)}: it is JSON, such as {example}")
        entries = {_OF_SGLANG.get(name, name): value for name, value in entries.items()}
        model, tokens = entries.pop("model", None), entries.pop("num_speculative_tokens", None)
        method = entries.pop("method", None) or ("ngram" if model == "ngram" else "draft_model")
        method = _ALGORITHMS.get(method, method)
        names = ("method", "model", "num_speculative_tokens", *_OF_SGLANG, *_NO_MEMORY)
        if other := next((name for name in entries if name not in names), None):
            raise UnknownInputError("entry of speculative_config", other, names)
        if method not in METHODS:
            raise UnknownInputError("speculative method", str(method), METHODS)
        if not isinstance(tokens, int) or tokens < 1:
            raise InputError("speculative_config needs num_speculative_tokens of at least 1")
        if method in _WITHOUT_MODEL:
            return cls(method, tokens)
        if not isinstance(model, str):
            raise InputError(f"speculative_config needs a model for {method}: {example}")
        return cls(method, tokens, model)

    @property
    def reads_states(self) -> bool:
        """Whether the draft reads states of the target: a head, not a model of its own."""
        return self.method in ("eagle3", "eagle", "mtp")
