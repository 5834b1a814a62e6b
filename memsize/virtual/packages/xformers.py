"""xformers' attention: flash_attn's in 16 bits, and a memory-efficient kernel, which PyTorch has too, otherwise.

Its profiler records nothing.

Source: xformers 0.0.32, `ops/fmha/__init__.py` and `dispatch.py` (which operator runs), `ops/fmha/attn_bias.py`,
`ops/fmha/flash.py` (the operator's name), `profiler/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from memsize.processes.patches import Patch
from memsize.virtual.packages.flash_attn import flash_attn_func


class AttentionBias:
    """A mask of attention that is no tensor."""


class LowerTriangularMask(AttentionBias):
    """The mask of causal attention, which is no tensor."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention of ``[batch, length, heads, width]``, or of one head ``[batch, length, width]``."""
    if query.dim() == 3:
        query, key, value = (tensor.unsqueeze(2) for tensor in (query, key, value))
        return memory_efficient_attention(query, key, value, attn_bias, p, scale).squeeze(2)
    if not isinstance(attn_bias, Tensor) and query.dtype is not torch.float32 and query.shape[-1] <= 256:
        result: Tensor = flash_attn_func(query, key, value)
        return result
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    masks: dict[str, Any] = {"attn_mask": attn_bias} if isinstance(attn_bias, Tensor) else {}
    if isinstance(attn_bias, LowerTriangularMask):
        masks["is_causal"] = True
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        out = functional.scaled_dot_product_attention(query, key, value, dropout_p=p, scale=scale, **masks)
    return out.transpose(1, 2)


class _Profiler:
    def __init__(self, main_profiler: Any) -> None:
        self.main_profiler = main_profiler


@contextmanager
def _profile(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _FlashForward:
    OPERATOR: Final = torch.ops.memsize.flash_attention


def operators(module: ModuleType) -> Iterator[Patch]:
    """Let policies of selective checkpointing name the operator of xformers' attention: the one that is simulated."""
    if getattr(module, "memory_efficient_attention", None) is memory_efficient_attention:
        yield torch.ops, "xformers_flash", SimpleNamespace(flash_fwd=_FlashForward.OPERATOR)


_BIASES: Final = {"AttentionBias": AttentionBias, "LowerTriangularMask": LowerTriangularMask}
_OPS: Final = {"memory_efficient_attention": memory_efficient_attention, **_BIASES}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "xformers": {"__version__": "0.0.32"},
    "xformers.ops": _OPS,
    "xformers.ops.fmha": _OPS,
    "xformers.ops.fmha.attn_bias": _BIASES,
    "xformers.ops.fmha.flash": {"FwOp": _FlashForward},
    "xformers.profiler": {
        "MemSnapshotsProfiler": _Profiler,
        "PyTorchProfiler": _Profiler,
        "profile": _profile,
        "step": lambda: None,
    },
}
