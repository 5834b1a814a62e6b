"""Convolutions of one to three spatial dimensions, plain and transposed, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, empty, formatted, is_channels_last


def forward_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Positions of a kernel along one dimension: the kernel spans ``dilation·(kernel-1) + 1``, the first position takes
    that much of the padded size, and each ``stride`` of what is left holds one more."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def transposed_size(size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
    """The size that `forward_size` maps to `size`; striding forgets a remainder, which `output_padding` gives back."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def output_shape(
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
    steps, pads, spread, extra = (values or () for values in lists)
    if min(*steps, *spread) < 1 or min(*pads, *extra) < 0 or 0 in weight or 0 in shape[1:]:
        return None
    if shape[1] != (weight[0] if transposed else weight[1] * groups) or weight[0] % groups:
        return None
    dimensions = zip(shape[2:], weight[2:], steps, pads, spread, strict=True)
    if transposed:
        if any(more >= max(step, gap) for more, step, gap in zip(extra, steps, spread, strict=True)):
            return None
        sizes = [transposed_size(*each, more) for each, more in zip(dimensions, extra, strict=True)]
    else:
        sizes = [forward_size(*each) for each in dimensions]
    return (shape[0], weight[1] * groups if transposed else weight[0], *sizes) if min(sizes) > 0 else None


def _per_dimension(values: Sequence[int], rank: int) -> Sequence[int] | None:
    if len(values) == rank:
        return values
    return tuple(values) * rank if len(values) == 1 else None


def _is_channels_last(tensor: Tensor, weight: Tensor) -> bool:
    """Whether cuDNN's result is channels last: one of the two is, and they aren't float64 (ConvUtils.h,
    `cudnn_conv_suggest_memory_format`). In one dimension the input is made row-major first."""
    if tensor.dtype is torch.float64:
        return False
    return is_channels_last(tensor) or is_channels_last(weight)


@shape_rule("aten::convolution")
def _convolution(
    tensor: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """PyTorch's `meta` kernel is always row-major; CUDA keeps channels last."""
    if not are_plain(tensor, weight, bias) or not are_alike(tensor, weight) or not tensor.is_floating_point():
        return NotImplemented
    shape = output_shape(tensor.shape, weight.shape, stride, padding, dilation, transposed, output_padding, groups)
    if shape is None or (bias is not None and (bias.shape != (shape[1],) or bias.dtype is not tensor.dtype)):
        return NotImplemented
    return formatted(shape, tensor.dtype, _is_channels_last(tensor, weight))


@shape_rule("aten::convolution_backward")
def _convolution_backward(
    grad: Any, tensor: Any, weight: Any, bias_sizes: Any, _stride: Any, _padding: Any, _dilation: Any,
    _transposed: bool, _output_padding: Any, _groups: int, mask: Any,
) -> Any:  # fmt: skip
    """Gradients in the format of the forward; one that is not asked for is None."""
    if not are_plain(grad, tensor, weight) or not are_alike(grad, tensor, weight):
        return NotImplemented
    last = _is_channels_last(tensor, weight)
    bias_shape = bias_sizes if bias_sizes is not None else grad.shape[1:2]
    return (
        formatted(tensor.shape, grad.dtype, last) if mask[0] else None,
        formatted(weight.shape, grad.dtype, last) if mask[1] else None,
        empty(bias_shape, grad.dtype) if mask[2] else None,
    )
