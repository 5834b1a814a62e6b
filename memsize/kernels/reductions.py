"""Sums, means and norms; softmax and its gradient. Every output is row-major, whatever the input's strides.

CUDA's softmax makes its argument contiguous (aten/src/ATen/native/cuda/SoftMax.cu, `host_softmax`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memsize.kernels.registry import (
    Temporary,
    copies_of,
    copy_unless_contiguous,
    result_first,
    shape_rule,
    temporaries_of,
)
from memsize.kernels.strides import Shape
from memsize.kernels.tensors import are_plain, empty

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


@shape_rule("aten::sum.dim_IntList")
def _sum(tensor: Any, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Integers and booleans are summed in int64."""
    shape = reduced_shape(tensor.shape, dims, keepdim) if are_plain(tensor) else None
    if shape is None:
        return NotImplemented
    return empty(shape, dtype or (tensor.dtype if tensor.is_floating_point() else torch.int64))


@shape_rule("aten::sum")
def _sum_of_all(tensor: Any, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(tensor, None, dtype=dtype)


@shape_rule("aten::mean.dim")
def _mean(tensor: Any, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(tensor, dims, keepdim, dtype=dtype) if tensor.is_floating_point() else NotImplemented


@shape_rule("aten::mean")
def _mean_of_all(tensor: Any, *, dtype: torch.dtype | None = None) -> Any:
    return _mean(tensor, None, dtype=dtype)


@shape_rule("aten::all", "aten::any")
def _truth_of_all(tensor: Any) -> Any:
    """Boolean, for uint8 as it always was (ReduceOps.cpp, `get_result_or_bytebool_dtype`)."""
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
    if not are_plain(tensor) or not tensor.is_floating_point() or reduced_shape(tensor.shape, dim, True) is None:
        return NotImplemented
    if half_to_float and tensor.dtype is not torch.float16:
        return NotImplemented
    return empty(tensor.shape, torch.float32 if half_to_float else tensor.dtype)


@shape_rule("aten::_safe_softmax")
def _safe_softmax(tensor: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Only the result; on the way CUDA also makes a softmax, a comparison and its reduction."""
    if not are_plain(tensor) or not tensor.is_floating_point() or reduced_shape(tensor.shape, dim, True) is None:
        return NotImplemented
    return empty(tensor.shape, dtype or tensor.dtype)


@shape_rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    if not are_plain(grad, output) or grad.shape != output.shape or reduced_shape(grad.shape, dim, True) is None:
        return NotImplemented
    return empty(grad.shape, dtype)


@temporaries_of(_aten._softmax_backward_data.default)
def _products(grad: Tensor, *_: Any) -> Iterator[Temporary]:
    """The gradient times the result, made before the kernel runs; the logarithm's kernel needs none.
    Source: cuda/SoftMax.cu `softmax_backward_cuda_out`.
    """
    yield Temporary(tuple(grad.shape), grad.dtype)
