"""Pooling over windows and to a given size, and the gradients. Images keep their memory format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, empty, formatted, is_channels_last


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Windows along one dimension. With `ceil_mode` a last, partial window counts if it starts inside the input or the
    padding before it (ATen/native/Pool.h)."""
    left = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    windows = left // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def pooled_shape(
    shape: Shape,
    rank: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[int, ...] | None:
    """The output's shape, batch and channels kept; None for arguments that don't fit. No stride: the kernel's size."""
    options = [_spread(values, rank) for values in (kernel, stride or kernel, padding, dilation)]
    if len(shape) not in (rank + 1, rank + 2) or None in options or 0 in shape[1:]:
        return None
    sizes, steps, pads, gaps = (values or () for values in options)
    if min(*sizes, *steps, *gaps) < 1 or min(pads) < 0:
        return None
    if any(2 * pad > size for pad, size in zip(pads, sizes, strict=True)):
        return None
    pooled = [pooled_size(*each, ceil_mode) for each in zip(shape[-rank:], sizes, steps, pads, gaps, strict=True)]
    return (*shape[:-rank], *pooled) if min(pooled) > 0 else None


def _spread(values: Sequence[int], rank: int) -> tuple[int, ...] | None:
    if len(values) == rank:
        return tuple(values)
    return (values[0],) * rank if len(values) == 1 else None


def _is_image(tensor: Any) -> bool:
    return are_plain(tensor) and tensor.is_floating_point()


def _formatted(shape: Shape, dtype: torch.dtype, source: Tensor) -> Tensor:
    """In the format of `source`, which images have and, in most kernels, volumes haven't."""
    return formatted(shape, dtype, source.dim() == 4 and len(shape) == 4 and is_channels_last(source))


def _max_pool(rank: int, tensor: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    if not _is_image(tensor) or (rank == 3 and is_channels_last(tensor)):
        return NotImplemented
    shape = pooled_shape(tensor.shape, rank, kernel, stride, padding, dilation, ceil_mode)
    if shape is None:
        return NotImplemented
    return _formatted(shape, tensor.dtype, tensor), _formatted(shape, torch.int64, tensor)


@shape_rule("aten::max_pool2d_with_indices")
def _max_pool2d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    return _max_pool(2, tensor, kernel, stride, padding, dilation, ceil_mode)


@shape_rule("aten::max_pool3d_with_indices")
def _max_pool3d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    return _max_pool(3, tensor, kernel, stride, padding, dilation, ceil_mode)


@shape_rule("aten::avg_pool2d")
def _avg_pool2d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, _count: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    return _avg_pool(2, tensor, kernel, stride, padding, ceil_mode, divisor)


@shape_rule("aten::avg_pool3d")
def _avg_pool3d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, _count: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    return _avg_pool(3, tensor, kernel, stride, padding, ceil_mode, divisor)


def _avg_pool(
    rank: int, tensor: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, divisor: int | None
) -> Any:
    if not _is_image(tensor) or divisor == 0 or (rank == 3 and is_channels_last(tensor)):
        return NotImplemented
    shape = pooled_shape(tensor.shape, rank, kernel, stride, padding, (1,), ceil_mode)
    return NotImplemented if shape is None else _formatted(shape, tensor.dtype, tensor)


@shape_rule(
    "aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward", "aten::avg_pool2d_backward",
    "aten::avg_pool3d_backward", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool3d_backward",
)  # fmt: skip
def _pool_backward(grad: Any, tensor: Any, *_: Any, **__: Any) -> Any:
    """Like the input."""
    if not are_plain(grad, tensor) or not are_alike(grad, tensor) or grad.shape[:-3] != tensor.shape[:-3]:
        return NotImplemented
    if tensor.dim() == 5 and is_channels_last(tensor):
        return NotImplemented
    return _formatted(tensor.shape, tensor.dtype, tensor)


def _adaptive_shape(tensor: Any, size: Any, rank: int) -> tuple[int, ...] | None:
    if not _is_image(tensor) or len(size) != rank or tensor.dim() not in (rank + 1, rank + 2):
        return None
    if 0 in tensor.shape[1:] or min(size) < 1 or (rank == 3 and is_channels_last(tensor)):
        return None
    return (*tensor.shape[:-rank], *size)


@shape_rule("aten::_adaptive_avg_pool2d")
def _adaptive_avg_pool2d(tensor: Any, size: Any) -> Any:
    shape = _adaptive_shape(tensor, size, 2)
    return NotImplemented if shape is None else _formatted(shape, tensor.dtype, tensor)


@shape_rule("aten::_adaptive_avg_pool3d")
def _adaptive_avg_pool3d(tensor: Any, size: Any) -> Any:
    shape = _adaptive_shape(tensor, size, 3)
    return NotImplemented if shape is None else empty(shape, tensor.dtype)


@shape_rule("aten::adaptive_max_pool2d")
def _adaptive_max_pool2d(tensor: Any, size: Any) -> Any:
    shape = _adaptive_shape(tensor, size, 2)
    if shape is None:
        return NotImplemented
    return _formatted(shape, tensor.dtype, tensor), _formatted(shape, torch.int64, tensor)


@shape_rule("aten::adaptive_max_pool3d")
def _adaptive_max_pool3d(tensor: Any, size: Any) -> Any:
    shape = _adaptive_shape(tensor, size, 3)
    return NotImplemented if shape is None else (empty(shape, tensor.dtype), empty(shape, torch.int64))
