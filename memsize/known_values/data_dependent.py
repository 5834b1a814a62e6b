"""Ops with a data-dependent output shape: exact where their argument is a constant, an upper bound where it is data.

The bound is the worst case of a detector's thresholds and a model's masks; the assumption behind it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from memsize.known_values.assumptions import ALL_DISTINCT, ALL_SELECTED, BALANCED, even_counts, first_assumption
from memsize.known_values.values import (
    MAX_ASSUMED_ELEMENTS,
    ConstantState,
    constant_of,
    is_small,
    is_uniform,
    set_constant,
    state_of,
    true_share_of,
)
from memsize.torch_internals.sparse_tensors import in_coordinates, is_in_coordinates, places

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
Rely = Callable[[str | None], None]
"""Called with each assumption on which a result rests."""
DataDependentOp = Callable[..., Any]
"""Takes `Rely` and an op's own arguments; returns the op's result on `meta`, or NotImplemented to leave the op to
PyTorch.
"""


@cache
def data_dependent_ops() -> Mapping[str, DataDependentOp]:
    """The ops by the name of their overload: by name, since torchvision may not be installed."""
    return {
        "aten::nonzero": _nonzero,
        "aten::index.Tensor": _index,
        "aten::masked_select": _masked_select,
        "aten::_unique2": _unique,
        "aten::unique_dim": _unique_dim,
        "aten::unique_consecutive": _unique_consecutive,
        "aten::bincount": _bincount,
        "torchvision::nms": _nms,
    }


@cache
def sparse_ops() -> Mapping[str, DataDependentOp]:
    """Ops where only the number of elements of a sparse tensor depends on the data; what these leave, PyTorch decides
    by shapes alone."""
    return {
        "aten::_coalesce": _coalesce,
        "aten::norm.ScalarOpt_dim": _norm,
        "aten::_embedding_bag_backward": _embedding_bag_backward,
    }


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _count(rely: Rely, mask: torch.Tensor) -> int | None:
    """How many elements of a mask are True; None where the constant has to be looked at element by element."""
    real, share = constant_of(mask), true_share_of(mask)
    if real is None and share is None:
        rely(ALL_SELECTED)
        return mask.numel()
    rely(first_assumption([state_of(mask)]))
    if real is None or share is not None:
        return round(mask.numel() * (share or 0))
    if is_uniform(real) and real.numel():
        return real.numel() if bool(real.flatten()[0]) else 0
    return None


def _nonzero(rely: Rely, mask: torch.Tensor) -> torch.Tensor:
    """Column by column, as CUDA's kernel writes it (cuda/Nonzero.cu)."""
    count = _count(rely, mask)
    real = constant_of(mask)
    assumed = ALL_SELECTED if real is None else first_assumption([state_of(mask)])
    if count is None or (count == mask.numel() and is_small(mask)):
        places = (torch.ones(mask.shape, dtype=torch.bool) if real is None else real).nonzero()
        return set_constant(_meta(mask.dim(), len(places)).t(), places, ConstantState(assumed))
    return _meta(mask.dim(), count).t()


def _index(rely: Rely, tensor: torch.Tensor, indices: Any) -> Any:
    """A mask selects like the indices of its True elements."""
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return NotImplemented
    places: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        places += [_meta(len(column)) for column in _nonzero(rely, index).unbind(1)] if is_mask else [index]
    return _aten.index.Tensor(tensor, places)


