"""Windows over images: pooling, folding and unfolding, interpolation and padding. Results are channels last where the
image is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from memsize.kernels.convolution import forward_size, per_dimension
from memsize.kernels.registry import (
    Temporary,
    copies_of,
    copy_unless_contiguous,
    overloads,
    result_first,
    shape_rule,
    temporaries_of,
)
from memsize.kernels.tensors import (
    are_alike,
    are_floating,
    are_plain,
    empty,
    formatted,
    is_channels_last,
)

_aten = torch.ops.aten


# -- pooling ----------------------------------------------------------------------------------------------------------


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Windows along one dimension. With `ceil_mode` a last, partial window counts if it starts inside the input or the
    padding before it (ATen/native/Pool.h)."""
    left = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    windows = left // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def _pooled_shape(tensor: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    """The shape of a pooled image; None for arguments that don't fit. Without a stride: the kernel's size."""
    options = [per_dimension(values, 2) for values in (kernel, stride or kernel, padding, dilation)]
    if not are_floating(tensor) or tensor.dim() not in (3, 4):
        return None
    if any(len(values) != 2 for values in options):
        return None
    sizes, steps, pads, gaps = options
    if min(*sizes, *steps, *gaps) < 1 or min(pads) < 0 or 0 in tensor.shape[1:]:
        return None
    if any(2 * pad > size for pad, size in zip(pads, sizes, strict=True)):
        return None
    pooled = [pooled_size(*d, ceil_mode) for d in zip(tensor.shape[-2:], sizes, steps, pads, gaps, strict=True)]
    return (*tensor.shape[:-2], *pooled) if min(pooled) > 0 else None


@shape_rule("aten::max_pool2d_with_indices")
def _max_pool2d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    shape = _pooled_shape(tensor, kernel, stride, padding, dilation, ceil_mode)
    if shape is None:
        return NotImplemented
    last = is_channels_last(tensor)
    return formatted(shape, tensor.dtype, last), formatted(shape, torch.int64, last)


@shape_rule("aten::avg_pool2d")
def _avg_pool2d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, _count: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    shape = _pooled_shape(tensor, kernel, stride, padding, (1,), ceil_mode)
    return NotImplemented if shape is None or divisor == 0 else formatted(shape, tensor.dtype, is_channels_last(tensor))


@shape_rule("aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward")
def _pool2d_backward(grad: Any, tensor: Any, *_: Any) -> Any:
    """The result is like the input."""
    if not are_plain(grad, tensor) or not are_alike(grad, tensor) or grad.shape[:-3] != tensor.shape[:-3]:
        return NotImplemented
    return formatted(tensor.shape, tensor.dtype, is_channels_last(tensor))


# -- folding ----------------------------------------------------------------------------------------------------------

copies_of(_aten.im2col.default, _aten.col2im.default)(copy_unless_contiguous)
result_first(_aten.im2col.default, _aten.col2im.default)


@temporaries_of(_aten.im2col.default)
def _made_like_the_image(tensor: torch.Tensor, *_: Any) -> Iterator[Temporary]:
    """The columns are made like the image and resized, which allocates them anew (cuda/Im2Col.cu)."""
    yield Temporary(tuple(tensor.shape), tensor.dtype)


@shape_rule("aten::col2im")
def _col2im(tensor: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The image is made like the columns and resized, which frees nothing (cuda/Col2Im.cu)."""
    options = (size, kernel, stride, padding, dilation)
    if not are_plain(tensor) or tensor.dim() not in (2, 3) or any(len(values) != 2 for values in options):
        return NotImplemented
    if min(*size, *kernel, *stride, *dilation) < 1 or min(padding) < 0 or 0 in tensor.shape:
        return NotImplemented
    windows = [forward_size(*sizes) for sizes in zip(*options, strict=True)]
    channels, rest = divmod(tensor.shape[-2], math.prod(kernel))
    if rest or min(windows) < 1 or tensor.shape[-1] != math.prod(windows):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype).resize_((*tensor.shape[:-2], channels, *size))


# -- interpolation and padding ----------------------------------------------------------------------------------------

copies_of(_aten.reflection_pad2d.default)(copy_unless_contiguous)  # cuda/ReflectionPad.cu
_INTERPOLATIONS = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


@shape_rule(*overloads(_INTERPOLATIONS))
def _interpolation(tensor: Any, size: Any, *_: Any, **__: Any) -> Any:
    """The result has the input's memory format (UpSample*.cpp, `suggest_memory_format`)."""
    if not are_floating(tensor) or tensor.dim() != len(size) + 2:
        return NotImplemented
    if 0 in tensor.shape or min(size) < 1:
        return NotImplemented
    return formatted((*tensor.shape[:2], *size), tensor.dtype, is_channels_last(tensor))


@shape_rule(*overloads(_INTERPOLATIONS, "_backward"))
def _interpolation_backward(grad: Any, size: Any, shape: Any, *_: Any, **__: Any) -> Any:
    """The result has the gradient's memory format."""
    if not are_plain(grad) or tuple(grad.shape) != (*shape[:2], *size):
        return NotImplemented
    return formatted(shape, grad.dtype, is_channels_last(grad))
