"""New tensors: like others, copies, ranges, zeros that a backward fills in part, joined tensors, rows of tables; and
writing into them by index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from math import ceil, prod
from typing import Any, Final

import torch

from memsize.kernels.registry import (
    Copies,
    Temporary,
    copies_of,
    copy_unless_contiguous,
    overloads,
    shape_rule,
    shape_rules,
    temporaries_of,
)
from memsize.kernels.strides import Shape
from memsize.kernels.tensors import (
    META,
    Tensor,
    accumulation,
    are_alike,
    are_floating,
    are_plain,
    empty,
    formatted,
    is_channels_last,
    like,
    overlaps,
)
from memsize.known_values.values import constant_of, is_uniform

_aten = torch.ops.aten
_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like clone _to_copy"


@shape_rule(*overloads(_LIKE))
def _made_like(
    tensor: Any, *_: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None, **__: Any,
) -> Any:  # fmt: skip
    if not are_plain(tensor) or (layout, pin_memory) not in ((None, None), (torch.strided, None), (None, False)):
        return NotImplemented
    dtype = dtype or tensor.dtype
    if dtype.is_complex or (device is not None and torch.device(device) != META):
        return NotImplemented
    if memory_format is None or memory_format is torch.preserve_format:
        return like(tensor, dtype)
    if memory_format is torch.contiguous_format:
        return empty(tensor.shape, dtype)
    rank = 4 if memory_format is torch.channels_last else 5
    return formatted(tensor.shape, dtype, channels_last=True) if tensor.dim() == rank else NotImplemented


@shape_rule("aten::randn")
def _normal(size: Any, *, dtype: Any = None, **options: Any) -> Any:
    """The result is row-major; PyTorch's `meta` kernel is Python that imports sympy, as is that of the next."""
    dtype = dtype or torch.get_default_dtype()
    return _drawn(size, dtype, **options) if dtype.is_floating_point else NotImplemented


@shape_rule("aten::randint", "aten::randint.low")
def _integers(*arguments: Any, dtype: Any = torch.int64, **options: Any) -> Any:
    *bounds, size = arguments
    low, high = (0, *bounds)[-2:]
    return _drawn(size, dtype, **options) if low < high and not dtype.is_complex else NotImplemented


def _drawn(size: Any, dtype: Any, *, device: Any = None, layout: Any = None, pin_memory: Any = None) -> Any:
    if device is None or torch.device(device).type != "meta" or layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    return NotImplemented if any(length < 0 for length in size) else empty(tuple(size), dtype)


shape_rules(
    "aten",
    {
        # The same memory; PyTorch's `meta` kernel is Python.
        "_unsafe_view": lambda tensor, size: _aten.view.default(tensor, size) if are_plain(tensor) else NotImplemented,
        # In place, without drawing random numbers: initialisers run on `meta` parameters too.
        "normal_ uniform_ exponential_": lambda tensor, *_, **__: (
            tensor if are_floating(tensor) and not overlaps(tensor) else NotImplemented
        ),
        # Row-major zeros for the whole input, into a part of which the gradient is written (FunctionsManual.cpp).
        "slice_backward select_backward": lambda grad, shape, *_: (
            empty(shape, grad.dtype) if are_plain(grad) else NotImplemented
        ),
        # Row-major (TriangularOps.cpp).
        "triu tril": lambda tensor, diagonal=0: (
            empty(tensor.shape, tensor.dtype) if are_plain(tensor) and tensor.dim() > 1 else NotImplemented
        ),
        # Row-major (Distributions.cpp; cuda/TensorTransformations.cu, `roll_cuda`).
        "bernoulli roll": lambda tensor, *_, **__: (
            empty(tensor.shape, tensor.dtype) if are_plain(tensor) else NotImplemented
        ),
    },
)


@copies_of(_aten.roll.default)
def _copied_before(args: Any, _: Any) -> Copies:
    """Over several dimensions the copy is gone before the result is there."""
    several = len(args) > 2 and len(args[2]) > 1
    return iter(()) if several else copy_unless_contiguous(args, _)


