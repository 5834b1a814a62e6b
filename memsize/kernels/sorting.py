"""Scratch memory of sorting on a GPU.

Rows of up to 4,096 elements are sorted in place, in a copy that is the result. Longer ones go through CUB (aten/src/
ATen/native/cuda/Sort.cpp and SortStable.cu): a copy with the sorted dimension innermost, where it isn't, and a buffer
of places to start from. CUB's radix sort writes to and fro, between the result and a second buffer of values and places
(cub/device/dispatch/dispatch_radix_sort.cuh, `is_overwrite_okay`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from memsize.kernels.registry import Temporary, temporaries_of

_aten = torch.ops.aten
_SHORT: Final = 4096
"""The longest row that is sorted in place (Sort.h, `should_use_small_sort`)."""
_LONG: Final = 1_000_000
_FEW_ROWS: Final = 128
_MOST: Final = 2**31 - 1
"""The elements of one sort: more rows than that are sorted one part after the other."""


@temporaries_of(_aten.sort.default)
def _sort(tensor: Tensor, dim: int = -1, _descending: bool = False) -> Iterator[Temporary]:
    if tensor.dim() == 0 or tensor.shape[dim] <= _SHORT:
        return
    if tensor.stride(dim) != 1 or not tensor.is_contiguous():
        yield Temporary(tuple(tensor.shape), tensor.dtype)
    if tensor.stride(dim) != 1:  # the results are made anew too, and copied into those that are returned
        yield Temporary(tuple(tensor.shape), tensor.dtype)
        yield Temporary(tuple(tensor.shape), torch.int64)
    yield from _radix_sort(tensor.shape[dim], tensor.numel(), tensor.dtype)


@temporaries_of(_aten.sort.stable)
def _stable_sort(
    tensor: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Iterator[Temporary]:
    """The same: all of these are stable."""
    yield from _sort(tensor, dim, descending)


def _radix_sort(length: int, elements: int, dtype: torch.dtype) -> Iterator[Temporary]:
    rows = min(elements, _MOST) // length
    part = rows * length
    places = torch.int64
    if rows == 1 or length >= _LONG:  # row by row
        yield Temporary((length,), places)
        yield from (Temporary((length,), dtype), Temporary((length,), places))
    elif rows < _FEW_ROWS:  # all rows together, by value, and then by row: pairs of row and place, there and back
        yield from (Temporary((part,), dtype), Temporary((part,), dtype))
        for _ in range(3):
            yield Temporary((2 * part,), torch.int32)
    else:
        yield Temporary((part,), places)
        yield from (Temporary((part,), dtype), Temporary((part,), places))
