"""Where elements lie: strides as PyTorch chooses them, as arithmetic on integers. Nothing here makes a tensor.

Shapes and strides are tuples, strides in elements. The rules follow c10/core/MemoryFormat.h, TensorImpl.cpp and
ATen/TensorIterator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Shape = Sequence[int]
Operand = tuple[Shape, Shape]
"""The shape and the strides of one tensor that an elementwise op reads."""

# The order in which each format lays its dimensions out, innermost first.
_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


def contiguous(shape: Shape) -> tuple[int, ...]:
    """The strides of a row-major tensor: ``(2, 3, 4)`` has ``(12, 4, 1)``. A dimension of size 0 counts as 1."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


def permuted(shape: Shape, innermost_first: Iterable[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in memory in this order."""
    strides = [0] * len(shape)
    step = 1
    for dim in innermost_first:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def channels_last(shape: Shape) -> tuple[int, ...]:
    """The strides of a dense image or volume with the channels innermost; other ranks are row-major."""
    order = _CHANNELS_LAST.get(len(shape))
    return contiguous(shape) if order is None else permuted(shape, order)


def is_channels_last(shape: Shape, strides: Shape) -> bool:
    """Whether PyTorch takes these strides for channels last. Ambiguous ones (one channel, one pixel) are not.

    The strides must grow in the order channels, width, height, (depth,) batch; gaps are allowed.
    """
    order = _CHANNELS_LAST.get(len(shape))
    if order is None or not strides[1]:
        return False
    least = 0
    for dim in order:
        size, stride = shape[dim], strides[dim]
        if size == 0 or stride < least or (dim == 0 and least == strides[1]):
            return False
        least = stride * size if size > 1 else stride
    return True


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether every element has a place of its own and no place is unused."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if size == 0:
            return True
        if stride != step:
            return False
        step *= size
    return True


def like(shape: Shape, strides: Shape) -> tuple[int, ...]:
    """The strides of `torch.empty_like`: kept where dense, else made dense in the same order of dimensions."""
    return tuple(strides) if is_dense(shape, strides) else elementwise(shape, ((shape, strides),))


def broadcast(shapes: Iterable[Shape]) -> tuple[int, ...] | None:
    """The shape that all of these expand to, None where two sizes disagree."""
    last_first: list[int] = []
    for shape in shapes:
        for dim, size in enumerate(reversed(shape)):
            if dim == len(last_first):
                last_first.append(size)
            elif last_first[dim] == 1:
                last_first[dim] = size
            elif size not in (1, last_first[dim]):
                return None
    return tuple(reversed(last_first))


def elementwise(shape: Shape, operands: Sequence[Operand]) -> tuple[int, ...]:
    """The strides of the output of an elementwise op with this output shape.

    The first operand that tells two dimensions apart decides which of them lies inside the other; an insertion sort
    carries that through all dimensions (`TensorIteratorBase::reorder_dimensions`).
    """
    rank = len(shape)
    expanded = []
    for own, strides in operands:
        missing = rank - len(own)
        inner = [0 if size == 1 != shape[missing + i] else strides[i] for i, size in enumerate(own)]
        expanded.append([0] * missing + inner)
    order = list(range(rank - 1, -1, -1))
    for position in range(1, rank):
        moving = position
        for before in range(position - 1, -1, -1):
            swap = _compare(order[before], order[moving], shape, expanded)
            if swap > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif swap < 0:
                break
    return contiguous(shape) if order == list(range(rank - 1, -1, -1)) else permuted(shape, order)


def _compare(inner: int, outer: int, shape: Shape, operands: list[list[int]]) -> int:
    for strides in operands:
        low, high = strides[inner], strides[outer]
        if low == 0 or high == 0:
            continue
        if low != high:
            return -1 if low < high else 1
        if shape[inner] > shape[outer]:
            return 1
    return 0
