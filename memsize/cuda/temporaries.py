"""What CUDA's kernels allocate inside and free at their end, where their source says how much.

An op's output says nothing of it. Only attention kernels are in the table: others may take more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memsize.cuda.semantics import current

_aten = torch.ops.aten
_DROPOUT = 8
"""Where cuDNN's backward has the probability, behind the output."""


class Scratch(NamedTuple):
    """One allocation inside a kernel."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """What it asks for."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def kernel_scratch(func: Any, args: Any) -> Iterator[Scratch]:
    """What the kernel of `func` has at its own peak, beside its arguments and results."""
    kernel = _TAKING.get(func)
    return iter(()) if kernel is None else kernel(*args)


def _flash_backward(grad: Any, query: Any, key: Any, *_: Any, **__: Any) -> Iterator[Scratch]:
    """The sum of each row's gradients, and the query's gradient in float32: whole blocks of 128 rows, a head of a
    multiple of 32. Where heads share keys, the gradients of keys and values for each head too.
    Source: transformers/cuda/flash_attn/flash_api.cpp `mha_bwd`.
    """
    batch, heads, length, head = query.shape
    rows, width = -(-length // 128) * 128, -(-head // 32) * 32 if head <= 192 else 256
    yield from _made_dense(grad)
    yield Scratch((batch, heads, rows))
    yield Scratch((batch, rows, heads, width))
    if key.shape[1] != heads:
        shape = (batch, key.shape[2], heads, head)
        yield from (Scratch(shape, query.dtype), Scratch(shape, query.dtype))


def _efficient_backward(
    grad: Any, query: Any, _key: Any, value: Any, _bias: Any, *_: Any, **__: Any
) -> Iterator[Scratch]:
    """The sum of each row's products of gradient and output. Half precision computes it inside the kernel, float32
    from the products, and then brings it into another order. What half-precision kernels accumulate in is not known.
    Source: transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h `kKernelComputesDelta`.
    """
    batch, heads, length, _head = query.shape
    yield from _made_dense(grad)
    yield Scratch((batch, heads, length))
    if query.dtype is torch.float32:
        yield Scratch((batch, length, heads, value.shape[3]))
        if heads > 1 and length > 1:
            yield Scratch((batch, length, heads))


def _cudnn_forward(
    query: Any, key: Any, _value: Any, _bias: Any, _keep_sums: bool, dropout: float = 0.0, *_: Any, **__: Any
) -> Iterator[Scratch]:
    """cuDNN's workspace is that of its plan."""
    size = _plan_workspace(query, key, dropout)
    if size:
        yield Scratch((size,), torch.uint8)


def _cudnn_backward(grad: Any, query: Any, key: Any, _value: Any, out: Any, *more: Any, **__: Any) -> Iterator[Scratch]:
    """cuDNN's workspace, in one piece: the sum of each row's gradients and the query's gradient, both in float32; where
    heads share keys, the gradients of keys and values for each head too; and that of the plan.
    Source: cuDNN's frontend, scaled_dot_product_flash_attention.h (`CompositeSDPABackwardNode`). PyTorch brings the
    output's gradient into the output's order first (cudnn/MHA.cpp).
    """
    batch, heads, length, head = query.shape
    if grad.stride() != out.stride():
        yield Scratch(tuple(grad.shape), grad.dtype)
    size = 4 * batch * heads * length * (head + 1) + _plan_workspace(query, key, more[_DROPOUT])
    if key.shape[1] != heads:
        size += 2 * query.element_size() * batch * heads * key.shape[2] * head
    yield Scratch((size,), torch.uint8)


def _plan_workspace(query: Any, key: Any, dropout: float) -> int:
    """As cuDNN 9.24 answers for some hundred shapes, its plans made without a GPU: 256 B on Hopper. On Blackwell a bit
    for each score where there is dropout, in whole blocks of 128 rows and columns, and nothing without (lengths that
    are no multiple of 8 may take more). Elsewhere PyTorch does not prefer cuDNN, and nothing is known.
    """
    semantics = current()
    major = semantics.capability[0] if semantics else 0
    if major == 9:
        return 256
    if major < 10 or not dropout:
        return 0
    rows, columns = (-(-tensor.shape[2] // 128) * 128 for tensor in (query, key))
    return int(query.shape[0] * query.shape[1] * rows * columns // 8 + 128)


def _made_dense(grad: Any) -> Iterator[Scratch]:
    """A copy of the output's gradient, which kernels want by position and then by head."""
    if not grad.transpose(1, 2).is_contiguous():
        yield Scratch(tuple(grad.shape), grad.dtype)


_TAKING: dict[Any, Callable[..., Iterator[Scratch]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
"""Kernels that take memory for a while, and how much."""
