"""The fused attention kernels and their gradients. Queries are (batch, heads, length, head size).

The kernels work on (batch, length, heads, head size), so their outputs often lie in that order.
"""

from __future__ import annotations

from typing import Any

import torch

from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape, permuted
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, empty, like, strided

_BY_LENGTH = (3, 1, 2, 0)
"""The dimensions of (batch, heads, length, head size), innermost first, when a position's heads lie side by side."""


def _fits(query: Any, key: Any, value: Any) -> bool:
    if not are_plain(query, key, value) or not are_alike(query, key, value) or not query.is_floating_point():
        return False
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, width, keys = query.shape[0], query.shape[3], tuple(key.shape)
    return keys[0] == batch and keys[3] == width and keys[:3] == tuple(value.shape[:3])


def _by_length(shape: Shape, dtype: torch.dtype) -> Tensor:
    return strided(shape, permuted(shape, _BY_LENGTH), dtype)


@shape_rule("aten::_scaled_dot_product_flash_attention")
def _flash(
    query: Any, key: Any, value: Any, _dropout: float = 0.0, _causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Output like the query, the log of each row's sum in float32, and the state of the random numbers: two words of 8
    bytes and an unused one (cuda/attention.cu, flash_api.cpp)."""
    if debug or torch.version.hip or not _fits(query, key, value) or value.shape[3] != query.shape[3]:
        return NotImplemented
    rows = query.shape[:3]
    states = empty((2,), torch.uint64), empty((), torch.uint64)
    sums = empty(rows, torch.float32)
    return like(query), sums, None, None, rows[2], key.shape[2], *states, empty((0,), query.dtype)


@shape_rule("aten::_transform_bias_rescale_qkv")
def _rescaled(qkv: Any, bias: Any, heads: int) -> Any:
    """Query, key and value by head, three parts of one block (cuda/attention.cu)."""
    if not are_plain(qkv, bias) or qkv.dim() != 3:
        return NotImplemented
    batch, tokens, width = qkv.shape
    return empty((3, batch, heads, tokens, width // 3 // heads), bias.dtype).unbind()


@shape_rule("aten::_masked_softmax")
def _masked_softmax(scores: Any, _mask: Any, _dim: int | None = None, _kind: int | None = None) -> Any:
    return like(scores) if are_plain(scores) else NotImplemented


@shape_rule("aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward")
def _like_inputs(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return (like(query), like(key), like(value)) if _fits(query, key, value) else NotImplemented


def efficient_rows(length: int) -> int:
    """The rows for which the memory-efficient kernel keeps a sum: whole blocks of 32 (`kAlignLSE`)."""
    return -(-length // 32) * 32


@shape_rule("aten::_scaled_dot_product_efficient_attention")
def _efficient(
    query: Any, key: Any, value: Any, bias: Any, keep_sums: bool, _dropout: float = 0.0, _causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Output by length; sums in float32 where backward needs them. The seed and the offset of the random numbers are on
    the host, unless a CUDA graph is captured (cuda/attention.cu, "Seed and Offset Device"); `meta` says otherwise."""
    if torch.version.hip or not _fits(query, key, value) or not are_plain(bias):
        return NotImplemented
    batch, heads, length, _ = query.shape
    output = _by_length((batch, heads, length, value.shape[3]), query.dtype)
    sums = empty((batch, heads, efficient_rows(length) if keep_sums else 0), torch.float32)
    return output, sums, _on_host(), _on_host()


def _on_host() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


@shape_rule("aten::_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(
    _grad: Any, query: Any, key: Any, value: Any, bias: Any, _out: Any, _sums: Any, _seed: Any, _offset: Any,
    _dropout: float, mask: Any, _causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """Gradients by length. The bias's has rows of a multiple of 16, of which a part is returned."""
    if not _fits(query, key, value) or not are_plain(bias):
        return NotImplemented
    wanted = bias is not None and mask[3]
    return *(_by_length(t.shape, t.dtype) for t in (query, key, value)), _aligned(bias) if wanted else None


def _aligned(bias: Tensor) -> Tensor:
    length = bias.shape[-1]
    return empty((*bias.shape[:-1], -(-length // 16) * 16), bias.dtype)[..., :length]


@shape_rule("aten::_scaled_dot_product_cudnn_attention")
def _cudnn(
    query: Any, key: Any, value: Any, bias: Any, _keep_sums: bool, _dropout: float = 0.0, _causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """Output in the query's order of dimensions (cudnn/MHA.cpp); a seed and an offset of 8 bytes each."""
    if debug or not _fits(query, key, value) or not are_plain(bias):
        return NotImplemented
    rows, width = query.shape[:3], value.shape[3]
    if query.shape[3] == width:
        output = like(query)
    elif query.is_contiguous():
        output = empty((*rows, width), query.dtype)
    else:
        return NotImplemented
    states = empty((), torch.int64), empty((), torch.int64)
    return output, empty((*rows, 1), torch.float32), None, None, rows[2], key.shape[2], *states, None
