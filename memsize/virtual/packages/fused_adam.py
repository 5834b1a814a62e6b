"""Transformer Engine's FusedAdam: Adam with master weights and with state of fewer bits.

State of fewer bits than its kernel reads is unpacked into float32, for all parameters of a group at once.

Source: TransformerEngine 2.20, `pytorch/optimizers/fused_adam.py`. Known limits: `capturable` is as without, and
gradients of parameters in float8 are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_MASTER: Final = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW. `master_weights` are kept beside parameters in 8 or 16 bits, or, with `store_param_remainders`,
    the 16 bits that a bfloat16 parameter lacks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *_: Any,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, **options})
        self._dtypes = dict(zip(_MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))
        if master_weights:
            self._dtypes[_MASTER] = master_weight_dtype
        self._gradient = "decoupled_grad" if use_decoupled_grad else "grad"
        self._keeps_remainders = store_param_remainders and self._dtypes.get(_MASTER) == torch.float32
        self._scales: list[Tensor] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that a step reads, or fill them with zeros."""
        if self._gradient == "grad":
            super().zero_grad(set_to_none)
            return
        for parameter in self._parameters():
            if set_to_none:
                parameter.decoupled_grad = None
            else:
                parameter.decoupled_grad.zero_()

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """One update in place; the first makes the state of every parameter."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                unpacked = []
                for parameter in group["params"]:
                    if not self.state[parameter]:
                        self._make_state(parameter)
                    if getattr(parameter, self._gradient, None) is not None:
                        unpacked += self._unpacked(parameter)
        return loss

    def _parameters(self) -> list[Any]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _make_state(self, parameter: Tensor) -> None:
        for name, dtype in self._dtypes.items():
            if name == _MASTER and self._has_remainder(parameter):
                dtype = torch.int16
            elif dtype != torch.float32:
                self._scales.append(torch.ones(1, device=parameter.device))
            self.state[parameter][name] = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            if name == _MASTER and dtype != torch.int16:
                copied = parameter.clone().detach().float()
                self.state[parameter][name].copy_(copied)

    def _unpacked(self, parameter: Tensor) -> list[Tensor]:
        """Float32 copies of the state that the kernel does not read as it is."""
        reads_bfloat16 = all(self._dtypes[name] == torch.bfloat16 for name in _MOMENTS)
        return [
            self.state[parameter][name].float()
            for name, dtype in self._dtypes.items()
            if dtype != torch.float32 and not (reads_bfloat16 and name in _MOMENTS)
        ]

    def _has_remainder(self, parameter: Tensor) -> bool:
        return self._keeps_remainders and parameter.dtype == torch.bfloat16
