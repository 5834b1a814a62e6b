"""xformers' attention: flash_attn's in 16 bits, and a memory-efficient kernel, which PyTorch has too, otherwise.

Source: xformers 0.0.32, `ops/fmha/__init__.py` and `dispatch.py` (which operator runs), `ops/fmha/attn_bias.py`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from memsize.virtual.packages.flash_attn import flash_attn_func


class LowerTriangularMask:
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


_OPS: Final = {"memory_efficient_attention": memory_efficient_attention, "LowerTriangularMask": LowerTriangularMask}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "xformers": {"__version__": "0.0.32"},
    "xformers.ops": _OPS,
    "xformers.ops.fmha": _OPS,
    "xformers.ops.fmha.attn_bias": {"LowerTriangularMask": LowerTriangularMask},
}
