"""Liger's experts: both products of all tokens, in tiles of each expert's, without a copy of the tokens.

Source: Liger-Kernel 0.8.5, `ops/fused_moe.py`. Tokens are assumed to be spread evenly over the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

_TILE: Final = 64
"""Tokens of a tile of products."""
_COUNTED: Final = 1024
"""Choices of a block of the routing's histogram."""


class FusedExperts(torch.autograd.Function):
    """Tokens [T, width], weights [E, 2·inner, width] and [E, width, inner], K experts of each token and their parts.

    `launched` is called with a kernel's name where it is launched, and `tiles` is their number if it is known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates_and_ups: Tensor,
        downs: Tensor,
        index: Tensor,
        weights: Tensor,
        launched: Callable[[str], None] = lambda _: None,
        tiles: int | None = None,
    ) -> Tensor:
        x, index, weights = (tensor.contiguous() for tensor in (x, index, weights))
        total, inner = index.numel(), gates_and_ups.shape[1] // 2
        routing = _routing(len(gates_and_ups), index, tiles)
        before, after = x.new_empty(total, 2 * inner), x.new_empty(total, inner)
        launched("up")
        expanded = x.new_empty(total, x.shape[1])
        launched("down")
        flat = weights.flatten().contiguous()
        result = torch.empty_like(x)
        launched("sum")
        ctx.launched, ctx.chosen = launched, index.shape
        ctx.save_for_backward(x, gates_and_ups, downs, before, flat, *routing)
        del after, expanded
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Without the expanded outputs, which are not saved."""
        gradient = gradients[0].contiguous()
        x, gates_and_ups, downs, before, *_ = ctx.saved_tensors
        total, launched = len(before), ctx.launched
        of_before, weighted = (gradient.new_empty(total, before.shape[1] // part) for part in (1, 2))
        of_weights = gradient.new_zeros(total)
        launched("down, backward")
        of_downs = torch.zeros_like(downs)
        launched("downs")
        expanded = gradient.new_empty(total, x.shape[1])
        launched("expanded")
        of_x = gradient.new_zeros(x.shape)
        launched("sum without weights")
        of_gates_and_ups = torch.zeros_like(gates_and_ups)
        launched("gates and ups")
        del of_before, weighted, expanded
        return of_x, of_gates_and_ups, of_downs, None, of_weights.view(ctx.chosen), None, None


def _routing(experts: int, index: Tensor, tiles: int | None) -> tuple[Tensor, ...]:
    """Where each expert's tokens begin, which they are, and the tiles that they are computed in."""
    tokens, chosen = index.shape
    if tiles is None:
        tiles = experts * -(-tokens * chosen // (experts * _TILE))
    in_block = _COUNTED // (1 << (chosen - 1).bit_length())
    counts = index.new_empty((experts, -(-tokens // in_block)), dtype=torch.int32)
    of_experts = counts.sum(dim=1, dtype=torch.int32)
    starts, offsets = (counts.new_empty(experts + 1) for _ in range(2))
    in_tiles = (counts.new_empty(tiles) for _ in range(2))
    saved = (starts, *in_tiles, *(counts.new_empty(index.numel()) for _ in range(3)))
    del counts, of_experts, offsets
    return saved


class LigerExperts(nn.Module):
    """The experts of Mixtral, Qwen3-MoE and DeepSeek."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(getattr(config, name) for name in names if hasattr(config, name))
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, config.hidden_size, inner))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = top_k_index.shape[-1]
        routed = top_k_index.view(-1, chosen).to(torch.int32), top_k_weights.view(-1, chosen)
        x = hidden_states.view(-1, hidden_states.shape[-1])
        out: Tensor = FusedExperts.apply(x, self.gate_up_proj, self.down_proj, *routed)  # type: ignore[no-untyped-call]
        return out.view(hidden_states.shape)