def _masked_select(rely: Rely, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    count = _count(rely, mask)
    repeats = math.prod(shape) // max(mask.numel(), 1)
    if count is None:
        real = constant_of(mask)
        assert real is not None  # else `_count` is not None
        count = int(real.count_nonzero())
    return _meta(count * repeats, dtype=tensor.dtype)


def _is_data(rely: Rely, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is data; its values are then assumed to be all different."""
    if constant_of(tensor) is not None:
        return False
    rely(ALL_SELECTED)
    return True


def _unique(rely: Rely, tensor: torch.Tensor, _sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    if not _is_data(rely, tensor):
        return NotImplemented
    size = tensor.numel()
    places = torch.empty(tensor.shape if inverse else (0,), dtype=torch.int64, device="meta")
    return _meta(size, dtype=tensor.dtype), places, _meta(size if counts else 0)


def _unique_dim(
    rely: Rely, tensor: torch.Tensor, dim: int, _sorted: bool = True, inverse: bool = False, counts: bool = False
) -> Any:
    if not _is_data(rely, tensor):
        return NotImplemented
    size = tensor.shape[dim]
    return torch.empty_like(tensor), _meta(size if inverse else 0), _meta(size if counts else 0)


def _unique_consecutive(
    rely: Rely, tensor: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> Any:
    if dim is None:
        return _unique(rely, tensor, True, inverse, counts)
    return _unique_dim(rely, tensor, dim, True, inverse, counts)


def _bincount(rely: Rely, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Of data, each number below `minlength` is assumed to occur equally often."""
    if constant_of(tensor) is not None or not minlength:
        return NotImplemented
    counts = _meta(minlength, dtype=torch.int64 if weights is None else torch.float64)
    if weights is None and minlength <= MAX_ASSUMED_ELEMENTS:
        set_constant(counts, even_counts(tensor.numel(), minlength), ConstantState(BALANCED))
    rely(BALANCED)
    return counts


def _coalesce(rely: Rely, tensor: torch.Tensor) -> torch.Tensor:
    """Elements with equal indices are added up. CUDA sorts a copy of the indices and then shortens it, and makes the
    values when it knows how many there are (sparse/cuda/SparseCUDATensor.cu)."""
    elements = tensor._nnz()
    count = min(elements, places(tensor))
    if elements > 1:
        rely(ALL_DISTINCT)
    dims, values = tensor.sparse_dim(), tensor._values()
    indices = _meta(1, elements)[:, :count] if dims == 1 else _meta(dims, count)
    return in_coordinates(indices, _meta(count, *values.shape[1:], dtype=values.dtype), tensor.shape, is_coalesced=True)


def _norm(rely: Rely, tensor: torch.Tensor, _order: Any, dims: Any, keepdim: bool = False) -> Any:
    """That of all values, after equal indices are added up (sparse/SparseTensorMath.cpp, `norm_sparse`)."""
    whole = not dims or sorted(dim % tensor.dim() for dim in dims) == list(range(tensor.dim()))
    if not is_in_coordinates(tensor) or keepdim or not whole:
        return NotImplemented
    if not tensor.is_coalesced() and tensor._nnz() > 1:
        rely(ALL_DISTINCT)
    return _meta(dtype=tensor.dtype)


def _embedding_bag_backward(
    rely: Rely, grad: torch.Tensor, indices: torch.Tensor, _offsets: Any, _places: Any, _sizes: Any, _largest: Any,
    rows: int, by_frequency: bool, _mode: int, sparse: bool, _weights: Any, padding: int = -1,
) -> Any:  # fmt: skip
    """A sparse gradient leaves the padding out (aten/src/ATen/native/Embedding.cpp, `embedding_sparse_backward`)."""
    if not sparse or by_frequency or padding == -1:
        return NotImplemented
    real = constant_of(indices)
    rely(ALL_SELECTED if real is None else first_assumption([state_of(indices)]))
    count = indices.numel() if real is None else int((real != padding).count_nonzero())
    width = grad.shape[1]
    return in_coordinates(_meta(1, count), _meta(count, width, dtype=grad.dtype), torch.Size((rows, width)))


def _nms(rely: Rely, boxes: torch.Tensor, scores: torch.Tensor, _threshold: float) -> Any:
    """Non-maximum suppression (torchvision) of boxes that do not overlap: none is suppressed. Boxes that are known need
    torchvision's compiled part, which does not fit every PyTorch.
    """
    is_constant = constant_of(boxes) is not None and constant_of(scores) is not None
    if is_constant and torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU"):
        return NotImplemented
    rely(ALL_SELECTED)
    boxes_kept = _meta(len(boxes))
    return (
        set_constant(boxes_kept, torch.arange(len(boxes)), ConstantState(ALL_SELECTED))
        if is_small(boxes_kept)
        else boxes_kept
    )
