"""Forwards and backwards of a small Llama in float32, as ackaudit's `run_d.py` measured them: uncompiled, or compiled
with `activation_memory_budget`, by which the compiler chooses what it recomputes in the backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

import memsize
from benchmarks.published.rows import Row

BATCH, VOCABULARY = 2, 1000


class Summed(nn.Module):
    """A decoder without a head, whose loss is the sum of its last states."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        }
        settings = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=VOCABULARY, use_cache=False)
        self.decoder = LlamaModel(settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.decoder(input_ids=tokens).last_hidden_state.sum()
        return loss


def predict(row: Row) -> int:
    """What the second forward and backward allocates at most; the gradients of the first are zeroed in place."""
    scale, backend = int(row.values["scale"]), row.values["backend"]
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack), _budget(row):
        model = Summed(4 * scale).cuda()
        tokens = torch.zeros(BATCH, 128 * scale, dtype=torch.int64, device="cuda")
        torch._dynamo.reset()
        run = model if backend == "none" else torch.compile(model, backend=backend, dynamic=False)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            run(tokens).backward()
            peak = torch.cuda.max_memory_allocated()
            model.zero_grad(set_to_none=False)
            torch.cuda.empty_cache()
    return peak


def _budget(row: Row) -> AbstractContextManager[object]:
    if "budget" not in row.values:
        return nullcontext()
    patched: AbstractContextManager[object] = config.patch(activation_memory_budget=float(row.values["budget"]))
    return patched
