"""Adam with its state in 8 bits, as bitsandbytes lays it out.

Modelled: the bytes and their lifetimes are those of the library, whose own kernels need a GPU. Source: bitsandbytes
0.43 to 0.49, `optim/optimizer.py` (`Optimizer2State.init_state`: two uint8 tensors, a float32 absmax per block of 256,
one table of 256 float32 each for signed and unsigned values; parameters of fewer than 4,096 elements keep float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

BLOCK = 256
LEAST = 4096


class Adam8bit(torch.optim.Optimizer):
    """Adam or AdamW with 8-bit state: 2 bytes per parameter and 8 per block of 256, updated in place."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self._tables: list[torch.Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. It makes nothing but the state, in the first."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter)
        return None

    def _update(self, parameter: torch.Tensor) -> None:
        if parameter not in self.state:
            self.state[parameter] = self._new_state(parameter)
        parameter.add_(parameter.grad)  # type: ignore[arg-type]

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter.numel() < LEAST:
            return {name: _like(parameter, parameter.shape, torch.float32) for name in ("state1", "state2")}
        if not self._tables:
            self._tables = [_like(parameter, (256,), torch.float32) for _ in range(2)]
        blocks = (-(-parameter.numel() // BLOCK),)
        return {
            "state1": _like(parameter, parameter.shape, torch.uint8),
            "state2": _like(parameter, parameter.shape, torch.uint8),
            "absmax1": _like(parameter, blocks, torch.float32),
            "absmax2": _like(parameter, blocks, torch.float32),
            "qmap1": self._tables[0],
            "qmap2": self._tables[1],
        }


def _like(parameter: torch.Tensor, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=parameter.device)
