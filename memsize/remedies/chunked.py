"""Cross-entropy over a large vocabulary, a thousand tokens at a time, so that the logits never exist as a whole.

What fused kernels (Liger, Apple's cut cross-entropy) and torchtune's chunked loss do, here with plain PyTorch: each
part's logits are recomputed in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memsize.fitting.case import NotApplicable
from memsize.tracing.nest import tensors_in
from memsize.tracing.run import Setup

TOKENS = 1024
"""Tokens per part."""
LARGE = 8192
"""Classes from which on a head counts as one over a vocabulary."""


def chunk_the_head(setup: Setup) -> Setup:
    """Let the head return the loss itself, computed part by part, in place of its logits."""
    head = _head(setup.twin)
    forward = head.forward

    def part(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(forward(hidden).float(), target, reduction="sum")

    def chunked(hidden: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        tokens = hidden.reshape(-1, hidden.shape[-1])
        target = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        pairs = zip(tokens.split(TOKENS), target.split(TOKENS), strict=True)
        losses: list[torch.Tensor] = [checkpoint(part, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(losses).sum() / tokens.shape[0]

    head.forward = chunked  # type: ignore[method-assign,assignment]
    return setup


def loss_of_the_head(output: Any) -> torch.Tensor:
    """What the chunked head returned, found in the model's output."""
    return next(t for t in tensors_in(output) if t.is_floating_point() and t.dim() == 0)


def _head(model: nn.Module) -> nn.Linear:
    """The last linear layer with as many outputs as a vocabulary has words."""
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features >= max(LARGE, m.in_features)]
    if not heads:
        raise NotApplicable(f"no linear layer has {LARGE:,} outputs or more")
    return heads[-1]
