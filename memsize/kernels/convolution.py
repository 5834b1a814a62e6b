"""Convolutions of signals, images and volumes: results, and the copies that they make first.

The output and the gradients are channels last where the input or the weight is.

Source: aten/src/ATen/native/Convolution.cpp (`_select_conv_backend`, `convolution_backward`), cudnn/ConvShared.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memsize.kernels.registry import (
    Copies,
    copies_of,
    same_dtype,
    shape_rule,
)
from memsize.kernels.strides import Shape
from memsize.kernels.tensors import (
    are_alike,
    are_plain,
    empty,
    formatted,
    is_channels_last,
    is_dense_channels_last,
)

if TYPE_CHECKING:
    from memsize.records.layout import Format

_aten = torch.ops.aten
FORWARD = _aten.convolution.default
BACKWARD = _aten.convolution_backward.default
TRACED = _aten._convolution.default
"""As `torch.jit.trace` records it: the same, with settings of cuDNN."""
TRACED_AS = 9
"""How many of its arguments are those of `FORWARD`."""

same_dtype(slice(0, 3), FORWARD)  # Convolution.cpp, at the head of `convolution`


# -- results ----------------------------------------------------------------------------------------------------------


def per_dimension(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """Repeat a single value for each of `rank` dimensions; return several values as they are."""
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def forward_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the positions of a kernel along one dimension. The kernel spans ``dilation·(kernel-1) + 1`` of the padded
    size; each ``stride`` of the rest holds one more position."""
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
    options = [per_dimension(values, rank) for values in (stride, padding, dilation, output_padding)]
    if rank not in (1, 2, 3) or len(weight) != rank + 2 or any(len(o) != rank for o in options) or groups < 1:
        return None
    steps, pads, dilations, extra = options
    if min(*steps, *dilations) < 1 or min(*pads, *extra) < 0 or 0 in weight or 0 in shape[1:]:
        return None
    if shape[1] != (weight[0] if transposed else weight[1] * groups) or weight[0] % groups:
        return None
    dimensions = zip(shape[2:], weight[2:], steps, pads, dilations, strict=True)
    if transposed:
        if any(more >= max(step, gap) for more, step, gap in zip(extra, steps, dilations, strict=True)):
            return None
        sizes = [transposed_size(*dimension, more) for dimension, more in zip(dimensions, extra, strict=True)]
    else:
        sizes = [forward_size(*dimension) for dimension in dimensions]
    return (shape[0], weight[1] * groups if transposed else weight[0], *sizes) if min(sizes) > 0 else None


def suggests_last(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN works on channels last in a convolution (ConvUtils.h, `cudnn_conv_suggest_memory_format`). In one
    dimension the input is made row-major first."""
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
    return formatted(shape, tensor.dtype, suggests_last(tensor, weight))


@shape_rule("aten::convolution_backward")
def _convolution_backward(
    grad: Any, tensor: Any, weight: Any, bias_sizes: Any, _stride: Any, _padding: Any, _dilation: Any,
    _transposed: bool, _output_padding: Any, _groups: int, mask: Any,
) -> Any:  # fmt: skip
    """Gradients in the format of the forward; one that is not asked for is None."""
    if not are_plain(grad, tensor, weight) or not are_alike(grad, tensor, weight):
        return NotImplemented
    last = suggests_last(tensor, weight)
    bias_shape = bias_sizes if bias_sizes is not None else grad.shape[1:2]
    return (
        formatted(tensor.shape, grad.dtype, last) if mask[0] else None,
        formatted(weight.shape, grad.dtype, last) if mask[1] else None,
        empty(bias_shape, grad.dtype) if mask[2] else None,
    )


# -- copies -----------------------------------------------------------------------------------------------------------


@copies_of(FORWARD)
def _forward_copies(args: Any, _: Any) -> Copies:
    """cuDNN takes one format: channels last where the input or the weight suggests it, except in float64. What lies
    otherwise is made so (Convolution.cpp, ``contiguous``).
    """
    tensor, weight = args[0], args[1]
    return _misfits((tensor, weight), suggests_last(tensor, weight))


@copies_of(BACKWARD)
def _backward_copies(args: Any, _: Any) -> Copies:
    """Copies as in the forward, of what each requested gradient reads: the input's the weight, the weight's the input
    (Convolution.cpp, `convolution_backward`; ConvShared.cpp, `cudnn_convolution_backward`).
    """
    gradient, tensor, weight, mask = args[0], args[1], args[2], args[-1]
    read = (gradient, *([tensor] if mask[1] else []), *([weight] if mask[0] else []))
    return _misfits(read, suggests_last(tensor, weight)) if any(mask[:2]) else iter(())


def _misfits(operands: tuple[torch.Tensor, ...], last: bool) -> Copies:
    wanted: Format = "channels last" if last else "row-major"
    lies_so = is_dense_channels_last if last else torch.Tensor.is_contiguous
    return ((operand, wanted) for operand in operands if not lies_so(operand))
