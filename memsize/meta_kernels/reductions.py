"""Sums, means, extremes, norms, scans and sorting. A reduction's output is row-major, whatever the input's strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memsize.meta_kernels.registry import Rule, shape_rule
from memsize.meta_kernels.strides import Shape
from memsize.meta_kernels.tensors import Tensor, are_plain, empty, like

Dims = int | Sequence[int] | None


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


def _reduced(tensor: Tensor, dims: Dims, keepdim: bool, *dtypes: torch.dtype) -> Any:
    shape = reduced_shape(tensor.shape, dims, keepdim)
    if shape is None or not dtypes:
        return NotImplemented
    results = tuple(empty(shape, dtype) for dtype in dtypes)
    return results[0] if len(results) == 1 else results


def _summed(tensor: Tensor) -> torch.dtype:
    """Whole numbers and truth values are counted in int64."""
    return tensor.dtype if tensor.is_floating_point() else torch.int64


def _is_floating(tensor: Any) -> bool:
    return are_plain(tensor) and tensor.is_floating_point()


@shape_rule("aten::sum.dim_IntList")
def _sum(tensor: Any, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(tensor, dims, keepdim, dtype or _summed(tensor)) if are_plain(tensor) else NotImplemented


@shape_rule("aten::sum", "aten::prod")
def _sum_of_all(tensor: Any, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(tensor, None, dtype=dtype)


@shape_rule("aten::prod.dim_int")
def _product(tensor: Any, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(tensor, dim, keepdim, dtype=dtype)


@shape_rule("aten::mean.dim")
def _mean(tensor: Any, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(tensor, dims, keepdim, dtype or tensor.dtype) if _is_floating(tensor) else NotImplemented


@shape_rule("aten::mean")
def _mean_of_all(tensor: Any, *, dtype: torch.dtype | None = None) -> Any:
    return _mean(tensor, None, dtype=dtype)


@shape_rule("aten::var.correction", "aten::std.correction")
def _deviation(tensor: Any, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _reduced(tensor, dims, keepdim, tensor.dtype) if _is_floating(tensor) else NotImplemented


@shape_rule("aten::var_mean.correction", "aten::std_mean.correction")
def _deviation_and_mean(tensor: Any, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _reduced(tensor, dims, keepdim, tensor.dtype, tensor.dtype) if _is_floating(tensor) else NotImplemented


@shape_rule("aten::logsumexp")
def _logsumexp(tensor: Any, dims: Dims, keepdim: bool = False) -> Any:
    return _reduced(tensor, dims, keepdim, tensor.dtype) if _is_floating(tensor) and dims else NotImplemented


@shape_rule("aten::linalg_vector_norm")
def _vector_norm(
    tensor: Any, _order: Any = 2, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not _is_floating(tensor) or tensor.numel() == 0:
        return NotImplemented
    return _reduced(tensor, dims, keepdim, dtype or tensor.dtype)


@shape_rule("aten::norm.ScalarOpt_dim")
def _norm(tensor: Any, _order: Any, dims: Dims, keepdim: bool = False) -> Any:
    return _reduced(tensor, dims, keepdim, tensor.dtype) if _is_floating(tensor) else NotImplemented


@shape_rule("aten::norm.Scalar")
def _norm_of_all(tensor: Any, _order: Any = 2) -> Any:
    return _norm(tensor, None, None)


@shape_rule("aten::amax", "aten::amin")
def _extreme(tensor: Any, dims: Dims = (), keepdim: bool = False) -> Any:
    return _reduced(tensor, dims, keepdim, tensor.dtype) if _has_values(tensor) else NotImplemented


def _has_values(tensor: Any) -> bool:
    """Whether there is a value to pick: an extreme of nothing is an error."""
    return are_plain(tensor) and tensor.numel() > 0


@shape_rule("aten::max", "aten::min")
def _extreme_of_all(tensor: Any) -> Any:
    return _extreme(tensor, None)


@shape_rule("aten::max.dim", "aten::min.dim")
def _extreme_and_index(tensor: Any, dim: int, keepdim: bool = False) -> Any:
    return _reduced(tensor, dim, keepdim, tensor.dtype, torch.int64) if _has_values(tensor) else NotImplemented


@shape_rule("aten::argmax", "aten::argmin")
def _extreme_index(tensor: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _reduced(tensor, dim, keepdim, torch.int64) if _has_values(tensor) else NotImplemented


@shape_rule("aten::any.dim", "aten::any.dims", "aten::all.dim", "aten::all.dims")
def _truth(tensor: Any, dims: Dims = None, keepdim: bool = False) -> Any:
    """Bytes stay bytes, for the sake of old programs (ReduceOps.cpp)."""
    if not are_plain(tensor) or (isinstance(dims, Sequence) and not dims):
        return NotImplemented
    return _reduced(tensor, dims, keepdim, torch.uint8 if tensor.dtype is torch.uint8 else torch.bool)


@shape_rule("aten::any", "aten::all")
def _truth_of_all(tensor: Any) -> Any:
    return _truth(tensor)


# -- scans and sorting ------------------------------------------------------------------------------------------------


@shape_rule("aten::cumsum", "aten::cumprod")
def _scan(tensor: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Row-major (structured kernel, ReduceOps.cpp)."""
    if not are_plain(tensor) or reduced_shape(tensor.shape, dim, True) is None:
        return NotImplemented
    return empty(tensor.shape, dtype or _summed(tensor))


def _sort_rule(dim_of: Callable[..., int]) -> Rule:
    def rule(tensor: Any, *args: Any, **options: Any) -> Any:
        if not are_plain(tensor) or reduced_shape(tensor.shape, dim_of(*args, **options), True) is None:
            return NotImplemented
        return like(tensor), like(tensor, torch.int64)

    return rule


shape_rule("aten::sort")(_sort_rule(lambda dim=-1, descending=False: dim))
shape_rule("aten::sort.stable")(_sort_rule(lambda stable=None, dim=-1, descending=False: dim))


@shape_rule("aten::topk")
def _topk(tensor: Any, count: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not are_plain(tensor) or not tensor.dim() or not -tensor.dim() <= dim < tensor.dim():
        return NotImplemented
    shape = list(tensor.shape)
    if not 0 <= count <= shape[dim]:
        return NotImplemented
    shape[dim] = count
    return empty(shape, tensor.dtype), empty(shape, torch.int64)
