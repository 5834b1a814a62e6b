"""Transformer Engine: its names, and what Megatron imports beside its layers (`transformer_engine_layers`).

Source: TransformerEngine 2.20, `pytorch/__init__.py`, `pytorch/distributed.py`, `pytorch/attention/rope.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from memsize.processes.simulation import running_part
from memsize.virtual.packages.apex import FusedSGD
from memsize.virtual.packages.float8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8Tensor,
    Format,
    MXFP8BlockScaling,
    Recipe,
    default_recipe,
)
from memsize.virtual.packages.fused_adam import FusedAdam
from memsize.virtual.packages.linear_products import unread_gradient
from memsize.virtual.packages.transformer_engine_layers import (
    DotProductAttention,
    GroupedLinear,
    Layer,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    Recipes,
    RMSNorm,
    TransformerLayer,
    autocast,
    quantized_model_init,
)


class _Rotated(torch.autograd.Function):
    """Fused rotary embedding: a new tensor, and a new gradient; `frequencies` are saved in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frequencies: Tensor) -> Tensor:
        ctx.save_for_backward(frequencies.float())
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.new_empty(gradient.shape), None


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rotate queries or keys, as the fused kernel does."""
    rotated: Tensor = _Rotated.apply(t, freqs)  # type: ignore[no-untyped-call]
    return rotated


_RECIPES: Final = {
    cls.__name__: cls
    for cls in (Recipe, Format, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling)
}
_LAYERS: Final = {
    cls.__name__: cls
    for cls in (
        *(Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, LayerNorm, RMSNorm),
        *(DotProductAttention, MultiheadAttention, TransformerLayer),
    )
}


class FP8GlobalStateManager:
    """The recipe in force, for those who ask."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return running_part(Recipes).products is not None

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        return running_part(Recipes).products or default_recipe()


class CudaRNGStatesTracker:
    """The states of random numbers of model-parallel ranks: numbers take no memory here."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def reset(self) -> None:
        self.states_ = {}

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = seed

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        yield


@contextmanager
def activation_recompute_forward(*_: Any, **__: Any) -> Iterator[None]:
    """While open, a checkpointed region runs, or runs again: it scales as before, which takes no memory."""
    yield


_DISTRIBUTED: Final = {
    "CudaRNGStatesTracker": CudaRNGStatesTracker,
    "activation_recompute_forward": activation_recompute_forward,
}


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"transformer_engine's {name} is not simulated: turn Megatron's fusion of it off")

    return refuse


_ROUTER: Final = {
    name: _refusing(name)
    for name in ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
}
_TENSORS: Final = ("quantized_tensor", "tensor", "tensor.quantized_tensor")
"""The modules with the base class of parameters in float8, in newer and older releases."""
_NAMES: Final[dict[str, Any]] = {
    **_LAYERS,
    "autocast": autocast,
    "fp8_autocast": autocast,
    "fp8_model_init": quantized_model_init,
    "quantized_model_init": quantized_model_init,
    "optimizers": SimpleNamespace(FusedAdam=FusedAdam),
    "distributed": SimpleNamespace(**_DISTRIBUTED),
    "is_fp8_available": lambda **_: torch.cuda.get_device_capability() >= (8, 9),
}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "transformer_engine": {"__version__": "2.20.0"},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _RECIPES,
    "transformer_engine.pytorch": _NAMES,
    **{f"transformer_engine.pytorch.{name}": {"QuantizedTensor": Float8Tensor} for name in _TENSORS},
    "transformer_engine.pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD},
    "transformer_engine.pytorch.attention": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    "transformer_engine.pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    "transformer_engine.pytorch.distributed": _DISTRIBUTED,
    "transformer_engine.pytorch.module": {},
    "transformer_engine.pytorch.module.base": {
        "TransformerEngineBaseModule": Layer,
        "get_dummy_wgrad": unread_gradient,
    },
    "transformer_engine.pytorch.router": _ROUTER,
    "transformer_engine.pytorch.ops": {"Sequential": nn.Sequential, "FusibleOperation": nn.Module},
    "transformer_engine.pytorch.fp8": {
        "FP8GlobalStateManager": FP8GlobalStateManager,
        "fp8_autocast": autocast,
        "fp8_model_init": quantized_model_init,
    },
}
