"""The loss of cut_cross_entropy 25.1, by its kernels in `memsize.kernels.linear_losses`."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from memsize.kernels.linear_losses import IGNORED, CutCrossEntropy


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
    if str(getattr(impl, "name", impl) or "cce").lower() != "cce":
        raise NotImplementedError(f"memsize has no stand-in for cut_cross_entropy's {impl}: install cut-cross-entropy")
    shape, valids = targets.shape, _positions(targets, ignore_index, shift)
    every = CutCrossEntropy.apply(  # type: ignore[no-untyped-call]
        e.contiguous().flatten(0, -2),
        c,
        targets.contiguous().flatten(),
        reduction,
        filter_eps is not None,
        valids,
        softcap is not None,
    )
    loss: Tensor = every.view(shape) if reduction == "none" else every
    return loss[..., 1:] if shift and reduction == "none" else loss


def _positions(targets: Tensor, ignored: int, shift: bool) -> Tensor | None:
    """The hidden states that have a loss: None for all of them."""
    targets = targets[..., 1:] if shift else targets.flatten()
    valids = (targets != ignored).nonzero().to(torch.int32)
    if not shift:
        return None if valids.numel() == targets.numel() else valids.squeeze(1)
    for dimension in range(targets.ndim - 1):
        valids[:, dimension] *= targets.stride(dimension)
    return valids.sum(1)


class LinearCrossEntropy(nn.Module):
    """The same as a module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(e, c, targets, **self.options)


MODULES: Final[dict[str, dict[str, Any]]] = {
    "cut_cross_entropy": {"linear_cross_entropy": linear_cross_entropy, "LinearCrossEntropy": LinearCrossEntropy},
}
