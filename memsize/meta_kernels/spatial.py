"""Windows over signals, images and volumes: convolutions, pooling, interpolation, and their gradients.

Kernels that work on images keep their memory format: channels last in, channels last out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memsize.meta_kernels.registry import overloads, shape_rule
from memsize.meta_kernels.strides import Shape
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, empty, formatted, is_channels_last

_INTERPOLATIONS = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


def _per_dimension(values: Sequence[int], rank: int) -> Sequence[int] | None:
    """One value for each of `rank` dimensions; a single value holds for all."""
    if len(values) == rank:
        return values
    return tuple(values) * rank if len(values) == 1 else None


# -- convolution ------------------------------------------------------------------------------------------------------


def forward_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Positions of a kernel along one dimension: the kernel spans ``dilation·(kernel-1) + 1``, the first position takes
    that much of the padded size, and each ``stride`` of what is left holds one more."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def transposed_size(size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
    """The size that `forward_size` maps to `size`; striding forgets a remainder, which `output_padding` gives back."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def convolved_shape(
    shape: Shape,
    weight: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[int, ...] | None:
    """The output's shape, None for arguments that don't fit together.

    A weight is (output channels, input channels / groups, *kernel), a transposed one (input channels, output channels /
    groups, *kernel).
    """
    rank = len(shape) - 2
    lists = [_per_dimension(values, rank) for values in (stride, padding, dilation, output_padding)]
    if rank not in (1, 2, 3) or len(weight) != rank + 2 or None in lists or groups < 1:
        return None
    steps, pads, dilations, extra = (values or () for values in lists)
    if min(*steps, *dilations) < 1 or min(*pads, *extra) < 0 or 0 in weight or 0 in shape[1:]:
        return None
    if shape[1] != (weight[0] if transposed else weight[1] * groups) or weight[0] % groups:
        return None
    dimensions = zip(shape[2:], weight[2:], steps, pads, dilations, strict=True)
    if transposed:
        if any(more >= max(step, gap) for more, step, gap in zip(extra, steps, dilations, strict=True)):
            return None
        sizes = [transposed_size(*each, more) for each, more in zip(dimensions, extra, strict=True)]
    else:
        sizes = [forward_size(*each) for each in dimensions]
    return (shape[0], weight[1] * groups if transposed else weight[0], *sizes) if min(sizes) > 0 else None


def _convolves_channels_last(tensor: Tensor, weight: Tensor) -> bool:
    """Whether cuDNN's result is channels last: one of the two is, and they aren't float64 (ConvUtils.h,
    `cudnn_conv_suggest_memory_format`). In one dimension the input is made row-major first."""
    return tensor.dtype is not torch.float64 and (is_channels_last(tensor) or is_channels_last(weight))


@shape_rule("aten::convolution")
def _convolution(
    tensor: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """PyTorch's `meta` kernel is always row-major; CUDA keeps channels last."""
    if not are_plain(tensor, weight, bias) or not are_alike(tensor, weight) or not tensor.is_floating_point():
        return NotImplemented
    shape = convolved_shape(tensor.shape, weight.shape, stride, padding, dilation, transposed, output_padding, groups)
    if shape is None or (bias is not None and (bias.shape != (shape[1],) or bias.dtype is not tensor.dtype)):
        return NotImplemented
    return formatted(shape, tensor.dtype, _convolves_channels_last(tensor, weight))


@shape_rule("aten::convolution_backward")
def _convolution_backward(
    grad: Any, tensor: Any, weight: Any, bias_sizes: Any, _stride: Any, _padding: Any, _dilation: Any,
    _transposed: bool, _output_padding: Any, _groups: int, mask: Any,
) -> Any:  # fmt: skip
    """Gradients in the format of the forward; one that is not asked for is None."""
    if not are_plain(grad, tensor, weight) or not are_alike(grad, tensor, weight):
        return NotImplemented
    last = _convolves_channels_last(tensor, weight)
    bias_shape = bias_sizes if bias_sizes is not None else grad.shape[1:2]
    return (
        formatted(tensor.shape, grad.dtype, last) if mask[0] else None,
        formatted(weight.shape, grad.dtype, last) if mask[1] else None,
        empty(bias_shape, grad.dtype) if mask[2] else None,
    )


# -- pooling ----------------------------------------------------------------------------------------------------------


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Windows along one dimension. With `ceil_mode` a last, partial window counts if it starts inside the input or the
    padding before it (ATen/native/Pool.h)."""
    left = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    windows = left // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def _pooled_shape(tensor: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    """The shape of a pooled image, its batch and channels kept; None for arguments that don't fit. No stride: the
    kernel's size."""
    options = [_per_dimension(values, 2) for values in (kernel, stride or kernel, padding, dilation)]
    if not are_plain(tensor) or not tensor.is_floating_point() or tensor.dim() not in (3, 4) or None in options:
        return None
    sizes, steps, pads, gaps = (values or () for values in options)
    if min(*sizes, *steps, *gaps) < 1 or min(pads) < 0 or 0 in tensor.shape[1:]:
        return None
    if any(2 * pad > size for pad, size in zip(pads, sizes, strict=True)):
        return None
    pooled = [pooled_size(*each, ceil_mode) for each in zip(tensor.shape[-2:], sizes, steps, pads, gaps, strict=True)]
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
    """Like the input."""
    if not are_plain(grad, tensor) or not are_alike(grad, tensor) or grad.shape[:-3] != tensor.shape[:-3]:
        return NotImplemented
    return formatted(tensor.shape, tensor.dtype, is_channels_last(tensor))


# -- interpolation ----------------------------------------------------------------------------------------------------


@shape_rule(*overloads(_INTERPOLATIONS))
def _interpolation(tensor: Any, size: Any, *_: Any, **__: Any) -> Any:
    """In the input's memory format (UpSample*.cpp, `suggest_memory_format`)."""
    if not are_plain(tensor) or not tensor.is_floating_point() or tensor.dim() != len(size) + 2:
        return NotImplemented
    if 0 in tensor.shape or min(size) < 1:
        return NotImplemented
    return formatted((*tensor.shape[:2], *size), tensor.dtype, is_channels_last(tensor))


@shape_rule(*overloads(_INTERPOLATIONS, "_backward"))
def _interpolation_backward(grad: Any, size: Any, shape: Any, *_: Any, **__: Any) -> Any:
    """In the gradient's memory format."""
    if not are_plain(grad) or tuple(grad.shape) != (*shape[:2], *size):
        return NotImplemented
    return formatted(shape, grad.dtype, is_channels_last(grad))
