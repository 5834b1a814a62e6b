"""What CUDA's kernels for sparse tensors take beside their results, where tables get sparse gradients.

Updates themselves, by `add_`, take nothing.

Source: aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu (`_coalesce_sparse_cuda`), sparse/SparseTensor.cpp
(`sparse_mask`), EmbeddingBag.cpp (`_embedding_bag_sparse_backward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, int64, sparse_coo, strided, uint8

from memsize.cuda.registry import Temporary, temporaries_of
from memsize.torch_internals.sparse_tensors import places

_aten = torch.ops.aten
_MEAN = 1
"""The mode of an embedding bag."""


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
        yield Temporary((elements,), int64)
    if not values.is_contiguous():
        yield Temporary(tuple(values.shape), values.dtype)
    made = min(elements, places(tensor)) * values[0].numel() * values.element_size()
    if 2 * elements * int64.itemsize > made:
        yield Temporary((2 * elements * int64.itemsize - made,), uint8)


@temporaries_of(_aten.norm.ScalarOpt_dim)
def _added_up(tensor: Tensor, *_: Any) -> Iterator[Temporary]:
    """A norm is that of the values, after equal indices are added up."""
    if tensor.layout is sparse_coo and not tensor.is_coalesced():
        values = tensor._values()
        yield Temporary(tuple(tensor._indices().shape), int64)
        yield Temporary((min(len(values), places(tensor)), *values.shape[1:]), values.dtype)
        yield from _sorted(tensor)


@temporaries_of(_aten.sparse_mask.default)
def _rows(tensor: Tensor, mask: Tensor) -> Iterator[Temporary]:
    """The rows of a dense tensor, before they are multiplied by a one."""
    if tensor.layout is strided and mask.layout is sparse_coo and mask._nnz():
        yield Temporary(tuple(mask._values().shape), tensor.dtype)
        yield Temporary((1,), mask.dtype)


@temporaries_of(_aten._embedding_bag_backward.default)
def _shares(
    grad: Tensor, indices: Tensor, _offsets: Any, _places: Any, sizes: Tensor, _largest: Any, _rows: int,
    _by_frequency: bool, mode: int, sparse: bool, _weights: Any, padding: int = -1,
) -> Iterator[Temporary]:  # fmt: skip
    """With padding, the gradient of each row before those of the padding are left out, what is left, and where. A mean
    divides it by the size of each bag: the sizes, what they divide by, and that for each row."""
    rows = indices.numel()
    if sparse and padding != -1:
        yield Temporary((rows, grad.shape[1]), grad.dtype)
        yield Temporary((rows,), torch.bool)
        yield Temporary((rows, 1), int64)
    elif sparse and mode == _MEAN:
        for shape in ((len(sizes),), (len(sizes),), (rows, 1)):
            yield Temporary(shape, grad.dtype)
