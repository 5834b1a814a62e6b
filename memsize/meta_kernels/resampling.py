"""Images made larger, smaller, shuffled, sampled on a grid, or cut into patches; and the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memsize.meta_kernels.convolution import forward_size
from memsize.meta_kernels.registry import Rule, overloads, shape_rule
from memsize.meta_kernels.strides import Shape
from memsize.meta_kernels.tensors import are_alike, are_plain, empty, formatted, is_channels_last

_INTERPOLATIONS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}


def _interpolation_rule(rank: int) -> Rule:
    def rule(tensor: Any, size: Any, *_: Any, **__: Any) -> Any:
        """In the input's memory format (UpSample*.cpp, `suggest_memory_format`)."""
        if not are_plain(tensor) or not tensor.is_floating_point() or tensor.dim() != rank + 2 or len(size) != rank:
            return NotImplemented
        if 0 in tensor.shape or min(size) < 1:
            return NotImplemented
        return formatted((*tensor.shape[:2], *size), tensor.dtype, is_channels_last(tensor))

    return rule


def _interpolation_backward_rule(rank: int) -> Rule:
    def rule(grad: Any, size: Any, shape: Any, *_: Any, **__: Any) -> Any:
        """In the gradient's memory format."""
        if not are_plain(grad) or grad.dim() != rank + 2 or tuple(grad.shape) != (*shape[:2], *size):
            return NotImplemented
        return formatted(shape, grad.dtype, is_channels_last(grad))

    return rule


@shape_rule("aten::grid_sampler_2d")
def _grid_sample(tensor: Any, grid: Any, *_: Any) -> Any:
    """Like a contiguous input (cuda/GridSampler.cpp: `at::empty`)."""
    if not are_plain(tensor, grid) or not are_alike(tensor, grid) or tensor.dim() != 4 or grid.dim() != 4:
        return NotImplemented
    if tensor.shape[0] != grid.shape[0] or grid.shape[3] != 2 or 0 in tensor.shape:
        return NotImplemented
    return empty((*tensor.shape[:2], *grid.shape[1:3]), tensor.dtype)


@shape_rule("aten::grid_sampler_2d_backward")
def _grid_sample_backward(grad: Any, tensor: Any, grid: Any, _mode: int, _padding: int, _align: bool, mask: Any) -> Any:
    """Row-major gradients; the input's is left out where nobody wants it."""
    if not are_plain(grad, tensor, grid) or not tensor.is_contiguous() or not grid.is_contiguous():
        return NotImplemented
    return empty(tensor.shape, tensor.dtype) if mask[0] else None, empty(grid.shape, grid.dtype)


@shape_rule("aten::pixel_shuffle")
def _pixel_shuffle(tensor: Any, factor: int) -> Any:
    """Channels become pixels: ``(C·r², H, W) -> (C, H·r, W·r)``."""
    if not are_plain(tensor) or tensor.dim() < 3 or factor < 1 or tensor.shape[-3] % factor**2:
        return NotImplemented
    *batch, channels, height, width = tensor.shape
    return _shuffled(tensor, (*batch, channels // factor**2, height * factor, width * factor))


@shape_rule("aten::pixel_unshuffle")
def _pixel_unshuffle(tensor: Any, factor: int) -> Any:
    """Pixels become channels: ``(C, H·r, W·r) -> (C·r², H, W)``."""
    if not are_plain(tensor) or tensor.dim() < 3 or factor < 1:
        return NotImplemented
    *batch, channels, height, width = tensor.shape
    if height % factor or width % factor:
        return NotImplemented
    return _shuffled(tensor, (*batch, channels * factor**2, height // factor, width // factor))


def _shuffled(tensor: Any, shape: Shape) -> Any:
    """Row-major on CUDA, where the op is reshape, permute and reshape (PixelShuffle.cpp)."""
    return NotImplemented if is_channels_last(tensor) else empty(shape, tensor.dtype)


# -- patches ----------------------------------------------------------------------------------------------------------


def patches(shape: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> int:
    """Places where a kernel fits on an image (height, width): as many as a convolution has outputs."""
    rows, columns = (forward_size(*each) for each in zip(shape, kernel, stride, padding, dilation, strict=True))
    return rows * columns if rows > 0 and columns > 0 else 0


@shape_rule("aten::im2col")
def _im2col(tensor: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    if not are_plain(tensor) or tensor.dim() != 4 or 0 in tensor.shape:
        return NotImplemented
    count = _count(tensor.shape[2:], kernel, dilation, padding, stride)
    if not count:
        return NotImplemented
    return empty((tensor.shape[0], tensor.shape[1] * kernel[0] * kernel[1], count), tensor.dtype)


@shape_rule("aten::col2im")
def _col2im(tensor: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    if not are_plain(tensor) or tensor.dim() != 3 or 0 in tensor.shape or len(size) != 2:
        return NotImplemented
    count = _count(size, kernel, dilation, padding, stride)
    if count != tensor.shape[2] or tensor.shape[1] % (kernel[0] * kernel[1]):
        return NotImplemented
    return empty((tensor.shape[0], tensor.shape[1] // (kernel[0] * kernel[1]), *size), tensor.dtype)


def _count(shape: Shape, kernel: Any, dilation: Any, padding: Any, stride: Any) -> int:
    lists = (kernel, dilation, padding, stride)
    if any(len(values) != 2 for values in lists) or min(*kernel, *dilation, *stride) < 1 or min(padding) < 0:
        return 0
    return patches(shape, *lists)


for _rank, _names in _INTERPOLATIONS.items():
    shape_rule(*overloads(_names))(_interpolation_rule(_rank))
    shape_rule(*overloads(_names, "_backward"))(_interpolation_backward_rule(_rank))
