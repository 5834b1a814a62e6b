"""Scratch memory of reductions in which several thread blocks share an output: their partial results, and counters.

A block that has several outputs asks for its width times as much as it writes. The sum of a gradient of 8,192 × 1,024
numbers, as it is the gradient of a bias, takes 64 MiB on an A100 where its result has 4 KiB.

Known limits: most reductions inside other kernels; releases whose sums load four 16-bit numbers at once, not eight.

Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `global_memory_size`, `semaphore_size`,
`gpu_reduce_kernel`) and the Reduce*.cu beside it; aten/src/ATen/TensorIterator.cpp (`reorder_dimensions`,
`coalesce_dimensions`, `split`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memsize.kernels.convolution import BACKWARD, suggests_last
from memsize.kernels.reductions import Dims
from memsize.kernels.registry import Temporary, reduction_of
from memsize.kernels.tensors import formatted
from memsize.records.gpu import Multiprocessors

_aten = torch.ops.aten
_THREADS: Final = 512
"""The most of a block; half of them for complex numbers of 16 bytes."""
_WARP: Final = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Between which the values lie that a thread of a shared output adds up."""
_VECTOR: Final = 128
"""The shortest row of which a thread loads several values at once."""
_INDEXED: Final = 2**31 - 1
_WELFORD: Final = 16
"""Bytes of a variance in the making: a mean, squares, and two counts."""


class Reduction(NamedTuple):
    """A tensor that is reduced over `dims` (None or none: all), in numbers of `itemsize` bytes; `partial` are the bytes
    of a partial result, and `vector` the values that a thread loads at once.
    """

    tensor: Tensor
    dims: Dims
    itemsize: int
    partial: int
    vector: int


class _Dim(NamedTuple):
    """One dimension of an input: its length, its stride in elements, and whether it is reduced."""

    size: int
    stride: int
    reduced: bool


@reduction_of(_aten.sum.dim_IntList, _aten.nansum.default, _aten.mean.dim, _aten.prod.dim_int)
def _summed(tensor: Tensor, dims: Dims = None, *_: Any) -> Reduction:
    """Truth values and small integers are cast to integers of 8 bytes before."""
    is_counted = not tensor.is_floating_point() and not tensor.is_complex()
    itemsize = 8 if is_counted else tensor.dtype.itemsize
    return Reduction(tensor, dims, itemsize, max(itemsize, 4), 8 if itemsize == 2 else 4)


@reduction_of(_aten.sum.default, _aten.mean.default, _aten.prod.default)
def _summed_up(tensor: Tensor, *_: Any) -> Reduction:
    return _summed(tensor)


@reduction_of(_aten.linalg_vector_norm.default)
def _norm(tensor: Tensor, _order: Any = 2, dims: Dims = None, *_: Any) -> Reduction:
    return _summed(tensor, dims)


@reduction_of(_aten.amax.default, _aten.amin.default, _aten.max.default, _aten.min.default)
def _extreme(tensor: Tensor, dims: Dims = None, *_: Any) -> Reduction:
    return Reduction(tensor, dims, tensor.dtype.itemsize, tensor.dtype.itemsize, 4)


@reduction_of(_aten.var.correction, _aten.std.correction, _aten.var_mean.correction)
def _variance(tensor: Tensor, dims: Dims = None, *_: Any) -> Reduction:
    return Reduction(tensor, dims, tensor.dtype.itemsize, _WELFORD * (2 if tensor.dtype.itemsize == 8 else 1), 2)


@reduction_of(BACKWARD)
def _bias_of_convolution(grad: Tensor, tensor: Tensor, weight: Tensor, *others: Any) -> Reduction:
    """The gradient of a bias is summed up last, from the gradient in the convolution's memory format (Convolution.cpp,
    `convolution_backward`).
    """
    *_, (_, _, has_bias) = others
    shape = tuple(grad.shape) if has_bias else (0,)
    return _summed(formatted(shape, grad.dtype, has_bias and suggests_last(tensor, weight)), [0, *range(2, len(shape))])


