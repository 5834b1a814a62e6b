"""Sparse tensors in coordinates (COO), as the gradients of tables are: copies, sums, products with numbers, selections.

Of most of these ops PyTorch's `meta` kernels return no elements, and of the others it has none. What equal indices add
up to (`_coalesce`) depends on the data: see `memsize.known_values.data_dependent`.

Source: aten/src/ATen/native/sparse/SparseTensor.cpp, SparseTensorMath.cpp, cuda/SparseCUDATensorMath.cu,
cuda/SparseCUDATensor.cu (`_coalesce_sparse_cuda`) and EmbeddingBag.cpp (`_embedding_bag_sparse_backward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memsize.kernels.registry import Temporary, overloads, sparse_rule, temporaries_of
from memsize.kernels.tensors import Tensor, are_plain, empty, like, overlaps
from memsize.torch_internals.sparse_tensors import in_coordinates, is_in_coordinates, places, with_parts

_aten = torch.ops.aten
_MEAN = 1
"""The mode of an embedding bag."""

_data: Any = vars(torch._C.TensorBase)["data"]
"""PyTorch's own attribute, even where that of `Tensor` is replaced."""


def _written(target: Tensor, result: Tensor) -> Tensor:
    """`target` with the parts of `result`, which are new: no sparse kernel writes into the old ones."""
    _data.__set__(target, result)
    return target


