"""Sums, means and norms; softmax; losses; and their gradients. Every output is row-major, whatever the input's strides.

CUDA's softmax makes its argument contiguous (aten/src/ATen/native/cuda/SoftMax.cu, `host_softmax`). A reduced loss is
one number, for some losses at the start of the memory that its terms would take; an unreduced one is elementwise.

Sorting: rows of up to 4,096 elements are sorted in place, in a copy that is the result. Longer ones go through CUB
(aten/src/ATen/native/cuda/Sort.cpp and SortStable.cu): a copy with the sorted dimension innermost, where it isn't, and
a buffer of places to start from. CUB's radix sort writes to and fro, between the result and a second buffer of values
and places (cub/device/dispatch/dispatch_radix_sort.cuh, `is_overwrite_okay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memsize.kernels.registry import (
    Temporary,
    copies_of,
    copy_unless_contiguous,
    overloads,
    result_first,
    shape_rule,
    temporaries_of,
)
from memsize.kernels.strides import Shape, broadcast
from memsize.kernels.tensors import are_alike, are_floating, are_plain, elementwise, empty

Dims = int | Sequence[int] | None
_aten = torch.ops.aten

# -- sums, means and norms --------------------------------------------------------------------------------------------


def reduced_shape(shape: Shape, dims: Dims, keepdim: bool) -> tuple[int, ...] | None:
    """`shape` without `dims` (or with ones there); no dims are all of them. None for a dimension out of range or twice.

    A tensor without dimensions takes 0 and -1 for one.
    """
    rank = len(shape)
    if dims is None:
        chosen = set(range(rank))
    else:
        listed = [dims] if isinstance(dims, int) else list(dims)
        if any(not -max(rank, 1) <= dim < max(rank, 1) for dim in listed):
            return None
        chosen = {dim % max(rank, 1) for dim in listed}
        if len(chosen) != len(listed):
            return None
        chosen = chosen or set(range(rank))
    if keepdim:
        return tuple(1 if dim in chosen else size for dim, size in enumerate(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in chosen)


@shape_rule("aten::sum", "aten::sum.dim_IntList")
def _sum(tensor: Any, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Integers and booleans are summed in int64."""
    shape = reduced_shape(tensor.shape, dims, keepdim) if are_plain(tensor) else None
    if shape is None:
        return NotImplemented
    return empty(shape, dtype or (tensor.dtype if tensor.is_floating_point() else torch.int64))


