"""Reading and writing by index: embeddings, gather and scatter, advanced indexing with whole numbers.

An index of truth values selects as many elements as are true, which only real data tells: no rule answers for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memsize.constants.values import constant_of, is_uniform
from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape, broadcast
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, empty, like, overlaps

_WHOLE = (torch.int64, torch.int32)

# -- embeddings -------------------------------------------------------------------------------------------------------


@shape_rule("aten::embedding")
def _embedding(weight: Any, indices: Any, *_: Any, **__: Any) -> Any:
    if weight.dim() != 2 or indices.dtype not in _WHOLE:
        return NotImplemented
    _refuse_beyond(indices, weight.shape[0])
    if not are_plain(weight, indices):
        return NotImplemented
    return empty((*indices.shape, weight.shape[1]), weight.dtype)


def _refuse_beyond(indices: Tensor, rows: int) -> None:
    """A look-up beyond the table fails, as it would with data: a position after the last one, say."""
    values = constant_of(indices)
    if values is None or not values.numel():
        return
    largest = int(values.flatten()[0] if is_uniform(values) else values.max())
    if largest >= rows:
        raise IndexError(f"index {largest} is out of range: the table has {rows} rows")


@shape_rule("aten::embedding_dense_backward")
def _embedding_backward(grad: Any, indices: Any, count: int, _padding: int, _by_frequency: bool) -> Any:
    """The gradient of the whole table (cuda/Embedding.cu)."""
    if not are_plain(grad, indices) or not grad.dim() or grad.shape[:-1] != indices.shape:
        return NotImplemented
    return empty((count, grad.shape[-1]), grad.dtype)


# -- along one dimension ----------------------------------------------------------------------------------------------


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return bool(tensor.dim()) and -tensor.dim() <= dim < tensor.dim()


@shape_rule("aten::index_select")
def _index_select(tensor: Any, dim: int, index: Any) -> Any:
    if not are_plain(tensor, index) or not _has_dim(tensor, dim) or index.dim() > 1 or index.dtype not in _WHOLE:
        return NotImplemented
    shape = list(tensor.shape)
    shape[dim] = index.numel()
    return empty(shape, tensor.dtype)


@shape_rule("aten::gather")
def _gather(tensor: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """One value per index. In every other dimension the index is at most as large as the tensor."""
    if not are_plain(tensor, index) or not _fits_along(tensor, dim, index) or tensor.dim() != index.dim():
        return NotImplemented
    return empty(index.shape, tensor.dtype)


def _fits_along(tensor: Tensor, dim: int, index: Tensor) -> bool:
    if not _has_dim(tensor, dim) or index.dtype not in _WHOLE or index.dim() != tensor.dim():
        return False
    dim %= tensor.dim()
    pairs = enumerate(zip(index.shape, tensor.shape, strict=True))
    return all(position == dim or size <= whole for position, (size, whole) in pairs)


def _scatters(tensor: Any, dim: int, index: Any, source: Any) -> bool:
    if not are_plain(tensor, index) or not _fits_along(tensor, dim, index):
        return False
    if not isinstance(source, Tensor):
        return True
    if not are_plain(source) or not are_alike(tensor, source) or source.dim() != index.dim():
        return False
    return all(size <= whole for size, whole in zip(index.shape, source.shape, strict=True))


@shape_rule("aten::scatter.src", "aten::scatter.value", "aten::scatter_add")
def _scatter(tensor: Any, dim: int, index: Any, source: Any) -> Any:
    """Row-major (structured kernels, TensorAdvancedIndexing.cpp)."""
    return empty(tensor.shape, tensor.dtype) if _scatters(tensor, dim, index, source) else NotImplemented


@shape_rule("aten::scatter_.src", "aten::scatter_.value", "aten::scatter_add_")
def _scatter_in_place(tensor: Any, dim: int, index: Any, source: Any) -> Any:
    return tensor if _scatters(tensor, dim, index, source) and not overlaps(tensor) else NotImplemented


@shape_rule("aten::index_add", "aten::index_copy")
def _index_add(tensor: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    if not are_plain(tensor, index, source) or not _has_dim(tensor, dim) or index.dtype not in _WHOLE:
        return NotImplemented
    shape = list(tensor.shape)
    shape[dim] = index.numel()
    if index.dim() != 1 or not are_alike(tensor, source) or source.shape != tuple(shape):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype)


# -- advanced indexing ------------------------------------------------------------------------------------------------


def indexed_shape(shape: Shape, indices: Sequence[Shape | None]) -> tuple[int, ...] | None:
    """The shape of ``tensor[indices]``; an index of None keeps its dimension.

    Indices expand to one shape. It stands where they do if they are side by side, else in front of the kept dimensions.
    """
    places = [place for place, index in enumerate(indices) if index is not None]
    common = broadcast([index for index in indices if index is not None])
    if not places or len(indices) > len(shape) or common is None:
        return None
    kept = [size for place, size in enumerate(shape) if place not in places]
    front = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    return (*kept[:front], *common, *kept[front:])


def _shape_at(tensor: Any, indices: Any) -> tuple[int, ...] | None:
    """The shape of a tensor at whole-number indices."""
    if not are_plain(tensor, *indices) or any(index is not None and index.dtype not in _WHOLE for index in indices):
        return None
    return indexed_shape(tensor.shape, [None if index is None else index.shape for index in indices])


@shape_rule("aten::index.Tensor")
def _index(tensor: Any, indices: Any) -> Any:
    """Row-major where everything is; other layouts are sorted like an elementwise op's, which PyTorch's kernel does."""
    shape = _shape_at(tensor, indices)
    if shape is None or not all(t is None or t.is_contiguous() for t in (tensor, *indices)):
        return NotImplemented
    return empty(shape, tensor.dtype)


@shape_rule("aten::index_put", "aten::_unsafe_index_put")
def _index_put(tensor: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return like(tensor) if _puts(tensor, indices, values) else NotImplemented


def _puts(tensor: Any, indices: Any, values: Any) -> bool:
    shape = _shape_at(tensor, indices)
    if shape is None or not are_plain(values) or not are_alike(tensor, values):
        return False
    return broadcast((shape, values.shape)) == shape
