"""Matrix products: results, ops that cuBLAS computes, operands that it cannot read as they lie, calls of cuBLASLt.

Every output is new and row-major, whatever the operands' strides (ATen LinearAlgebra.cpp). cuBLAS takes a matrix with
dense rows or dense columns. Any other is copied row by row first, in full where it was expanded: the gradient of
``logits.sum()`` behind a linear layer, for one. Operands must have one dtype.

Source: aten/src/ATen/native/cuda/cuBlasCommonArgs.h (`prepare_matrix_for_cublas`) and Blas.cpp
(`prepare_batch_matrix_for_cublas`, `baddbmm_out_cuda_impl`, `addmv_out_cuda`, `isInputCompliesAddmmCudaLt`), the same
in what matters here from PyTorch 2.1 to 2.14; the checks raise in the words of `registry.refuse_mixed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from memsize.kernels.registry import Copies, Temporary, copies_of, result_first, same_dtype, shape_rule, temporaries_of
from memsize.kernels.semantics import current
from memsize.kernels.strides import Shape, broadcast, is_dense
from memsize.kernels.tensors import are_alike, are_plain, empty, like, strided
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.sparse_tensors import PARTS, stored_elements, with_parts

_aten = torch.ops.aten


def product(one: Shape, other: Shape) -> tuple[int, ...] | None:
    """``(n, k) @ (k, m) -> (n, m)``, also in batches of one size; None for operands that don't fit."""
    rank = len(one)
    if rank != len(other) or rank not in (2, 3) or one[-1] != other[-2] or one[:-2] != other[:-2]:
        return None
    return (*one[:-1], other[-1])


def _multiplied(rank: int, one: Any, other: Any) -> Any:
    is_readable = are_plain(other) and (are_plain(one) or _is_sparse(one))
    if not is_readable or not are_alike(one, other) or one.dtype is torch.bool:
        return NotImplemented
    shape = product(one.shape, other.shape) if one.dim() == rank else None
    return NotImplemented if shape is None else empty(shape, one.dtype)


def _is_sparse(tensor: Any) -> bool:
    """Whether its product with a dense matrix is dense (sparse/cuda/SparseCUDATensorMath.cu, SparseBlas.cpp)."""
    return tensor.layout in PARTS and is_meta(tensor)


def _added(rank: int, start: Any, one: Any, other: Any, **_: Any) -> Any:
    """`start` must expand to the product's shape, which it never widens."""
    result = _multiplied(rank, one, other)
    if result is NotImplemented or not are_plain(start) or start.dtype is not one.dtype:
        return NotImplemented
    shape = result.shape
    return result if start.shape == shape or broadcast((shape, start.shape)) == tuple(shape) else NotImplemented


shape_rule("aten::mm")(partial(_multiplied, 2))
shape_rule("aten::bmm")(partial(_multiplied, 3))
shape_rule("aten::addmm", "aten::_addmm_activation", "aten::_sparse_addmm")(partial(_added, 2))
shape_rule("aten::baddbmm")(partial(_added, 3))


@shape_rule("aten::addmm.dtype_out")
def _added_into(start: Any, one: Any, other: Any, dtype: torch.dtype, *, out: Any, **_: Any) -> Any:
    """A product of 16-bit matrices into a float32 sum. PyTorch 2.11 takes the dtype for `beta` on the meta device."""
    return out if out.dtype is dtype and out.shape == (one.shape[0], other.shape[1]) else NotImplemented


@shape_rule("aten::t")
def _transposed(tensor: Any) -> Any:
    """Copy a tensor in coordinates: it has no views (ATen TensorShape.cpp); the `meta` kernel forgets the elements."""
    if tensor.layout is not torch.sparse_coo or not _is_sparse(tensor) or tensor.dim() != 2:
        return NotImplemented
    return with_parts(tensor, like, tensor.shape[::-1])