@temporaries_of(_aten.roll.default)
def _rolled_before(tensor: Any, _shifts: Any, dims: Any = ()) -> Iterator[Temporary]:
    """Several dimensions are rolled one after the other, and each result stays until the last (`roll_common`)."""
    yield from [Temporary(tuple(tensor.shape), tensor.dtype)] * (len(dims) - 1)


def range_length(start: float, end: float, step: float) -> int | None:
    """How many values ``start, start + step, …`` lie before `end`; None where the step leads away from it."""
    if step == 0 or (end - start) / step < 0:
        return None
    return ceil((end - start) / step)


@shape_rule("aten::arange", "aten::arange.start", "aten::arange.start_step")
def _arange(*bounds: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Integers only: floating ranges round, and PyTorch's kernel knows how."""
    if device is None or torch.device(device) != META or not all(isinstance(bound, int) for bound in bounds):
        return NotImplemented
    start, end, *step = (0, *bounds) if len(bounds) == 1 else bounds
    length = range_length(start, end, step[0] if step else 1)
    return NotImplemented if length is None else empty((length,), dtype or torch.int64)


# -- joined tensors ---------------------------------------------------------------------------------------------------


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
    goes with everything, and promotes like any other."""
    if not tensors or not are_plain(*tensors):
        return NotImplemented
    shapes = [t.shape for t in tensors if t.shape != (0,)]
    shape = joined_shape(shapes, dim) if shapes else None
    if shape is None:
        return NotImplemented
    last = len(shape) in (4, 5) and all(map(is_channels_last, tensors))
    return formatted(shape, reduce(torch.promote_types, (t.dtype for t in tensors)), last)


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


# -- embeddings -------------------------------------------------------------------------------------------------------


@shape_rule("aten::embedding")
def _embedding(weight: Any, indices: Any, *_: Any, **__: Any) -> Any:
    if weight.dim() != 2 or indices.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    # A look-up beyond the table fails, as it would with real data: a position after the last one, for example.
    values = constant_of(indices)
    if values is not None and values.numel():
        largest = int(values.flatten()[0] if is_uniform(values) else values.max())
        if largest >= weight.shape[0]:
            raise IndexError(f"index {largest} is out of range: the table has {weight.shape[0]} rows")
    if not are_plain(weight, indices):
        return NotImplemented
    return empty((*indices.shape, weight.shape[1]), weight.dtype)


@shape_rule("aten::embedding_dense_backward")
def _embedding_backward(grad: Any, indices: Any, count: int, _padding: int, _by_frequency: bool) -> Any:
    """The gradient of the whole table (cuda/Embedding.cu)."""
    if not are_plain(grad, indices) or not grad.dim() or grad.shape[:-1] != indices.shape:
        return NotImplemented
    return empty((count, grad.shape[-1]), grad.dtype)


_UNSORTED, _ROWS_OF_PART = 3072, 10
"""Up to so many indices are not sorted; so many rows of equal index are summed at a time."""


@temporaries_of(_aten.embedding_dense_backward.default)
def _embedding_backward_temporaries(
    grad: Any, indices: Any, count: int, _padding: int, by_frequency: bool
) -> Iterator[Temporary]:
    """The indices in order, where equal ones begin, and the sums of up to ten rows that share an index: there is room
    for one sum of each index and one of every ten rows (cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu).
    """
    rows, width = indices.numel(), grad.shape[-1]
    if rows <= _UNSORTED and not by_frequency:
        return
    distinct = min(rows, count)
    parts = rows // _ROWS_OF_PART + distinct
    for length in (rows, rows, rows, distinct, distinct, parts, *([rows] if by_frequency else [])):
        yield Temporary((length,), indices.dtype)
    yield Temporary((parts, width), accumulation(grad.dtype))


# -- writing by index -------------------------------------------------------------------------------------------------


@shape_rule("aten::scatter_.src", "aten::scatter_.value", "aten::scatter_add_")
def _scattered_in_place(tensor: Any, dim: int, index: Any, src: Any) -> Any:
    """Write in place. PyTorch's kernel imports sympy for its checks (TensorAdvancedIndexing.cpp); it gets what fails.

    It promises nothing of where the same place is written twice, which changes no shape.
    """
    sources = [src] if isinstance(src, Tensor) else []
    if not are_plain(tensor, index, *sources) or index.dtype is not torch.int64 or overlaps(tensor):
        return NotImplemented
    shape, rank = index.shape, tensor.dim()
    if not rank or any(operand.dim() != rank for operand in (index, *sources)) or not -rank <= dim < rank:
        return NotImplemented
    fits = all(shape[d] <= tensor.shape[d] for d in range(rank) if d != dim % rank)
    covers = all(shape[d] <= source.shape[d] for source in sources for d in range(rank))
    is_alike = all(source.dtype is tensor.dtype for source in sources)
    return tensor if fits and covers and is_alike else NotImplemented


@shape_rule("aten::index_add_")
def _index_added_in_place(tensor: Any, *args: Any, **options: Any) -> Any:
    """Write in place, where the result alone would be made anew."""
    is_checked = not overlaps(tensor) and _index_added(tensor, *args, **options) is not NotImplemented
    return tensor if is_checked else NotImplemented


@shape_rule("aten::index_add")
def _index_added(tensor: Any, dim: int, index: Any, source: Any, **_: Any) -> Any:
    """The gradient of a selection: row-major (``index_func_meta_impl`` of TensorAdvancedIndexing.cpp). PyTorch's `meta`
    kernel is Python that imports sympy."""
    rank = tensor.dim()
    if not are_plain(tensor, index, source) or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if not -rank <= dim < rank or source.dtype is not tensor.dtype:
        return NotImplemented
    dim %= rank
    expected = (*tensor.shape[:dim], len(index), *tensor.shape[dim + 1 :])
    return empty(tensor.shape, tensor.dtype) if tuple(source.shape) == expected else NotImplemented


_TILE: Final = 256 * 9
"""Up to so many pairs of 16 bytes one block of CUB's sort takes, in its own memory (dispatch_radix_sort.cuh)."""
_BITS_OF_PASS: Final = 8
_MASKS: Final = (torch.bool, torch.uint8)


@temporaries_of(_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
def _sorted_before_adding(
    tensor: Any, indices: Any, values: Any, accumulate: bool = False, *_: Any
) -> Iterator[Temporary]:
    """Sorting brings values of one place together: places and their order, before and after, and in CUB another copy of
    both where one pass over the bits of a place is not enough (cuda/Indexing.cu `index_put_with_sort_kernel`).

    Known limit: CUB's own counters, less than 2 % of its copies.
    """
    indexed = [dim for dim, _ in _indexed(indices)]
    if not accumulate or not indexed:
        return
    shapes = [index.shape for _, index in _indexed(indices)]
    apart = prod(size for dim, size in enumerate(tensor.shape) if dim not in indexed)
    masked = any(index.dtype in _MASKS for index in indices if index is not None)
    elements = values.numel() if masked else prod(torch.broadcast_shapes(*shapes)) * apart
    if not elements:
        return
    adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
    after = prod(tensor.shape[indexed[-1] + 1 :]) if adjacent else apart
    if values.numel() < elements or not values.is_contiguous():
        yield Temporary((elements,), values.dtype)
    if not adjacent or not tensor.is_contiguous():
        yield Temporary(tuple(tensor.shape), tensor.dtype)
    pairs = elements // apart
    yield from [Temporary((pairs,), torch.int64)] * 4
    if pairs > _TILE and (tensor.numel() // after - 1).bit_length() > _BITS_OF_PASS:
        yield Temporary((2 * pairs,), torch.int64)


def _indexed(indices: Any) -> Iterator[tuple[int, Any]]:
    """The dimensions that are indexed, and by what: a mask stands for as many as it has."""
    dim = 0
    for index in indices:
        width = 1 if index is None or index.dtype not in _MASKS else index.dim()
        if index is not None:
            yield from ((dim + at, index) for at in range(width))
        dim += width
