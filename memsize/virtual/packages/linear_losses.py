"""The loss of cut_cross_entropy 25.1, by its kernels in `memsize.kernels.linear_losses`."""

from __future__ import annotations

from typing import Any, Final

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


MODULES: Final[dict[str, dict[str, Any]]] = {
    "cut_cross_entropy": {"linear_cross_entropy": linear_cross_entropy, "LinearCrossEntropy": LinearCrossEntropy},
}