def _with_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy whose values have another dtype."""
    values = like(tensor._values(), dtype)
    return in_coordinates(like(tensor._indices()), values, tensor.shape, tensor.is_coalesced())


@sparse_rule("aten::clone", "aten::neg")
def _copied(tensor: Any, *, memory_format: Any = None) -> Any:
    return NotImplemented if memory_format is not None or not is_in_coordinates(tensor) else with_parts(tensor, like)


@sparse_rule("aten::copy_")
def _copied_into(target: Any, source: Any, *_: Any) -> Any:
    sparse = [is_in_coordinates(tensor) for tensor in (target, source)]
    if any(sparse) and torch.strided in (target.layout, source.layout):
        raise RuntimeError("copy_() between dense and sparse Tensors is not implemented!")  # PyTorch's own, but on meta
    if not all(sparse):
        return NotImplemented
    return _written(target, _with_values(source, target.dtype))


@sparse_rule(*overloads("mul div", ".Tensor", ".Scalar"))
def _scaled(one: Any, other: Any) -> Any:
    """Multiply, or divide, by a number, which may be a tensor without dimensions."""
    tensor, number = (one, other) if is_in_coordinates(one) else (other, one)
    if not is_in_coordinates(tensor) or (isinstance(number, Tensor) and (number.dim() or number.is_sparse)):
        return NotImplemented
    dtype = torch.result_type(tensor, number)
    return _with_values(tensor, dtype) if dtype.is_floating_point else NotImplemented


@sparse_rule(*overloads("mul_", ".Tensor", ".Scalar"))
def _multiplied_in_place(tensor: Any, number: Any) -> Any:
    """New parts take the place of the old ones (`intersection_binary_op_sparse_dense_out`)."""
    result = _scaled_in_place(tensor, number)
    return result if result is NotImplemented else _written(tensor, with_parts(tensor, like))


@sparse_rule(*overloads("div_", ".Tensor", ".Scalar"), "aten::neg_")
def _scaled_in_place(tensor: Any, number: Any = 1) -> Any:
    is_number = not isinstance(number, Tensor) or not (number.dim() or number.is_sparse)
    fits = is_number and is_in_coordinates(tensor) and torch.can_cast(torch.result_type(tensor, number), tensor.dtype)
    return tensor if fits and tensor.is_floating_point() else NotImplemented


@sparse_rule("aten::zero_")
def _emptied(tensor: Any) -> Any:
    """The tensor holds no elements afterwards."""
    if not is_in_coordinates(tensor):
        return NotImplemented
    indices, values = tensor._indices(), tensor._values()
    none = empty((len(indices), 0), indices.dtype), empty((0, *values.shape[1:]), values.dtype)
    return _written(tensor, in_coordinates(*none, tensor.shape, is_coalesced=True))


@sparse_rule("aten::add.Tensor", "aten::sub.Tensor")
def _added(one: Any, other: Any, **_: Any) -> Any:
    """Add a sparse tensor to a dense one, at its indices; two sparse ones are `_joined`."""
    dtype = torch.result_type(one, other)
    if are_plain(one) and is_in_coordinates(other) and one.shape == other.shape:
        return like(one, dtype)
    return _joined(one, other, dtype)


@sparse_rule("aten::add_.Tensor", "aten::sub_.Tensor")
def _added_in_place(one: Any, other: Any, **_: Any) -> Any:
    if not torch.can_cast(torch.result_type(one, other), one.dtype):
        return NotImplemented
    if are_plain(one) and is_in_coordinates(other):
        return one if one.shape == other.shape and not overlaps(one) else NotImplemented
    result = _joined(one, other, one.dtype)
    return result if result is NotImplemented else _written(one, result)


def _joined(one: Any, other: Any, dtype: torch.dtype) -> Any:
    """The elements of both, one after the other: what has equal indices is not added up.

    Known limit: it is where both together are more than the whole tensor has places, or of two dtypes.
    """
    if not is_in_coordinates(one) or not is_in_coordinates(other):
        return NotImplemented
    if one.shape != other.shape or one.sparse_dim() != other.sparse_dim():
        return NotImplemented
    for alone, absent in ((one, other), (other, one)):
        if not absent._nnz():
            return _with_values(alone, dtype)
    indices, values = one._indices(), one._values()
    count = one._nnz() + other._nnz()
    indices, values = empty((len(indices), count), indices.dtype), empty((count, *values.shape[1:]), dtype)
    return in_coordinates(indices, values, one.shape)


@sparse_rule("aten::_to_dense")
def _to_dense(tensor: Any, dtype: torch.dtype | None = None, *_: Any) -> Any:
    return empty(tensor.shape, dtype or tensor.dtype) if is_in_coordinates(tensor) else NotImplemented


@sparse_rule("aten::sparse_mask")
def _selected(tensor: Any, mask: Any) -> Any:
    """The elements of a dense tensor that are at the indices of a sparse one."""
    if not are_plain(tensor) or not is_in_coordinates(mask) or tensor.shape != mask.shape:
        return NotImplemented
    return _with_values(mask, tensor.dtype)


# -- what the kernels take --------------------------------------------------------------------------------------------


@temporaries_of(_aten._coalesce.default)
def _sorted(tensor: Tensor) -> Iterator[Temporary]:
    """Where each of the sorted indices was, and where equal ones begin; of indices with several dimensions, which are
    sorted by one number, that number too.

    Sorting itself takes as much as the numbers and places that it sorts, before the values are made: it counts as far
    as it is more than they are.
    """
    elements, values = tensor._nnz(), tensor._values()
    if elements < 2:
        return
    for _ in range(2 if tensor.sparse_dim() == 1 else 3):
        yield Temporary((elements,), torch.int64)
    if not values.is_contiguous():
        yield Temporary(tuple(values.shape), values.dtype)
    values_bytes = min(elements, places(tensor)) * values[0].numel() * values.element_size()
    if 2 * elements * torch.int64.itemsize > values_bytes:
        yield Temporary((2 * elements * torch.int64.itemsize - values_bytes,), torch.uint8)


@temporaries_of(_aten.norm.ScalarOpt_dim)
def _added_up(tensor: Tensor, *_: Any) -> Iterator[Temporary]:
    """A norm is that of the values, after equal indices are added up."""
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        values = tensor._values()
        yield Temporary(tuple(tensor._indices().shape), torch.int64)
        yield Temporary((min(len(values), places(tensor)), *values.shape[1:]), values.dtype)
        yield from _sorted(tensor)


@temporaries_of(_aten.sparse_mask.default)
def _rows(tensor: Tensor, mask: Tensor) -> Iterator[Temporary]:
    """The rows of a dense tensor, before they are multiplied by a one."""
    if tensor.layout is torch.strided and mask.layout is torch.sparse_coo and mask._nnz():
        yield Temporary(tuple(mask._values().shape), tensor.dtype)
        yield Temporary((1,), mask.dtype)


@temporaries_of(_aten._embedding_bag_backward.default)
def _shares(
    grad: Tensor, indices: Tensor, _offsets: Any, _places: Any, sizes: Tensor, _largest: Any, _rows: int,
    _by_frequency: bool, mode: int, sparse: bool, _weights: Any, padding: int = -1,
) -> Iterator[Temporary]:  # fmt: skip
    """The gradient of every row, a mask of the rows that are not padding, and their indices, where there is padding;
    for a mean the sizes of the bags, their reciprocals, and the reciprocal for each row."""
    rows = indices.numel()
    if sparse and padding != -1:
        yield Temporary((rows, grad.shape[1]), grad.dtype)
        yield Temporary((rows,), torch.bool)
        yield Temporary((rows, 1), torch.int64)
    elif sparse and mode == _MEAN:
        for shape in ((len(sizes),), (len(sizes),), (rows, 1)):
            yield Temporary(shape, grad.dtype)
