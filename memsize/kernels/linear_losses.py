"""Cross-entropy of a linear layer that never holds the logits of all tokens: Liger's fused loss and cut cross-entropy.

Each allocates, saves and frees what the library does, with plain PyTorch in place of its Triton kernels, which allocate
nothing: so losses and gradients are not computed.

Source: Liger-Kernel 0.8.5, `ops/fused_linear_cross_entropy.py`; cut-cross-entropy 25.1.1, `cce.py`, `cce_backward.py`,
`cce_lse_forward.py` and `indexed_dot.py`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from memsize.kernels.semantics import current

IGNORED: Final = -100
_HALVES: Final = (torch.float16, torch.bfloat16)
_AMPERE: Final = (8, 0)
_LOCKED_TOKENS: Final = 128
_LOCKED_WIDTH: Final = 64


def tokens_per_chunk(tokens: int, width: int, words: int) -> int:
    """Tokens whose logits Liger makes at a time: about as many bytes as the hidden states, in a power of two."""
    chunk: int = 1 << (-(-tokens // -(-words // width)) - 1).bit_length()
    return min(chunk, tokens)


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    accumulates_in: torch.dtype | None,
    trains: tuple[bool, bool],
    of_losses: Tensor | None = None,
    logits_times: int = 1,
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of each token, and the gradients of hidden states, weight and bias: of the first two where it `trains`.

    With gradients `of_losses` the logits' gradient is scaled for each token, in a copy.
    """
    tokens, width = hidden.shape
    chunk = tokens_per_chunk(tokens, logits_times * width, len(weight))
    of_hidden = torch.zeros_like(hidden)
    of_weight = torch.zeros_like(weight, dtype=accumulates_in) if all(trains) else None
    of_bias = None if bias is None or not trains[0] else torch.zeros_like(bias, dtype=accumulates_in)
    losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
    counted = target != IGNORED
    counted.sum()  # a number on the GPU, by which the library divides
    buffer = _logits_buffer(hidden, weight, bias, chunk)
    for start in range(0, tokens, chunk):
        rows = hidden[start : start + chunk]
        if buffer is None:
            logits = rows @ weight.t()
            logits = logits if bias is None else logits + bias
        else:
            logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
            logits = logits if bias is None else logits.add_(bias)
        # A kernel writes the gradient over the logits.
        if of_losses is not None:
            logits = logits * of_losses[start : start + chunk].unsqueeze(-1).to(logits.dtype)
        if trains[0] and buffer is not None:
            torch.mm(logits, weight, out=of_hidden[start : start + chunk])
        elif trains[0]:
            of_hidden[start : start + chunk] = logits @ weight
        if of_weight is not None:
            _add_product(of_weight, logits.t(), rows)
        if of_bias is not None:
            of_bias.add_(logits.sum(dim=0))
        del logits, rows
    del buffer
    of_weight = None if of_weight is None else of_weight.to(weight.dtype)
    of_bias = None if of_bias is None or bias is None else of_bias.to(bias.dtype)
    del counted  # after the casts
    return losses, [of_hidden, of_weight, of_bias]


class LigerCrossEntropy(torch.autograd.Function):
    """Hidden states, weight, bias and targets to the loss. Gradients are made in the forward, chunk by chunk; those of
    losses that are not reduced in the backward, from logits that are made again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        reduction: str = "mean",
        accumulates_in: torch.dtype | None = None,
        logits_times: int = 1,
    ) -> Tensor:
        ctx.trains, ctx.waits, ctx.dtype = ctx.needs_input_grad[:2], reduction == "none", accumulates_in
        ctx.logits_times = logits_times
        trains = (False, False) if ctx.waits else (hidden.requires_grad, weight.requires_grad)
        losses, ctx.gradients = _by_chunks(hidden, weight, bias, target, accumulates_in, trains, None, logits_times)
        if ctx.waits:
            ctx.gradients = None
            ctx.save_for_backward(hidden, weight, bias, target)
        return losses if ctx.waits else losses.sum()

    @staticmethod
    def backward(ctx: Any, *of_losses: Tensor) -> Any:
        if ctx.waits:
            hidden, weight, bias, target = ctx.saved_tensors
            trains = (True, ctx.trains[1])
            rest = ctx.dtype, trains, of_losses[0], ctx.logits_times
            _, ctx.gradients = _by_chunks(hidden, weight, bias, target, *rest)
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients, None, None, None, None)


def _logits_buffer(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor | None:
    """One buffer for the logits of all chunks in turn, unless autocast or a bias would give them another dtype."""
    if len({tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}) > 1:
        return None
    if torch.is_autocast_enabled("cuda") and hidden.dtype != torch.get_autocast_dtype("cuda"):
        return None
    return torch.empty((chunk, len(weight)), dtype=hidden.dtype, device=hidden.device)


def _add_product(total: Tensor, logits: Tensor, rows: Tensor) -> None:
    """Add a chunk's part of the weight's gradient: in place from Ampere on if the products are of 16 bits."""
    semantics = current()
    if logits.dtype in _HALVES and semantics is not None and semantics.capability >= _AMPERE:
        rows = rows.to(logits.dtype)
        if total.dtype is logits.dtype:
            torch.addmm(total, logits, rows, out=total)
            return
        if total.dtype is torch.float32:
            torch.addmm(total, logits, rows, out_dtype=torch.float32, out=total)
            return
    total += torch.mm(logits, rows).float()


class CutCrossEntropy(torch.autograd.Function):
    """Hidden states, classifier and targets to the loss, by a kernel that holds a tile of the logits at a time.

    With `valids`, positions of the hidden states, a target is that of the next one, and the other states have no loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        reduction: str = "mean",
        filters: bool = True,
        valids: Tensor | None = None,
        capped: bool = False,
    ) -> Tensor:
        tokens, words = len(hidden) if valids is None else len(valids), len(weight)
        if hidden.dtype not in _HALVES:
            raise ValueError("cut cross-entropy needs 16-bit hidden states: float16, bfloat16, or autocast")
        log_sums = hidden.new_empty((tokens,), dtype=torch.float32)
        locks = hidden.new_empty((-(-tokens // _LOCKED_TOKENS),), dtype=torch.int32)
        means = hidden.new_empty((words,), dtype=torch.float32) if filters else None
        del locks
        losses = hidden.new_zeros((tokens,), dtype=torch.float32)
        losses = (losses.clone() if capped else losses).add_(log_sums)
        ctx.save_for_backward(hidden, weight, log_sums, target, means)
        ctx.valids = valids  # which stay until the loss is gone
        if reduction != "none":
            return losses.mean()
        if valids is None:
            return losses
        every = losses.new_zeros((len(target),))
        every[valids + 1] = losses
        return every

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> Any:
        hidden, weight, log_sums, _, means = ctx.saved_tensors
        order = None if means is None else torch.argsort(means).to(torch.int32)
        of_losses = of_loss[0].contiguous()
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=hidden.dtype) if ctx.needs_input_grad[1] else None
        columns = -(-weight.shape[1] // _LOCKED_WIDTH)
        locks = [
            tensor.new_zeros((-(-len(tensor) // columns), columns), dtype=torch.int32) for tensor in (log_sums, weight)
        ]
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)  # beside the locks
        del locks, order, of_losses
        return of_hidden, of_weight, *[None] * 5
