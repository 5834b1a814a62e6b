"""LTX-Video's transformer forward and backward, with a checkpoint in every block, every second, every fourth, or none.

The script's latents are those of 81 frames of 512 × 768, in bfloat16. It prints what is reserved, as the size of the
model alone shows; gradients of the first pass stay. Inferred: a text of 128 tokens, the pipeline's longest at the time,
and a loss that is the output's mean.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

import memsize
from benchmarks.published.recipes.run import without_torchao
from benchmarks.published.rows import Row

FRAMES: Final = (81 - 1) // 8 + 1
HEIGHT: Final = 512 // 32
WIDTH: Final = 768 // 32
TEXT: Final = 128
CHANNELS: Final = 128


def predict(row: Row) -> int:
    """The most that is reserved, in bytes; of `every=0` by the model alone, of `every=never` without checkpoints."""
    return _measured(row.source.gpu, row.source.stack)[row.values["every"]]


@cache
def _measured(gpu: str, stack: str) -> dict[str, int]:
    """What the script prints, in its order: after a first pass, whose gradients stay, of each setting."""
    with without_torchao():
        from diffusers import LTXVideoTransformer3DModel

    with memsize.virtual_gpu(gpu, stack=stack):
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = LTXVideoTransformer3DModel().train()
            torch.set_default_dtype(torch.float32)
        # The script loads it on the CPU: its tensors then reach the GPU one after the other.
        model.to("cpu")
        torch.cuda.empty_cache()
        model.to("cuda")
        reserved = {"0": torch.cuda.memory_reserved()}
        _pass(model)
        for every in ("never", "1", "2", "4"):
            if every != "never":
                _checkpointed(model, int(every))
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            _pass(model)
            reserved[every] = torch.cuda.max_memory_reserved()
        return reserved


def _checkpointed(model: Any, every: int) -> None:
    calls = count()

    def maybe(block: Any, *args: Any) -> Any:
        if next(calls) % len(model.transformer_blocks) % every:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False)

    model.enable_gradient_checkpointing()
    model._gradient_checkpointing_func = maybe


def _pass(model: Any) -> None:
    kind: Any = {"device": "cuda", "dtype": torch.bfloat16}
    output = model(
        hidden_states=torch.randn(1, FRAMES * HEIGHT * WIDTH, CHANNELS, **kind),
        encoder_hidden_states=torch.randn(1, TEXT, 4096, **kind),
        timestep=torch.randint(0, 1000, (1,), device="cuda"),
        encoder_attention_mask=torch.ones(1, TEXT, **kind),
        num_frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        return_dict=False,
    )[0]
    output.mean().backward()