_GROUPED = (torch.float32, torch.float16, torch.bfloat16)
_ROW_BYTES = 16
"""Every row of a grouped product begins at a multiple of this many bytes, for the GPU's tensor memory accelerator."""


@shape_rule("aten::_weight_int4pack_mm")
def _tiled_int4_product(x: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor:
    """The weight has tiles of eight rows (`aten/src/ATen/native/cuda/int4mm.cu`). PyTorch's `meta` kernel reads a fake
    tensor's device.
    """
    return empty((x.shape[0], 8 * weight.shape[0]), x.dtype)


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


# -- what cuBLAS and cuSPARSE take ------------------------------------------------------------------------------------


def _overloads(*names: str) -> tuple[Any, ...]:
    """Every overload of these operators: in place, with ``out=`` and with a dtype of their own."""
    packets = [getattr(_aten, name) for name in names]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_PRODUCTS = _overloads("mm", "bmm")
_ADDED = _overloads("addmm", "_addmm_activation", "baddbmm")
_ADDED_IN_PLACE = _overloads("addmm_", "baddbmm_")
_SUMMED = _overloads("addbmm", "addbmm_")
_VECTORS = _overloads("mv", "addmv", "addmv_")
CUBLASLT = frozenset(_overloads("addmm", "_addmm_activation", "_scaled_mm", "_scaled_mm_v2"))
"""Ops that cuBLASLt may compute."""
_BY_ROWS: Final = 1
"""`ScalingType.RowWise` (ATen/BlasBackend.h)."""
_HOPPER: Final = 9
_CUDA_13_SINCE: Final = (2, 11)

CUBLAS = frozenset((*_PRODUCTS, *_ADDED, *_ADDED_IN_PLACE, *_SUMMED, *_VECTORS, *_overloads("dot", "vdot")))
"""Ops that cuBLAS computes: a thread's first one makes a handle with a workspace."""

same_dtype(slice(0, 2), _aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default)
same_dtype(slice(0, 3), _aten.addmm.default, _aten.addmv.default, _aten.baddbmm.default)
result_first(*_PRODUCTS, *_ADDED, *_VECTORS)


def takes_cublas(args: Any) -> bool:
    """Whether an op of `CUBLAS` has no sparse operand: cuSPARSE, which has no such workspace, would compute it."""
    return all(operand.layout is torch.strided for operand in args if isinstance(operand, Tensor))


@temporaries_of(_aten.mm.default, _aten.addmm.default, _aten._sparse_addmm.default)
def _in_coordinates(*args: Any, **_: Any) -> Iterator[Temporary]:
    """cuSPARSE wants row pointers and columns of 32 bits, and writes a column-major result, which is then copied
    (sparse/cuda/SparseCUDATensorMath.cu). Its own workspace is not known.
    """
    matrix, dense = args[-2:]
    if matrix.layout is torch.sparse_coo:
        yield Temporary((matrix.shape[0] + 1,), torch.int32)
        yield Temporary((stored_elements(matrix),), torch.int32)
        yield Temporary((dense.shape[1], matrix.shape[0]), dense.dtype)


def takes_cublaslt(args: Any, kwargs: Any) -> bool:
    """Whether cuBLASLt computes an op of `CUBLASLT` in a workspace: it adds a bias, one number for each column, as it
    goes, and multiplies scaled float8 and float4 matrices (CUDABlas.cpp, `scaled_gemm`), other than by rows on most
    GPUs.

    Known limits: from PyTorch 2.10 on it is not asked for a bias where the first matrix has a single row or column; by
    2.12 it no longer has a workspace of its own.
    """
    one, other, *more = args
    if len(more) > 1 and isinstance(more[1], (Tensor, list)):  # scales; a product of another dtype has that dtype here
        is_empty = not (one.numel() and other.numel())
        return not is_empty and (_cublas_scales_rows() or not _is_scaled_by_rows(one, *more))
    bias, other = one, more[0]
    is_bias = bias.dim() == 1 and bias.shape[0] == other.shape[1] and bias.is_contiguous() and not bias.is_complex()
    return is_bias and min(other.shape) > 1 and (kwargs or {}).get("beta", 1) == 1


def _is_scaled_by_rows(one: Tensor, scales: Any, recipe: Any, *_: Any) -> bool:
    """Whether each row of the first matrix has a float32 scale: `_scaled_mm_v2` names its recipe, `_scaled_mm` derives
    it from the scales.
    """
    if isinstance(scales, list):
        return bool(recipe[0] == _BY_ROWS)
    return bool(scales.dtype is torch.float32 and scales.numel() > 1 and scales.shape == (one.shape[0], 1))


def _cublas_scales_rows() -> bool:
    """Whether cuBLASLt, not CUTLASS, multiplies matrices scaled by rows: on Hopper, since its release with CUDA 12.9
    (cuda/ScaledBlas.cpp, `_scaled_rowwise_rowwise`). PyTorch on PyPI comes with CUDA 13.0 since 2.11.
    """
    semantics = current()
    if semantics is None or semantics.capability[0] != _HOPPER:
        return False
    return semantics.release is None or semantics.release >= _CUDA_13_SINCE


# -- copies -----------------------------------------------------------------------------------------------------------


copies_of(*_PRODUCTS)(lambda args, kwargs: _copies(args[0], args[1], (kwargs or {}).get("out")))
# The matrix to add is copied into the result, or read by cuBLASLt: neither takes memory.
copies_of(*_ADDED)(lambda args, kwargs: _copies(args[1], args[2], (kwargs or {}).get("out")))
copies_of(*_ADDED_IN_PLACE)(lambda args, _: _copies(args[1], args[2], args[0]))


@copies_of(*_SUMMED)
def _summed_copies(args: Any, _: Any) -> Copies:
    """One product after the other (LinearAlgebra.cpp, `addbmm_impl_`): copies of one matrix at a time."""
    return _copies(args[1][0], args[2][0], None) if len(args[1]) else iter(())


@copies_of(*_VECTORS)
def _vector_copies(args: Any, _: Any) -> Copies:
    matrix, vector = args[-2:]
    if matrix.layout is not torch.strided:
        return
    if not (vector.is_contiguous() or vector.stride(0)):
        yield vector, "row-major"
    if not (matrix.is_contiguous() or _has_dense_rows(matrix) or _has_dense_columns(matrix)):
        yield matrix, "row-major"


def _copies(one: Tensor, other: Tensor, out: Tensor | None) -> Copies:
    """Yield the operands that cuBLAS cannot read, and an `out` into which it cannot write: the result is then computed
    aside.

    Of two operands that wait for their conjugation, it conjugates those that lie the other way than the result.
    """
    # A new result is row-major; a batch of single columns counts as columns.
    by_rows = (other.dim() == 2 or other.shape[2] != 1) if out is None else not _has_dense_columns(out)
    as_result = _has_dense_rows if by_rows else _has_dense_columns
    for operand in (other, one):
        if not is_usable(operand) or (operand.is_conj() and as_result(operand)):
            yield operand, "row-major"
    if out is not None and not is_usable(out):
        yield out, "row-major"


def is_usable(tensor: Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or a batch of them, as it lies; sparse ones are not its business."""
    if tensor.layout is not torch.strided or _has_dense_rows(tensor) or _has_dense_columns(tensor):
        return True
    if tensor.dim() == 2:
        return is_dense(tensor.shape, tensor.stride())
    return tensor.is_contiguous() and 0 not in tensor.stride()[1:]


def _has_dense_rows(tensor: Tensor) -> bool:
    row, column = tensor.stride()[-2:]
    return column == 1 and row >= max(1, tensor.shape[-1])


def _has_dense_columns(tensor: Tensor) -> bool:
    row, column = tensor.stride()[-2:]
    return row == 1 and column >= max(1, tensor.shape[-2])
