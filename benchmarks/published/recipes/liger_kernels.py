"""Liger-Kernel's own operators, by memsize's stand-ins for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

from memsize.virtual.packages.liger import LigerCrossEntropyLoss, LigerSwiGLUMLP

TOKENS: Final = 16_384


def cross_entropy(config: Mapping[str, int]) -> Callable[[], Tensor]:
    """Of 16,384 tokens."""
    logits = torch.randn(TOKENS, config["V"], requires_grad=True, device="cuda")
    targets = torch.randint(config["V"], (TOKENS, 1), device="cuda").squeeze(1)
    criterion = LigerCrossEntropyLoss()
    return lambda: criterion(logits, targets)


def swiglu(config: Mapping[str, int]) -> Callable[[], Tensor]:
    """Of 4 × T tokens, with Llama 2's width."""
    x = torch.randn(4, config["T"], 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = LigerSwiGLUMLP(SimpleNamespace(hidden_size=4096, intermediate_size=11_008)).to("cuda").to(torch.bfloat16)
    return lambda: layer(x)
