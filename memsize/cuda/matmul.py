"""Matrix products on CUDA: which ops cuBLAS computes, what it cannot read as it lies, and when cuBLASLt is asked.

cuBLAS takes a matrix with dense rows or dense columns. Any other is copied row by row first, in full where it was
expanded: the gradient of ``logits.sum()`` behind a linear layer, for one. Operands must have one dtype.

Source: aten/src/ATen/native/cuda/cuBlasCommonArgs.h (`prepare_matrix_for_cublas`) and Blas.cpp
(`prepare_batch_matrix_for_cublas`, `baddbmm_out_cuda_impl`, `addmv_out_cuda`, `isInputCompliesAddmmCudaLt`), the same
in what matters here from PyTorch 2.1 to 2.14; the checks raise in the words of `kernels.refuse_mixed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, int32, ops, sparse_coo, strided

from memsize.cuda.registry import Copies, Temporary, copies_of, result_first, same_dtype, temporaries_of
from memsize.meta_kernels.strides import is_dense
from memsize.torch_internals.sparse_tensors import stored_elements

_aten = ops.aten


def _overloads(*names: str) -> tuple[Any, ...]:
    """Every overload of these operators: in place, with ``out=`` and with a dtype of their own."""
    packets = [getattr(_aten, name) for name in names]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_PRODUCTS = _overloads("mm", "bmm")
_ADDED = _overloads("addmm", "_addmm_activation", "baddbmm")
_ADDED_IN_PLACE = _overloads("addmm_", "baddbmm_")
_SUMMED = _overloads("addbmm", "addbmm_")
_VECTORS = _overloads("mv", "addmv", "addmv_")
BIASED = frozenset(_overloads("addmm", "_addmm_activation"))

CUBLAS = frozenset((*_PRODUCTS, *_ADDED, *_ADDED_IN_PLACE, *_SUMMED, *_VECTORS, *_overloads("dot", "vdot")))
"""Ops that cuBLAS computes: a thread's first one makes a handle with a workspace."""

same_dtype(slice(0, 2), _aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default)
same_dtype(slice(0, 3), _aten.addmm.default, _aten.addmv.default, _aten.baddbmm.default)
result_first(*_PRODUCTS, *_ADDED, *_VECTORS)


def takes_cublas(args: Any) -> bool:
    """Whether an op of `CUBLAS` has no sparse operand: cuSPARSE, which has no such workspace, would compute it."""
    return all(each.layout is strided for each in args if isinstance(each, Tensor))


@temporaries_of(_aten.mm.default, _aten.addmm.default, _aten._sparse_addmm.default)
def _in_coordinates(*args: Any, **_: Any) -> Iterator[Temporary]:
    """cuSPARSE wants row pointers and columns of 32 bits, and a result by columns, which is copied into that by rows
    (sparse/cuda/SparseCUDATensorMath.cu). What it asks for itself beside is not known.
    """
    matrix, dense = args[-2:]
    if matrix.layout is sparse_coo:
        yield Temporary((matrix.shape[0] + 1,), int32)
        yield Temporary((stored_elements(matrix),), int32)
        yield Temporary((dense.shape[1], matrix.shape[0]), dense.dtype)


def takes_cublaslt(args: Any, kwargs: Any) -> bool:
    """Whether cuBLASLt computes an op of `BIASED`: it adds a bias, one number for each column, as it goes.

    Known limit: from PyTorch 2.10 on it is not asked where the first matrix has a single row or column either; by 2.12
    it no longer has a workspace of its own.
    """
    bias, other = args[0], args[2]
    is_bias = bias.dim() == 1 and bias.shape[0] == other.shape[1] and bias.is_contiguous() and not bias.is_complex()
    return is_bias and min(other.shape) > 1 and (kwargs or {}).get("beta", 1) == 1


# -- copies -----------------------------------------------------------------------------------------------------------


@copies_of(*_PRODUCTS)
def _product_copies(args: Any, kwargs: Any) -> Copies:
    return _copies(args[0], args[1], kwargs.get("out") if kwargs else None)


@copies_of(*_ADDED)
def _added_copies(args: Any, kwargs: Any) -> Copies:
    """What is added is copied into the result, or read by cuBLASLt: neither takes memory."""
    return _copies(args[1], args[2], kwargs.get("out") if kwargs else None)


@copies_of(*_ADDED_IN_PLACE)
def _added_in_place_copies(args: Any, _: Any) -> Copies:
    return _copies(args[1], args[2], args[0])


@copies_of(*_SUMMED)
def _summed_copies(args: Any, _: Any) -> Copies:
    """One product after the other (LinearAlgebra.cpp, `addbmm_impl_`): copies of one matrix at a time."""
    return _copies(args[1][0], args[2][0], None) if len(args[1]) else iter(())


@copies_of(*_VECTORS)
def _vector_copies(args: Any, _: Any) -> Copies:
    matrix, vector = args[-2:]
    if matrix.layout is not strided:
        return
    if not (vector.is_contiguous() or vector.stride(0)):
        yield vector, "row-major"
    if not (matrix.is_contiguous() or _has_dense_rows(matrix) or _has_dense_columns(matrix)):
        yield matrix, "row-major"


def _copies(one: Tensor, other: Tensor, out: Tensor | None) -> Copies:
    """What cuBLAS cannot read, and a given result into which it cannot write: that is computed aside.

    Of two operands that wait for their conjugation, it conjugates those that lie the other way than the result.
    """
    as_result = _has_dense_rows if _is_by_rows(other, out) else _has_dense_columns
    for operand in (other, one):
        if not is_usable(operand) or (operand.is_conj() and as_result(operand)):
            yield operand, "row-major"
    if out is not None and not is_usable(out):
        yield out, "row-major"


def _is_by_rows(other: Tensor, out: Tensor | None) -> bool:
    """A new result is row-major; a batch of single columns counts as columns."""
    return (other.dim() == 2 or other.shape[2] != 1) if out is None else not _has_dense_columns(out)


def is_usable(tensor: Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or a batch of them, as it lies; sparse ones are not its business."""
    if tensor.layout is not strided or _has_dense_rows(tensor) or _has_dense_columns(tensor):
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
