"""The losses of liger_kernel 0.8 and cut_cross_entropy 25.1, and Liger's norm and gated MLP.

Source: Liger-Kernel, `transformers/fused_linear_cross_entropy.py`, `ops/cross_entropy.py`, `ops/rms_norm.py` and
`ops/swiglu.py`; `memsize.kernels.linear_losses` has those of the fused losses.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from memsize.kernels.linear_losses import IGNORED, CutCrossEntropy, LigerCrossEntropy


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """The loss of a linear layer's hidden states."""

    def __init__(self, *_: Any, reduction: str = "mean", accum_dtype: torch.dtype | None = None, **__: Any) -> None:
        super().__init__()
        self.reduction, self.accum_dtype = reduction, accum_dtype

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None, **_: Any) -> Any:
        return LigerCrossEntropy.apply(_input, lin_weight, bias, target, self.reduction, self.accum_dtype)  # type: ignore[no-untyped-call]


class _InPlace(torch.autograd.Function):
    """Cross-entropy that writes the logits' gradient over them, in the forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        losses = torch.zeros(len(logits), dtype=logits.dtype, device=logits.device)
        counted = target != IGNORED
        counted.sum()
        ctx.save_for_backward(logits.detach())
        del counted
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return *ctx.saved_tensors, None, None


class LigerCrossEntropyLoss(nn.Module):
    """Cross-entropy of logits."""

    def __init__(self, *_: Any, reduction: str = "mean", **__: Any) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, _input: Tensor, target: Tensor, *_: Any) -> Any:
        return _InPlace.apply(_input, target, self.reduction)  # type: ignore[no-untyped-call]


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    filter_eps: float | str | None = "high",
    impl: Any = None,
) -> Tensor:
    """Cut cross-entropy of hidden states `e` and a classifier `c`."""
    if shift:
        e, targets = e[..., :-1, :], targets[..., 1:]
    loss: Tensor = CutCrossEntropy.apply(  # type: ignore[no-untyped-call]
        e.contiguous().flatten(0, -2), c, targets.contiguous().flatten(), reduction, filter_eps is not None
    )
    return loss.view(targets.shape) if reduction == "none" else loss


class LinearCrossEntropy(nn.Module):
    """The same as a module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(e, c, targets, **self.options)


class LigerRMSNorm(nn.RMSNorm):
    """RMSNorm that keeps its input and a number for each row."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, *_: Any, **__: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.variance_epsilon = eps


class _SiluProduct(torch.autograd.Function):
    """``silu(a) * b``: keeps both, and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors


class LigerSwiGLUMLP(nn.Module):
    """Llama's MLP, with the activation and the product in one kernel."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(_SiluProduct.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]


_CLASSES: Final = {
    cls.__name__: cls for cls in (LigerFusedLinearCrossEntropyLoss, LigerCrossEntropyLoss, LigerRMSNorm, LigerSwiGLUMLP)
}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "liger_kernel": {},
    "liger_kernel.transformers": _CLASSES,
    "cut_cross_entropy": {"linear_cross_entropy": linear_cross_entropy, "LinearCrossEntropy": LinearCrossEntropy},
}