@shape_rule("aten::mean", "aten::mean.dim")
def _mean(tensor: Any, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(tensor, dims, keepdim, dtype=dtype) if tensor.is_floating_point() else NotImplemented


@temporaries_of(_aten.sum.default, _aten.sum.dim_IntList, _aten.prod.default, _aten.prod.dim_int)
def _counted(tensor: Tensor, *_: Any) -> Iterator[Temporary]:
    """Truth values and small integers are cast to integers of 8 bytes first (ReduceOpsUtils.h, `make_reduction`).

    Known limit: another dtype that is asked for by name.
    """
    if tensor.dtype is not torch.int64 and not tensor.is_floating_point() and not tensor.is_complex():
        yield Temporary(tuple(tensor.shape), torch.int64)


@shape_rule("aten::all", "aten::any")
def _truth_of_all(tensor: Any) -> Any:
    """The result is boolean, for uint8 as it always was (ReduceOps.cpp, `get_result_or_bytebool_dtype`)."""
    dtype = torch.uint8 if are_plain(tensor) and tensor.dtype is torch.uint8 else torch.bool
    return empty((), dtype) if are_plain(tensor) else NotImplemented


@shape_rule("aten::linalg_vector_norm")
def _vector_norm(
    tensor: Any, _order: Any = 2, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    return _mean(tensor, dims, keepdim, dtype=dtype) if tensor.numel() else NotImplemented


# -- softmax ----------------------------------------------------------------------------------------------------------

copies_of(_aten._softmax.default, _aten._log_softmax.default)(copy_unless_contiguous)
result_first(_aten._softmax.default, _aten._log_softmax.default)


@shape_rule("aten::_softmax", "aten::_log_softmax")
def _softmax(tensor: Any, dim: int, half_to_float: bool) -> Any:
    """A row-major output (SoftMax.cpp); `half_to_float` widens it."""
    if not are_floating(tensor) or reduced_shape(tensor.shape, dim, True) is None:
        return NotImplemented
    if half_to_float and tensor.dtype is not torch.float16:
        return NotImplemented
    return empty(tensor.shape, torch.float32 if half_to_float else tensor.dtype)


@shape_rule("aten::_safe_softmax")
def _safe_softmax(tensor: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    if not are_floating(tensor) or reduced_shape(tensor.shape, dim, True) is None:
        return NotImplemented
    return empty(tensor.shape, dtype or tensor.dtype)


@temporaries_of(_aten._safe_softmax.default)
def _masked_rows(tensor: Tensor, dim: int, *_: Any) -> Iterator[Temporary]:
    """Where the input is -inf, which rows are so throughout, and the zero that is written there (attention.cpp
    `_safe_softmax`, since 2.11 or earlier)."""
    yield Temporary(tuple(tensor.shape), torch.bool)
    yield Temporary(reduced_shape(tensor.shape, dim, True) or (), torch.bool)
    yield Temporary((), tensor.dtype)


@shape_rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    if not are_plain(grad, output) or grad.shape != output.shape or reduced_shape(grad.shape, dim, True) is None:
        return NotImplemented
    return empty(grad.shape, dtype)


@temporaries_of(_aten._softmax_backward_data.default)
def _products(grad: Tensor, *_: Any) -> Iterator[Temporary]:
    """The gradient times the result, made before the kernel runs (cuda/SoftMax.cu `softmax_backward_cuda_out`)."""
    yield Temporary(tuple(grad.shape), grad.dtype)


# -- losses: negative log-likelihood ----------------------------------------------------------------------------------

_UNREDUCED = 0


def _fits_classes(tensor: Any, target: Any, weight: Any) -> bool:
    """Whether class scores ``(C)``, ``(N, C)`` or ``(N, C, H, W)`` meet a class per sample or pixel."""
    if not are_plain(tensor, target, weight) or not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    if target.dtype not in (torch.int64, torch.uint8) or tensor.dim() not in (1, 2, 4):
        return False
    classes = tensor.shape[1] if tensor.dim() > 1 else tensor.shape[0]
    samples = (*tensor.shape[:1], *tensor.shape[2:]) if tensor.dim() > 1 else ()
    return target.shape == samples and (weight is None or weight.numel() == classes)


@shape_rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def _nll_loss(tensor: Any, target: Any, weight: Any, reduction: int, _ignored: int) -> Any:
    """The loss and the sum of weights that divides it."""
    if not _fits_classes(tensor, target, weight):
        return NotImplemented
    shape = target.shape if reduction == _UNREDUCED else ()
    return empty(shape, tensor.dtype), empty((), tensor.dtype)


@shape_rule("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def _nll_loss_backward(
    grad: Any, tensor: Any, target: Any, weight: Any, _reduction: int, _ignored: int, _total: Any
) -> Any:
    if not _fits_classes(tensor, target, weight) or not are_plain(grad):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype)


# -- losses: differences ----------------------------------------------------------------------------------------------


@shape_rule(*overloads("mse_loss smooth_l1_loss"))
def _reduced_in_place(tensor: Any, target: Any, reduction: int = 1, *_: Any) -> Any:
    """The result is made for the terms, and then resized to one number, which frees nothing (native/Loss.cpp)."""
    terms = _difference(tensor, target, _UNREDUCED)
    return terms if terms is NotImplemented or reduction == _UNREDUCED else terms.resize_(())


@shape_rule("aten::soft_margin_loss")
def _soft_margin_loss(tensor: Any, target: Any, reduction: int = 1) -> Any:
    """The loss is reduced in place, and its terms are like the input, into which the target is multiplied."""
    fits = are_plain(tensor, target) and broadcast((tensor.shape, target.shape)) == tuple(tensor.shape)
    return _reduced_in_place(tensor, tensor, reduction) if fits and are_alike(tensor, target) else NotImplemented


@shape_rule(*overloads("huber_loss"))
def _difference(tensor: Any, target: Any, reduction: int = 1, *_: Any) -> Any:
    if not are_floating(tensor, target):
        return NotImplemented
    if reduction == _UNREDUCED:
        return elementwise(tensor.dtype, tensor, target)
    fits = broadcast((tensor.shape, target.shape)) is not None
    return empty((), tensor.dtype) if fits else NotImplemented


@shape_rule(*overloads("mse_loss smooth_l1_loss huber_loss", "_backward"))
def _difference_backward(grad: Any, tensor: Any, target: Any, *_: Any) -> Any:
    """The result is row-major (native/Loss.cpp: `zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)`)."""
    fits = are_plain(grad, tensor, target) and are_alike(grad, tensor, target)
    shape = broadcast((grad.shape, tensor.shape, target.shape)) if fits else None
    return NotImplemented if shape is None else empty(shape, tensor.dtype)


@shape_rule("aten::binary_cross_entropy")
def _binary_cross_entropy_of_shares(tensor: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """The loss is reduced in place (cuda/Loss.cu: `loss.resize_as_(loss_reduced)`)."""
    fits = are_plain(weight) and tensor.shape == target.shape
    return _reduced_in_place(tensor, target, reduction) if fits else NotImplemented


@shape_rule("aten::binary_cross_entropy_with_logits")
def _binary_cross_entropy(tensor: Any, target: Any, *options: Any) -> Any:
    """`options` are one or two tensors of weights, and the reduction at the end if it isn't the mean."""
    *weights, reduction = options if options and isinstance(options[-1], int) else (*options, 1)
    if not are_plain(*weights) or tensor.shape != target.shape:
        return NotImplemented
    return _difference(tensor, target, reduction)


@shape_rule("aten::binary_cross_entropy_backward")
def _binary_cross_entropy_backward(grad: Any, tensor: Any, target: Any, weight: Any = None, _reduction: int = 1) -> Any:
    """The result is like the input (cuda/Loss.cu: `at::empty_like(input)`)."""
    if not are_plain(grad, tensor, target, weight) or not are_alike(grad, tensor) or tensor.shape != target.shape:
        return NotImplemented
    return elementwise(tensor.dtype, tensor)


@temporaries_of(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default)
def terms(tensor: Tensor, target: Tensor, reduction: int = 1, *_: Any) -> Iterator[Temporary]:
    """One for each element, in the dtype of the inputs; unreduced, they are the result itself."""
    if reduction:
        yield Temporary(tuple(torch.broadcast_shapes(tensor.shape, target.shape)), tensor.dtype)


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
