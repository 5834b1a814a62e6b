"""apex's fused optimizers and norms.

State is made in the first step, that of FusedAdam in float32, and kernels update in place. Norms keep their input and
statistics, as PyTorch's own do on CUDA.

Source: apex, `optimizers/fused_adam.py`, `fused_sgd.py` and `fused_lamb.py`; `normalization/fused_layer_norm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn


class _Fused(torch.optim.Optimizer):
    """An optimizer whose kernel takes nothing: `state_names` are the tensors that it keeps of each parameter."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    state_dtype: torch.dtype | None = None
    """None: that of the parameter."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """One update in place."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not self.state[parameter]:
                        for name in self.names_in(group):
                            self.state[parameter][name] = torch.zeros_like(parameter, dtype=self.state_dtype)
        return loss

    def names_in(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.state_names


class FusedAdam(_Fused):
    """Adam, or AdamW."""

    state_dtype = torch.float32


class FusedLAMB(_Fused):
    """LAMB."""


class FusedNovoGrad(_Fused):
    """NovoGrad, whose second moment is a number for each parameter."""

    state_names = ("exp_avg",)


class FusedAdagrad(_Fused):
    """Adagrad."""

    state_names = ("sum",)


class FusedSGD(_Fused):
    """SGD, with momentum or without."""

    def names_in(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group.get("momentum") else ()


class FusedLayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **_: Any) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **_: Any) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


_OPTIMIZERS: Final = {cls.__name__: cls for cls in (FusedAdam, FusedLAMB, FusedNovoGrad, FusedAdagrad, FusedSGD)}
_NORMS: Final = {
    "FusedLayerNorm": FusedLayerNorm,
    "FusedRMSNorm": FusedRMSNorm,
    "MixedFusedLayerNorm": FusedLayerNorm,
    "MixedFusedRMSNorm": FusedRMSNorm,
}


def _accumulate(*_: Any) -> None:
    """Add a product to the gradient that it is given, in place."""


MODULES: Final[dict[str, dict[str, Any]]] = {
    "apex": {},
    "apex.optimizers": _OPTIMIZERS,
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": _NORMS,
    "fused_weight_gradient_mlp_cuda": {f"wgrad_gemm_accum_fp{bits}": _accumulate for bits in (16, 32)},
}
