"""Ops over lists of tensors, which optimizers and gradient clipping are made of. An in-place one returns None.

Only norms take temporaries (aten/src/ATen/native/cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`;
MultiTensorApply.cuh, `kChunkSize`).

A list has one entry per parameter, so a rule does as little per entry as it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memsize.kernels.registry import Temporary, overloads, shape_rule, temporaries_of
from memsize.kernels.tensors import META, Tensor, accumulation, empty
from memsize.torch_internals.meta import is_meta

_UNARY = (
    "abs neg sqrt rsqrt reciprocal exp expm1 log log1p log2 log10 sign sigmoid tanh floor ceil round trunc cos sin erf"
)
_BINARY = "sub maximum minimum clamp_min clamp_max pow lerp add mul div"
_WITH_ONE_VALUE = "add mul div addcmul addcdiv"
_CHUNK = 65_536
_FAST_ORDERS = (1, 2, float("inf"))


def _fit(tensors: Any, *others: Any) -> bool:
    """Whether `tensors` are dense `meta` tensors of floating values, and each list beside them has the same shapes
    (or single values) and dtypes. Numbers, lists of numbers and single values go with every tensor."""
    if not tensors or not all(is_meta(t) and t.layout is torch.strided and t.is_floating_point() for t in tensors):
        return False
    return all(_go_together(tensors, other) for other in others)


def _go_together(tensors: Sequence[Tensor], other: Any) -> bool:
    if isinstance(other, Tensor):
        return other.dim() == 0
    if not isinstance(other, (list, tuple)):
        return not isinstance(other, complex)
    if len(other) != len(tensors):
        return False
    return all(
        is_meta(o) and o.layout is t.layout and (o.shape == t.shape or not o.dim()) and o.dtype is t.dtype
        if isinstance(o, Tensor)
        else isinstance(o, (int, float))
        for t, o in zip(tensors, other, strict=True)
    )


def _list_ops(ending: str) -> tuple[str, ...]:
    """The overloads of the list ops, whose names end in `ending`: ``"_"`` in place."""
    names = {
        _UNARY: ("",),
        _BINARY: (".Scalar", ".ScalarList", ".List"),
        _WITH_ONE_VALUE: (".Tensor",),
        "addcmul addcdiv": (".Scalar", ".ScalarList"),
    }
    every = [overloads(ops, *(ending + suffix for suffix in suffixes)) for ops, suffixes in names.items()]
    return tuple(name.replace("::", "::_foreach_") for group in every for name in group)


@shape_rule(*_list_ops("_"), "aten::_foreach_zero_")
def _in_place(tensors: Any, *others: Any, **options: Any) -> Any:
    return None if _fit(tensors, *others, *options.values()) else NotImplemented


@shape_rule(*_list_ops(""))
def _out_of_place(tensors: Any, *others: Any, **options: Any) -> Any:
    """New tensors with the same strides, where all are row-major."""
    if not _fit(tensors, *others, *options.values()) or not all(t.is_contiguous() for t in tensors):
        return NotImplemented
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META) for t in tensors]


@shape_rule("aten::_foreach_norm.Scalar")
def _norms(tensors: Any, _order: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """A number for each tensor, in its own dtype."""
    return [empty((), dtype or t.dtype) for t in tensors] if _fit(tensors) else NotImplemented


@shape_rule(*overloads("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_", "", ".tensor_lr"))
def _fused(parameters: Any, gradients: Any, *states: Any, **_: Any) -> Any:
    """A fused optimizer writes its lists in place and makes nothing. A list of states that it doesn't use is empty."""
    if not _fit(parameters) or len(gradients) != len(parameters):
        return NotImplemented
    return None if all(len(state) in (0, len(parameters)) for state in states) else NotImplemented


@shape_rule("aten::_amp_foreach_non_finite_check_and_unscale_")
def _unscale(gradients: Any, found_inf: Any, inverse_scale: Any) -> Any:
    """GradScaler's search for infinities: divides in place and writes whether there are any."""
    values = (found_inf, inverse_scale)
    return None if _fit(gradients) and all(v.numel() == 1 and v.is_floating_point() for v in values) else NotImplemented


@temporaries_of(torch.ops.aten._foreach_norm.Scalar)
def _norm_temporaries(tensors: Any, order: Any = 2, dtype: torch.dtype | None = None) -> Iterator[Temporary]:
    """Yield the norms of chunks: each tensor has room for as many chunks as the largest tensor has, before a second
    kernel combines them. Other orders, and lists of several dtypes, are computed tensor by tensor."""
    alike = all(tensor.dtype is tensors[0].dtype for tensor in tensors)
    if order in _FAST_ORDERS and alike and tensors[0].is_floating_point():
        chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
        yield Temporary((len(tensors) * chunks,), accumulation(dtype or tensors[0].dtype))
