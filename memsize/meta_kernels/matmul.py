"""Matrix products. Every output is new and row-major, whatever the operands' strides (ATen LinearAlgebra.cpp)."""

from __future__ import annotations

from typing import Any

import torch

from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape, broadcast
from memsize.meta_kernels.tensors import are_alike, are_plain, empty, like, strided
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.sparse_tensors import PARTS, with_parts


def product(one: Shape, other: Shape) -> tuple[int, ...] | None:
    """``(n, k) @ (k, m) -> (n, m)``, also in batches of one size; None for operands that don't fit."""
    rank = len(one)
    if rank != len(other) or rank not in (2, 3) or one[-1] != other[-2] or one[:-2] != other[:-2]:
        return None
    return (*one[:-1], other[-1])


def _multiplied(one: Any, other: Any, rank: int) -> Any:
    known = are_plain(other) and (are_plain(one) or _is_sparse(one))
    if not known or not are_alike(one, other) or one.dtype is torch.bool:
        return NotImplemented
    shape = product(one.shape, other.shape) if one.dim() == rank else None
    return NotImplemented if shape is None else empty(shape, one.dtype)


def _is_sparse(tensor: Any) -> bool:
    """Whether its product with a dense matrix is dense (sparse/cuda/SparseCUDATensorMath.cu, SparseBlas.cpp)."""
    return tensor.layout in PARTS and is_meta(tensor)


def _added(start: Any, one: Any, other: Any, rank: int) -> Any:
    """`start` must expand to the product's shape, which it never widens."""
    result = _multiplied(one, other, rank)
    if result is NotImplemented or not are_plain(start) or start.dtype is not one.dtype:
        return NotImplemented
    shape = result.shape
    return result if start.shape == shape or broadcast((shape, start.shape)) == tuple(shape) else NotImplemented


@shape_rule("aten::mm")
def _mm(one: Any, other: Any) -> Any:
    return _multiplied(one, other, 2)


@shape_rule("aten::bmm")
def _bmm(one: Any, other: Any) -> Any:
    return _multiplied(one, other, 3)


@shape_rule("aten::addmm", "aten::_addmm_activation", "aten::_sparse_addmm")
def _addmm(start: Any, one: Any, other: Any, **_: Any) -> Any:
    return _added(start, one, other, 2)


@shape_rule("aten::baddbmm")
def _baddbmm(start: Any, one: Any, other: Any, **_: Any) -> Any:
    return _added(start, one, other, 3)


@shape_rule("aten::t")
def _transposed(tensor: Any) -> Any:
    """In coordinates, a copy and no view (ATen TensorShape.cpp); PyTorch's `meta` kernel forgets the elements."""
    if tensor.layout is not torch.sparse_coo or not _is_sparse(tensor) or tensor.dim() != 2:
        return NotImplemented
    return with_parts(tensor, like, tensor.shape[::-1])


_GROUPED = (torch.float32, torch.float16, torch.bfloat16)
_ROW_BYTES = 16
"""Every row of a grouped product begins at a multiple of this many bytes, for the GPU's tensor memory accelerator."""


@shape_rule("aten::_grouped_mm")
def _grouped_mm(one: Any, other: Any, offsets: Any = None, bias: Any = None, dtype: torch.dtype | None = None) -> Any:
    """A product for each expert (cuda/GroupedBlas.cpp, GroupedMMUtils.h); PyTorch's `meta` kernel is for bfloat16."""
    if not are_plain(one, other, offsets, bias) or not are_alike(one, other) or one.dtype not in _GROUPED:
        return NotImplemented
    shape = grouped_product(one.shape, other.shape, None if offsets is None else offsets.shape[0])
    if shape is None:
        return NotImplemented
    dtype = dtype or one.dtype
    alignment = _ROW_BYTES // dtype.itemsize
    row = -(-shape[-1] // alignment) * alignment
    return strided(shape, (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1), dtype)


def grouped_product(one: Shape, other: Shape, groups: int | None) -> tuple[int, ...] | None:
    """The shape of a grouped product. Where an operand has no dimension for the groups, its rows, columns or the inner
    dimension are cut into `groups`; None for operands that don't fit."""
    ranks = len(one), len(other)
    if ranks == (2, 2):
        return None if groups is None or one[1] != other[0] else (groups, one[0], other[1])
    if not set(ranks) <= {2, 3} or one[-1] != other[-2]:
        return None
    if ranks == (3, 3):
        return (one[0], one[1], other[2]) if one[0] == other[0] and groups is None else None
    return None if groups is None else (one[-2], other[-1])
