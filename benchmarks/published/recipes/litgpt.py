"""LitGPT's resource tables: fine-tuning with adapters in bfloat16, and generation, with LitGPT's own models.

The scripts put the longest sample of Alpaca first, so that the first batch decides the peak. Fabric converts what the
model returns to float32 (`lightning.fabric.plugins.precision.half.HalfPrecision.convert_output`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from benchmarks.published.recipes.run import traced
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace
from memsize.loading.weightless import Weightless

LONGEST: Final = {
    "phi-1_5": 1044,
    "stablelm-base-alpha-3b": 1034,
    "Llama-2-7b-hf": 1304,
    "Llama-2-13b-hf": 1304,
}
"""Tokens of the longest sample with each model's tokenizer, as the page says."""

PROMPT: Final = {"Llama-2-7b-hf": 6, "Llama-2-13b-hf": 6}
"""Tokens of "Hello, my name is": five, and Llama's tokenizer puts one in front."""
NEW_TOKENS: Final = 50
ACCUMULATED: Final = 128
"""Samples for each step of the optimizer."""
CHUNK: Final = 128
"""Positions that the head takes at a time."""

_LORA: Final = {"r": 8, "alpha": 16, "dropout": 0.05, "to_query": True, "to_value": True}
_KINDS: Final = {
    "lora": ("lora", _LORA, "mark_only_lora_as_trainable"),
    "adapter": ("adapter", {}, "mark_only_adapter_as_trainable"),
    "adapter-v2": ("adapter_v2", {}, "mark_only_adapter_v2_as_trainable"),
    "generate": ("model", {}, None),
}
"""The module, what its configuration adds, and the function that says what is trained."""


def predict(row: Row) -> StepTrace:
    """The first batch of a fine-tuning, or a generation."""
    kind, name = row.source.name.rpartition("/")[2], row.values["model"]
    model = _built(kind, name)
    if kind == "generate":
        prompt = torch.ones(PROMPT.get(name, 5), dtype=torch.int64)
        with _bfloat16():
            model.max_seq_length = len(prompt) + NEW_TOKENS
        return traced(row, model.eval(), _generation, {"prompt": prompt}, 1)
    model.max_seq_length = LONGEST[name]
    tokens = torch.zeros(int(row.values["batch"]), LONGEST[name], dtype=torch.int64)
    return traced(row, model, _training, {"input_ids": tokens, "targets": tokens}, 1)


def _built(kind: str, name: str) -> Any:
    layer, added, marks = _KINDS[kind]
    module = importlib.import_module(f"lit_gpt.{layer}")
    with _bfloat16(), Weightless():
        model = module.GPT(module.Config.from_name(name, **added))
    if marks is not None:
        getattr(module, marks)(model)
    return model


@contextmanager
def _bfloat16() -> Iterator[None]:
    """As Fabric's `init_module` and `init_tensor` have it under ``bf16-true``."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _training(model: nn.Module) -> Callable[..., None]:
    from lit_gpt.utils import chunked_cross_entropy

    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)

    def body(input_ids: torch.Tensor, targets: torch.Tensor) -> None:
        logits = [chunk.float() for chunk in model(input_ids, lm_head_chunk_size=CHUNK)]
        logits[-1] = logits[-1][..., :-1, :]
        loss = chunked_cross_entropy(logits, targets[..., 1:])
        (loss / (ACCUMULATED // len(input_ids))).backward()

    return body


def _generation(model: Any) -> Callable[..., None]:
    """LitGPT's `generate.base.generate`, with the script's 200 most likely tokens."""

    def body(prompt: torch.Tensor) -> None:
        with torch.no_grad():
            with _bfloat16():
                model.set_kv_cache(batch_size=1, device=prompt.device)
            tokens = torch.zeros(len(prompt) + NEW_TOKENS, dtype=torch.int64, device=prompt.device)
            position = torch.arange(len(prompt), device=prompt.device)
            for _ in range(NEW_TOKENS):
                logits = model(tokens.index_select(0, position).view(1, -1), position).float()
                likely = logits[0, -1] / 0.8
                least = torch.topk(likely, 200).values
                likely = torch.where(likely < least[[-1]], -float("inf"), likely)
                chosen = torch.multinomial(torch.softmax(likely, dim=-1), num_samples=1)
                position = position[-1:] + 1
                tokens = tokens.index_copy(0, position, chosen) if int(position) < len(tokens) else tokens

    return body
