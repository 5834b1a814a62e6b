"""Copies that CUDA's kernels make of their arguments before they begin, and free at their end: known by source.

An op's own output says nothing of them, yet the caching allocator gives them their memory. Others than those of the
table may make more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memsize.meta_kernels import strides as layout
from memsize.records.layout import Format

_aten = torch.ops.aten
_Kernel = Callable[[Any, Any], Iterator[tuple[torch.Tensor, Format]]]


def kernel_copies(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, Format]]:
    """The arguments that the kernel of `func` rearranges first, and the format that they are brought into."""
    kernel = _COPYING.get(func)
    return iter(()) if kernel is None else kernel(args, kwargs)


def format_for(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last as PyTorch names it for an image (4-D) or a volume (5-D)."""
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def is_last(tensor: torch.Tensor) -> bool:
    """Whether kernels take `tensor` for channels last; slices of such tensors are, with gaps."""
    return tensor.dim() in (4, 5) and tensor.numel() > 0 and layout.is_channels_last(tensor.shape, tensor.stride())


def _convolution(args: Any, _: Any) -> Iterator[tuple[torch.Tensor, Format]]:
    """cuDNN takes one format: channels last where the input or the weight suggests it, except in float64. What lies
    otherwise is made so (Convolution.cpp, ``contiguous``).
    """
    tensor, weight = args[0], args[1]
    return _misfits((tensor, weight), suggests_last(tensor, weight))


def _convolution_backward(args: Any, _: Any) -> Iterator[tuple[torch.Tensor, Format]]:
    """As the forward, of what each gradient that is asked for reads: the input's the weight, the weight's the input
    (Convolution.cpp, `convolution_backward`; ConvShared.cpp, `cudnn_convolution_backward`).
    """
    gradient, tensor, weight, mask = args[0], args[1], args[2], args[-1]
    read = (gradient, *([tensor] if mask[1] else []), *([weight] if mask[0] else []))
    return _misfits(read, suggests_last(tensor, weight)) if any(mask[:2]) else iter(())


def suggests_last(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN works on channels last in a convolution (ConvUtils.h, `cudnn_conv_suggest_memory_format`)."""
    return tensor.dtype is not torch.float64 and (is_last(tensor) or is_last(weight))


def _misfits(operands: tuple[torch.Tensor, ...], last: bool) -> Iterator[tuple[torch.Tensor, Format]]:
    wanted: Format = "channels last" if last else "row-major"
    return ((operand, wanted) for operand in operands if not _has(operand, wanted))


def _first_row_major(args: Any, _: Any) -> Iterator[tuple[torch.Tensor, Format]]:
    """The first argument, made contiguous."""
    if isinstance(args[0], torch.Tensor) and not args[0].is_contiguous():
        yield args[0], "row-major"


_COPYING: dict[Any, _Kernel] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    # cuda/layer_norm_kernel.cu `layer_norm_cuda`: expect_contiguous
    _aten.native_layer_norm.default: _first_row_major,
    # group_norm.cpp `native_group_norm`; until PyTorch 2.13 `group_norm` itself has done so before
    _aten.native_group_norm.default: _first_row_major,
    # cuda/SoftMax.cu `host_softmax`: input_.contiguous()
    _aten._softmax.default: _first_row_major,
    _aten._log_softmax.default: _first_row_major,
    # cuda/ReflectionPad.cu: input_.contiguous()
    _aten.reflection_pad2d.default: _first_row_major,
    # cuda/TensorTransformations.cu `roll_cuda`: self.contiguous()
    _aten.roll.default: _first_row_major,
}
"""Arguments that CUDA's kernels rearrange before they begin, and the format that they are brought into."""


def _has(tensor: torch.Tensor, wanted: Format) -> bool:
    if wanted == "row-major":
        return tensor.is_contiguous()
    return tensor.dim() in (4, 5) and tensor.is_contiguous(memory_format=format_for(tensor))
