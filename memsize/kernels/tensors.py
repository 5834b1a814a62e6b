"""`meta` tensors, made and inspected as cheaply as PyTorch allows.

Measured per call inside a dispatch mode: `torch.empty_strided` 1.1 µs, `torch.empty` 1.6 µs, the same through
`torch.ops.aten` 5.5 µs, `Tensor.new_empty` 7 µs, `torch.empty_like` (Python on `meta`) 25 µs.
"""

from __future__ import annotations

from typing import Any

import torch

from memsize.kernels import strides as layout
from memsize.torch_internals.meta import is_meta

Tensor = torch.Tensor
META = torch.device("meta")
_ONE = (1,)
_empty, _empty_strided = torch.empty, torch.empty_strided
"""PyTorch's own functions, even while `memsize.tracing.overrides` replaces them: these calls name their device."""
_STRIDED = torch.strided


def empty(shape: layout.Shape, dtype: torch.dtype) -> Tensor:
    """A new row-major tensor."""
    if len(shape) == 1:
        return _empty_strided(shape, _ONE, dtype=dtype, device=META)
    return _empty(shape, dtype=dtype, device=META)


def strided(shape: layout.Shape, strides: layout.Shape, dtype: torch.dtype) -> Tensor:
    return _empty_strided(shape, strides, dtype=dtype, device=META)


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor as `torch.empty_like` does: with the same strides where they are dense."""
    dtype = dtype or tensor.dtype
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.is_contiguous():
        strides = layout.like(shape, strides)
    return _empty_strided(shape, strides, dtype=dtype, device=META)


def mapped(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The output of an elementwise op over one tensor: like it, except that dimensions of size 1 get plain strides."""
    return empty(tensor.shape, dtype or tensor.dtype) if tensor.is_contiguous() else like(tensor, dtype)


def formatted(shape: layout.Shape, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """A new tensor, channels last or row-major."""
    return strided(shape, layout.channels_last(shape), dtype) if channels_last else empty(shape, dtype)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether kernels that keep a memory format treat `tensor` as channels last."""
    return tensor.dim() in (4, 5) and layout.is_channels_last(tensor.shape, tensor.stride())


def is_dense_channels_last(tensor: Tensor) -> bool:
    """Whether an image or a volume is channels last without gaps; one channel or one pixel is row-major as well."""
    return tensor.dim() in (4, 5) and tensor.is_contiguous(memory_format=channels_last_format(tensor))


def channels_last_format(tensor: Tensor) -> torch.memory_format:
    """Return channels last as PyTorch names it for an image (4-D) or a volume (5-D)."""
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def has_inner_channels(tensor: Tensor) -> bool:
    """Whether batch norm's kernels for inner channels take it (`batch_norm_use_channels_last_kernels`)."""
    return is_dense_channels_last(tensor) or (tensor.is_contiguous() and tensor.stride(1) == 1)


def is_canonical(tensor: Tensor) -> bool:
    """Whether the strides are exactly those of a row-major tensor, also in dimensions of size 1."""
    shape = tensor.shape
    return tensor.is_contiguous() and (1 not in shape or tensor.stride() == layout.contiguous(shape))


def are_plain(*tensors: Any) -> bool:
    """Whether each of these is None or a strided `meta` tensor of real numbers, the only kinds that the rules know."""
    for tensor in tensors:
        if tensor is None:
            continue
        if (
            not isinstance(tensor, Tensor)
            or not is_meta(tensor)
            or tensor.layout is not _STRIDED
            or tensor.is_complex()
        ):
            return False
    return True


def are_alike(*tensors: Tensor) -> bool:
    """Whether all of these have one dtype."""
    dtype = tensors[0].dtype
    return all(t.dtype is dtype for t in tensors)


def are_floating(*tensors: Any) -> bool:
    """Whether these are strided `meta` tensors of one floating dtype."""
    return are_plain(*tensors) and tensors[0].is_floating_point() and are_alike(*tensors)


def overlaps(tensor: Tensor) -> bool:
    """Whether several elements share a place, which an op in place refuses."""
    return 0 in tensor.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which CUDA kernels accumulate `dtype` (ATen/AccumulateType.h): float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def elementwise(dtype: torch.dtype, *tensors: Tensor) -> Any:
    """The output of an elementwise op that reads `tensors`; NotImplemented when their shapes don't go together.

    Source: TensorIterator. Where all operands have one shape and are all row-major, all channels last or all laid out
    in the same dense way, the output is too; elsewhere the strides are sorted.
    """
    first, *others = tensors
    shape: layout.Shape = first.shape
    for other in others:
        if other.shape != shape:
            joined = layout.broadcast([t.shape for t in tensors])
            return NotImplemented if joined is None else sorted_elementwise(dtype, joined, *tensors)
    if all(t.is_contiguous() for t in tensors):
        return _empty(shape, dtype=dtype, device=META)
    if len(shape) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
        return strided(shape, layout.channels_last(shape), dtype)
    strides = first.stride()
    if all(t.stride() == strides for t in others) and layout.is_dense(shape, strides):
        return strided(shape, strides, dtype)
    return sorted_elementwise(dtype, shape, *tensors)


def sorted_elementwise(dtype: torch.dtype, shape: layout.Shape, *tensors: Tensor) -> Tensor:
    """`elementwise` where the strides have to be sorted: the shapes differ, or a number is among the operands."""
    if all(map(is_canonical, tensors)):
        return empty(shape, dtype)
    return strided(shape, layout.elementwise(shape, [(t.shape, t.stride()) for t in tensors]), dtype)
