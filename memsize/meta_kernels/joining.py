"""Tensors put together and padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape, like
from memsize.meta_kernels.tensors import are_alike, are_plain, empty, formatted, is_channels_last, strided


def joined_shape(shapes: Sequence[Shape], dim: int) -> tuple[int, ...] | None:
    """The shape of tensors joined along `dim`, None where another size differs."""
    first = shapes[0]
    rank = len(first)
    if not rank or not -rank <= dim < rank or any(len(shape) != rank for shape in shapes):
        return None
    dim %= rank
    before, after = tuple(first[:dim]), tuple(first[dim + 1 :])
    if any(tuple(shape[:dim]) != before or tuple(shape[dim + 1 :]) != after for shape in shapes):
        return None
    return (*before, sum(shape[dim] for shape in shapes), *after)


@shape_rule("aten::cat")
def _cat(tensors: Any, dim: int = 0) -> Any:
    """In the memory format that all tensors share, else row-major (TensorShape.cpp). An empty one-dimensional tensor
    goes with everything. Mixed dtypes promote, which PyTorch's kernel does."""
    if not tensors or not are_plain(*tensors) or not are_alike(*tensors):
        return NotImplemented
    shapes = [t.shape for t in tensors if t.shape != (0,)]
    shape = joined_shape(shapes, dim) if shapes else None
    if shape is None:
        return NotImplemented
    last = len(shape) in (4, 5) and all(map(is_channels_last, tensors))
    return formatted(shape, tensors[0].dtype, last)


@shape_rule("aten::stack")
def _stack(tensors: Any, dim: int = 0) -> Any:
    if not tensors or not are_plain(*tensors) or not are_alike(*tensors):
        return NotImplemented
    shape = tensors[0].shape
    rank = len(shape) + 1
    if not -rank <= dim < rank or any(t.shape != shape for t in tensors):
        return NotImplemented
    dim %= rank
    return empty((*shape[:dim], len(tensors), *shape[dim:]), tensors[0].dtype)


def padded_shape(shape: Shape, pad: Sequence[int]) -> tuple[int, ...] | None:
    """`pad` lists (before, after) from the last dimension backwards; negative ones cut."""
    if len(pad) % 2 or len(pad) > 2 * len(shape):
        return None
    sizes = list(shape)
    for position in range(len(pad) // 2):
        sizes[-1 - position] += pad[2 * position] + pad[2 * position + 1]
    return tuple(sizes) if min(sizes, default=0) >= 0 else None


@shape_rule("aten::constant_pad_nd")
def _constant_pad(tensor: Any, pad: Any, _value: Any = 0) -> Any:
    """In the input's memory format; where nothing is added, a clone of what is left after cutting (PadNd.cpp)."""
    shape = padded_shape(tensor.shape, pad) if are_plain(tensor) else None
    if shape is None or 0 in shape:
        return NotImplemented
    if max(pad, default=0) <= 0:
        return strided(shape, like(shape, tensor.stride()), tensor.dtype)
    return formatted(shape, tensor.dtype, is_channels_last(tensor))


@shape_rule("aten::reflection_pad1d", "aten::replication_pad1d")
def _edge_pad1d(tensor: Any, pad: Any) -> Any:
    return _edge_pad(tensor, pad, 1)


@shape_rule("aten::reflection_pad2d", "aten::replication_pad2d")
def _edge_pad2d(tensor: Any, pad: Any) -> Any:
    return _edge_pad(tensor, pad, 2)


def _edge_pad(tensor: Any, pad: Any, rank: int) -> Any:
    """Row-major. A pad that reaches beyond the input, or cuts, is left to PyTorch's kernel."""
    if not are_plain(tensor) or len(pad) != 2 * rank or tensor.dim() not in (rank + 1, rank + 2):
        return NotImplemented
    if 0 in tensor.shape or is_channels_last(tensor) or min(pad) < 0 or max(pad) >= min(tensor.shape[-rank:]):
        return NotImplemented
    shape = padded_shape(tensor.shape, pad)
    return NotImplemented if shape is None else empty(shape, tensor.dtype)


@shape_rule(
    "aten::reflection_pad1d_backward", "aten::replication_pad1d_backward", "aten::reflection_pad2d_backward",
    "aten::replication_pad2d_backward",
)  # fmt: skip
def _edge_pad_backward(grad: Any, tensor: Any, pad: Any) -> Any:
    if not are_plain(grad, tensor) or is_channels_last(tensor) or grad.shape != padded_shape(tensor.shape, pad):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype)
