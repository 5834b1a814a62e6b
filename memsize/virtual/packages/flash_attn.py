"""flash_attn 2.8: its attention, as FlashAttention-2 runs it.

Kept for backward are queries, keys, values, the output, a sum for each row and the state of the random numbers. In
backward the gradients of a packed tensor are one tensor, beside the query's gradient in float32.

Source: flash-attention 2.8, `flash_attn/flash_attn_interface.py` and `csrc/flash_attn/flash_api.cpp` (`mha_fwd`,
`mha_varlen_bwd` …), `flash_attn/utils/distributed.py`. Known limit: accumulators of few queries whose keys are split
over the GPU are not counted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

_BLOCK: Final = 128
_WIDTHS: Final = 8
"""Heads are padded to a multiple of this width."""


@torch.library.custom_op(
    "memsize::flash_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)",
)
def _forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, a sum of each row, and the state of the random numbers: like the package's own, one operator of a
    graph that torch.compile traces.
    """
    sums = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3]), dtype=torch.float32)
    return torch.empty_like(query), sums, query.new_empty((2,), dtype=torch.int64)


_forward.register_fake(_forward._init_fn)


@torch.library.custom_op(
    "memsize::flash_attention_backward",
    mutates_args=("gradients",),
    schema="(Tensor(a!)[] gradients, Tensor of_out, Tensor[] saved, Tensor? lengths) -> ()",
)
def _backward(gradients: list[Tensor], of_out: Tensor, saved: list[Tensor], lengths: Tensor | None) -> None:
    """Take what the kernels of the backward do beside the gradients that they write."""
    query, key, *_ = saved
    heads, rows, width = query.shape[-2], query.shape[-3], query.shape[-1]
    rows = -(-rows // _BLOCK) * _BLOCK if lengths is None else rows + _BLOCK * (len(lengths) - 1)
    rounded = -(-width // 32) * 32 if width <= 192 else 256
    dots = query.new_empty((*query.shape[:-3], heads, rows), dtype=torch.float32)
    sum_of_query = query.new_empty((*query.shape[:-3], rows, heads, rounded), dtype=torch.float32)
    shared = key.shape[-2] != heads
    by_head = [key.new_empty((*key.shape[:-2], heads, width)) for _ in range(2)] if shared else []
    del dots, sum_of_query, by_head


_backward.register_fake(lambda *_: None)


class _Attention(torch.autograd.Function):
    """Attention of tensors ``[…, heads, width]``: three, a query and packed keys and values, or one that packs all."""

    @staticmethod
    def forward(ctx: Any, lengths: Tensor | None, sums_too: bool, *tensors: Tensor) -> Any:
        query, key, value = _padded(tensors)
        out, sums, state = _forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums, state, lengths)
        ctx.shapes = [tensor.shape for tensor in tensors]
        cut = out[..., : tensors[0].shape[-1]]
        return (cut, sums) if sums_too else cut

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        *saved, lengths = ctx.saved_tensors
        query = saved[0]
        width = query.shape[-1]
        gradients = [query.new_empty((*shape[:-1], width)) for shape in ctx.shapes]
        padded = gradient if gradient.shape[-1] == width else functional.pad(gradient, [0, width - gradient.shape[-1]])
        padded = padded if padded.stride(-1) == 1 else padded.contiguous()
        _backward(gradients, padded, saved, lengths)
        del padded
        cut = (tensor[..., : shape[-1]] for tensor, shape in zip(gradients, ctx.shapes, strict=True))
        return None, None, *cut


def _padded(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(tensors) == 1:
        parts = tensors[0].unbind(-3)
    elif len(tensors) == 2:
        parts = (tensors[0], *tensors[1].unbind(-3))
    else:
        parts = tensors
    missing = -tensors[0].shape[-1] % _WIDTHS
    return tuple(functional.pad(part, [0, missing]) for part in parts) if missing else parts


def _attended(tensors: tuple[Tensor, ...], lengths: Tensor | None, options: Mapping[str, Any]) -> Any:
    if tensors[0].dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    tensors = tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
    sums_too = bool(options.get("return_attn_probs"))
    results: Any = _Attention.apply(lengths, sums_too, *tensors)  # type: ignore[no-untyped-call]
    return (*results, None) if sums_too else results


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Any:
    """Attention of ``[batch, length, heads, width]``."""
    return _attended((q, k, v), None, options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *_: Any, **options: Any) -> Any:
    """The same with keys and values in one tensor ``[batch, length, 2, heads, width]``."""
    return _attended((q, kv), None, options)


def flash_attn_qkvpacked_func(qkv: Tensor, *_: Any, **options: Any) -> Any:
    """The same with all in one tensor ``[batch, length, 3, heads, width]``."""
    return _attended((qkv,), None, options)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *_: Any, **options: Any) -> Any:
    """Attention of ``[tokens, heads, width]``, whose sequences begin at `cu_seqlens_q`."""
    return _attended((q, k, v), cu_seqlens_q, options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, *_: Any, **options: Any) -> Any:
    """The same with keys and values in one tensor."""
    return _attended((q, kv), cu_seqlens_q, options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, *_: Any, **options: Any) -> Any:
    """The same with all in one tensor."""
    return _attended((qkv,), cu_seqlens, options)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **options: Any) -> Any:
    """Attention to a cache, which is written in place."""
    out, sums = torch.empty_like(q), q.new_empty((len(q), q.shape[2], q.shape[1]), dtype=torch.float32)
    return (out, sums) if options.get("return_softmax_lse") else out


# -- padding -----------------------------------------------------------------------------------------------------------


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """The rows of `tensor` at `indices`."""
    return tensor[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """The tokens of a batch that are no padding, in one row, with their positions and the bounds of sequences."""
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = mask.sum(dim=-1, dtype=torch.int32), attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = int(lengths.max().item())
    begins = functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, begins, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put rows back in a batch of padded sequences."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_put((indices,), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def _of_einops(name: str) -> Callable[..., Any]:
    """A function that the package has from einops, on which it depends."""
    return lambda *args, **options: getattr(importlib.import_module("einops"), name)(*args, **options)


def all_gather(input_: Tensor, process_group: Any) -> Tensor:
    """The parts of all processes of a group in one tensor, whose gradients are summed for each."""
    # PyTorch 2.13 has renamed it.
    newer = getattr(functional_collectives, "all_gather_single_autograd", None)
    gathered: Tensor = (newer or functional_collectives.all_gather_tensor_autograd)(input_, 0, process_group)
    return gathered


_FUNCTIONS: Final = {
    function.__name__: function
    for function in (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "flash_attn": {"__version__": "2.8.3", **_FUNCTIONS},
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.bert_padding": {
        "index_first_axis": index_first_axis,
        "pad_input": pad_input,
        "unpad_input": unpad_input,
        **{name: _of_einops(name) for name in ("rearrange", "repeat")},
    },
    "flash_attn.utils": {},
    "flash_attn.utils.distributed": {"all_gather": all_gather},
}