def scratch(reduction: Reduction, gpu: Multiprocessors) -> Iterator[Temporary]:
    """Yield what a reduction allocates on a GPU besides its result."""
    tensor, dims, itemsize, partial, vector = reduction
    if tensor.layout is not torch.strided or not tensor.numel():
        return
    chosen = [dims] if isinstance(dims, int) else dims or range(tensor.dim())
    reduced = {dim % max(tensor.dim(), 1) for dim in chosen}
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    axes = _coalesced(_ordered([_Dim(*length, dim in reduced) for dim, length in enumerate(lengths)]))
    if partial > itemsize and not _has_short_indices(axes, itemsize):
        yield Temporary((_outputs(axes),))  # sums in float32, over all parts
    while not _has_short_indices(axes, itemsize):  # one half after the other
        longest = max(range(len(axes)), key=lambda dim: ((axes[dim].size - 1) * axes[dim].stride, dim))
        axes[longest] = axes[longest]._replace(size=axes[longest].size - axes[longest].size // 2)
    results, counters = _shared(axes, int(tensor.storage_offset()), gpu, itemsize=itemsize, vector=vector)
    if results:
        yield Temporary((partial * results,), torch.uint8)
        yield Temporary((counters,), torch.int32)


def _shared(axes: Sequence[_Dim], offset: int, gpu: Multiprocessors, *, itemsize: int, vector: int) -> tuple[int, int]:
    """How many partial results and counters there is room for; none where each output is one block's."""
    output = sum(axis.reduced for axis in axes)
    outputs, inputs = _outputs(axes), prod(axis.size for axis in axes if axis.reduced)
    is_row = output == len(axes) or axes[0].stride < axes[output].stride
    wide, high = (inputs, outputs) if is_row else (outputs, inputs)
    of_thread = 1
    if axes and axes[0 if is_row else output].stride == 1:
        if not is_row:
            of_thread = _vector(axes, output, offset)
            wide //= of_thread
        elif wide >= _VECTOR and output == 1:
            wide //= vector
    threads = _THREADS // (2 if itemsize == 2 * 8 else 1) // of_thread
    wide, high = (power_of_two(min(size, threads)) for size in (wide, high))
    height = min(high, threads // min(wide, _WARP))
    width = min(wide, threads // height)
    values = _ceil(inputs, width if is_row else 1)
    if values < min(height * _LEAST_VALUES, _MOST_VALUES):
        return 0, 0
    values = _ceil(inputs, (width if is_row else 1) * height)
    blocks = _ceil(outputs // of_thread, 1 if is_row else width)
    at_once = gpu.processors * (gpu.threads // (width * height))
    if values < _MOST_VALUES or blocks > at_once:
        return 0, 0
    sharing = max(min(_ceil(at_once, blocks), _ceil(values, _LEAST_VALUES)), _ceil(values, _MOST_VALUES))
    return (outputs * sharing * (1 if is_row else width * of_thread), blocks) if sharing > 1 else (0, 0)


def _ordered(axes: Sequence[_Dim]) -> list[_Dim]:
    """Reduced dimensions first, each kind by stride, the last first; by insertion, as not all can be compared."""
    ordered = list(reversed(axes))
    for start in range(1, len(ordered)):
        moved = start
        for at in range(start - 1, -1, -1):
            order = _order(ordered[at], ordered[moved])
            if order < 0:
                break
            if order > 0:
                ordered[at], ordered[moved] = ordered[moved], ordered[at]
                moved = at
    return ordered


def _order(first: _Dim, second: _Dim) -> int:
    """Below 0 where `first` comes first, above 0 where `second` does, 0 where it is not known."""
    if first.reduced != second.reduced:
        return 1 if second.reduced else -1
    if not first.stride or not second.stride:
        return 0
    if first.stride != second.stride:
        return first.stride - second.stride
    return int(first.size > second.size)


def _coalesced(axes: Sequence[_Dim]) -> list[_Dim]:
    """Join dimensions of one kind whose elements follow each other."""
    merged: list[_Dim] = []
    for axis in axes:
        if not merged:
            merged.append(axis)
        elif merged[-1].size == 1:
            merged[-1] = axis
        elif axis.size != 1:
            size, stride, reduced = merged[-1]
            if reduced == axis.reduced and size * stride == axis.stride:
                merged[-1] = _Dim(size * axis.size, stride, reduced)
            else:
                merged.append(axis)
    return merged


def _vector(axes: Sequence[_Dim], output: int, offset: int) -> int:
    """How many outputs a thread has: 4, 2 or 1, as alignment permits."""
    vector = 4
    for number in (offset, axes[output].size, *(axis.stride for at, axis in enumerate(axes) if at != output)):
        while number % vector:
            vector //= 2
    return vector


def _has_short_indices(axes: Sequence[_Dim], itemsize: int) -> bool:
    last = 1 + sum((axis.size - 1) * axis.stride * itemsize for axis in axes)
    return last <= _INDEXED and prod(axis.size for axis in axes) <= _INDEXED


def _outputs(axes: Sequence[_Dim]) -> int:
    return prod(axis.size for axis in axes if not axis.reduced)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The greatest power of two up to `number`."""
    return 1 << max(number, 1).bit_length() - 1
