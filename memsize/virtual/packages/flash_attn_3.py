"""flash_attn_interface: FlashAttention-3, which keeps no state of random numbers, since it has no dropout.

In backward a query's gradient is summed in float32, and those of keys and values too where several heads share them.

Source: flash-attention, `hopper/flash_attn_interface.py` and `hopper/flash_api.cpp` (`mha_fwd`, `mha_bwd`). Known
limits: a number of splits that the kernel chooses (`num_splits=0`) is taken to be one; semaphores are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

_WIDTHS: Final = (64, 96, 128, 192, 256)
"""Heads are padded to one of these widths."""
_ALIGNED: Final = 8
_HALVES: Final = (torch.float16, torch.bfloat16)


def rows_per_block(width: int, capability: tuple[int, int], causal: bool, softcap: bool) -> int:
    """Rows of queries in a block of the backward for heads of a padded `width`."""
    if capability >= (9, 0):
        if width <= 64:
            return 96 if causal and softcap else 128
        return 80 if width == 128 and not causal and not softcap else 64
    if capability in ((8, 6), (8, 9)):
        return 64 if width <= 192 else 32
    return 128 if width <= 64 else 64


def columns_per_block(width: int, capability: tuple[int, int]) -> int:
    """Keys in a block of the backward."""
    if capability in ((8, 6), (8, 9)):
        return {64: 128, 96: 128, 128: 96}.get(width, 64)
    smaller = {192: 96, 256: 80} if capability >= (9, 0) else {192: 80, 256: 64}
    return smaller.get(width, 128)


@torch.library.custom_op(
    "memsize::flash_attention_3", mutates_args=(), schema="(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)"
)
def _forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and a sum of each row: like the package's own, one operator of a graph that torch.compile traces."""
    dtype = query.dtype if query.dtype in _HALVES else torch.bfloat16
    out = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    sums = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3]), dtype=torch.float32)
    return out, sums


_forward.register_fake(_forward._init_fn)


@torch.library.custom_op(
    "memsize::flash_attention_3_backward",
    mutates_args=("gradients",),
    schema="(Tensor(a!)[] gradients, Tensor of_out, Tensor[] saved, Tensor? begins, bool causal, bool softcap) -> ()",
)
def _backward(
    gradients: list[Tensor], of_out: Tensor, saved: list[Tensor], begins: Tensor | None, causal: bool, softcap: bool
) -> None:
    """Take what the kernels of the backward do beside the gradients that they write."""
    query, key, value, *_ = saved
    width = next(padded for padded in _WIDTHS if max(query.shape[-1], value.shape[-1]) <= padded)
    capability = torch.cuda.get_device_capability()
    rows = rows_per_block(width, capability, causal, softcap)
    batch, heads = query.shape[:-3], query.shape[-2]
    queries = _padded(query.shape[-3], rows, begins)
    dots = [query.new_empty((*batch, heads, queries), dtype=torch.float32) for _ in range(2)]
    scratch = [query.new_empty((*batch, heads, queries * width), dtype=torch.float32)]
    if key.shape[-2] != heads:
        keys = _padded(key.shape[-3], columns_per_block(width, capability), begins)
        scratch += [query.new_zeros((*batch, key.shape[-2], keys, width), dtype=torch.float32) for _ in range(2)]
    del dots, scratch


_backward.register_fake(lambda *_: None)


class _Attention(torch.autograd.Function):
    """Attention of ``[batch, length, heads, width]``, or of ``[tokens, heads, width]`` with where sequences begin."""

    @staticmethod
    def forward(ctx: Any, options: Mapping[str, Any], begins: tuple[Any, ...], *tensors: Tensor) -> Any:
        query, key, value = _parts(tensors, options)
        out, sums = _forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums, *begins)
        ctx.options, ctx.shapes = options, [tensor.shape for tensor in tensors]
        return (out, sums) if options.get("return_attn_probs") else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        saved, begins = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        gradients = [saved[0].new_empty(shape) for shape in ctx.shapes]
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        causal = bool(ctx.options.get("causal") or max(ctx.options.get("window_size", (-1, -1))) >= 0)
        softcap = bool(ctx.options.get("softcap"))
        _backward(gradients, gradient, [*saved], begins[0] if begins else None, causal, softcap)
        return None, None, *gradients


def _padded(length: int, block: int, begins: Tensor | None) -> int:
    if begins is not None:
        length += block * (len(begins) - 1)
    return -(-length // block) * block


def _parts(tensors: tuple[Tensor, ...], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    if len(tensors) > 1:
        return tensors
    if tensors[0].dim() == 5:
        return tensors[0].unbind(-3)
    heads = options["num_heads_q"]
    shared = (tensors[0].shape[2] - heads) // 2
    return tuple(torch.split(tensors[0], [heads, shared, shared], dim=-2))


def _attended(tensors: tuple[Tensor, ...], begins: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    if not torch.compiler.is_compiling() and torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if tensors[0].dtype not in (*_HALVES, torch.float8_e4m3fn):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if tensors[0].shape[-1] % (_ALIGNED if tensors[0].dtype in _HALVES else 2 * _ALIGNED):
        raise RuntimeError(f"head_size should be a multiple of {_ALIGNED}")
    tensors = tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
    return _Attention.apply(options, begins, *tensors)  # type: ignore[no-untyped-call]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False, **_: Any) -> Any:
    """Attention of ``[batch, length, heads, width]``."""
    return _attended((q, k, v), (), {"causal": causal, **_})


def flash_attn_qkvpacked_func(qkv: Tensor, softmax_scale: Any = None, causal: bool = False, **_: Any) -> Any:
    """The same with all in one tensor ``[batch, length, 3, heads, width]``, or with heads side by side."""
    return _attended((qkv,), (), {"causal": causal, **_})


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *_: Any, **options: Any
) -> Any:
    """Attention of ``[tokens, heads, width]``, whose sequences begin at `cu_seqlens_q`."""
    return _attended((q, k, v), (cu_seqlens_q, cu_seqlens_k), options)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **options: Any) -> Any:
    """Attention to a cache, which is written in place."""
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    sums = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return (out, sums) if options.get("return_softmax_lse") else out


MODULES: Final[dict[str, dict[str, Any]]] = {
    "flash_attn_interface": {
        "flash_attn_func": flash_attn_func,
        "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    }
}
