"""Elementwise ops: one input, two inputs with type promotion, comparisons, choices, each also in place; activation
functions with their gradients, and dropout; and the ops over lists of tensors.

The promoted dtype comes from `torch.result_type` itself, the strides from `tensors.elementwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from memsize.kernels import strides as layout
from memsize.kernels.registry import LAST_FIRST, Rule, Temporary, overloads, shape_rule, temporaries_of
from memsize.kernels.tensors import (
    META,
    Tensor,
    accumulation,
    are_alike,
    are_floating,
    are_plain,
    elementwise,
    empty,
    like,
    mapped,
    overlaps,
    sorted_elementwise,
)
from memsize.torch_internals.meta import is_meta

_FLOATING = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid erf erfc erfinv reciprocal frac trunc ceil floor round logit digamma lgamma "
    "gelu silu mish elu celu selu hardswish hardsigmoid hardtanh leaky_relu threshold"
)
_SIGNED = "neg abs sign sgn"
_NUMBERS = (".Tensor", ".Scalar")
_NUMBERS_IN_PLACE = ("_.Tensor", "_.Scalar")

Promotion = Callable[[torch.dtype], "torch.dtype | None"]


def _same(dtype: torch.dtype) -> torch.dtype | None:
    """Numbers keep the common dtype; booleans have rules of their own in each op."""
    return None if dtype is torch.bool or dtype.is_complex else dtype


def _floating(dtype: torch.dtype) -> torch.dtype | None:
    """Integers become the default floating dtype."""
    return None if dtype.is_complex else dtype if dtype.is_floating_point else torch.get_default_dtype()


def _real(dtype: torch.dtype) -> torch.dtype | None:
    """Powers of integers depend on the exponent's sign."""
    return dtype if dtype.is_floating_point else None


def _integral(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype.is_floating_point or dtype.is_complex else dtype


def _truth(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype.is_complex else torch.bool


# -- one input --------------------------------------------------------------------------------------------------------


@shape_rule(*overloads(_FLOATING + " softplus softshrink hardshrink"))
def _unary(tensor: Any, *_: Any, **__: Any) -> Any:
    return mapped(tensor) if are_floating(tensor) else NotImplemented


@shape_rule(*overloads(_SIGNED), "aten::relu")
def _signed(tensor: Any) -> Any:
    return mapped(tensor) if are_plain(tensor) and tensor.dtype is not torch.bool else NotImplemented


@shape_rule("aten::bitwise_not")
def _bitwise_not(tensor: Any) -> Any:
    return mapped(tensor) if are_plain(tensor) and not tensor.is_floating_point() else NotImplemented


@shape_rule(*overloads(_FLOATING, "_"), *overloads(_SIGNED, "_"), "aten::relu_")
def _unary_in_place(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor if are_floating(tensor) and not overlaps(tensor) else NotImplemented


@shape_rule("aten::logical_not", "aten::isnan", "aten::isinf", "aten::isfinite", "aten::signbit")
def _truth_of(tensor: Any) -> Any:
    return mapped(tensor, torch.bool) if are_plain(tensor) else NotImplemented


# -- two inputs -------------------------------------------------------------------------------------------------------


def _operands(*values: Any) -> list[Tensor] | None:
    """The `meta` tensors among tensors and numbers, None when a rule can't read one of them.

    A tensor without dimensions may live on the CPU beside CUDA tensors: it is read like a number.
    """
    tensors = []
    for value in values:
        if not isinstance(value, Tensor):
            if isinstance(value, complex):
                return None
        elif is_meta(value):
            if not are_plain(value):
                return None
            tensors.append(value)
        elif value.dim():
            return None
    return tensors


def _combined(dtype: torch.dtype, values: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """The output of an op over `values`, `tensors` those of them that are `meta` tensors."""
    if len(values) > len(tensors) and len(tensors) == 1:
        only = tensors[0]
        return sorted_elementwise(dtype, only.shape, only) if only.dim() else elementwise(dtype, only)
    return elementwise(dtype, *tensors) if tensors else NotImplemented


def binary_rule(promote: Promotion) -> Rule:
    """The rule of an op over two tensors or numbers, whose common dtype goes through `promote`.

    `alpha` may be any number for floating dtypes only; elsewhere PyTorch's kernel checks it.
    """

    def rule(one: Any, other: Any, *_: Any, **options: Any) -> Any:
        tensors = _operands(one, other)
        if not tensors:
            return NotImplemented
        dtype = promote(torch.result_type(one, other))
        if dtype is None or (options and not dtype.is_floating_point):
            return NotImplemented
        return _combined(dtype, (one, other), tensors)

    return rule


def binary_in_place_rule(promote: Promotion) -> Rule:
    """The same, written into the first operand, whose shape and dtype must be able to hold the result."""

    def rule(one: Any, other: Any, *_: Any, **options: Any) -> Any:
        tensors = _operands(one, other)
        if not tensors or tensors[0] is not one or overlaps(one):
            return NotImplemented
        dtype = promote(torch.result_type(one, other))
        fits = dtype is not None and torch.can_cast(dtype, one.dtype) and (dtype.is_floating_point or not options)
        return one if fits and _reaches(one, *tensors[1:]) else NotImplemented

    return rule


def _reaches(target: Tensor, *others: Tensor) -> bool:
    """Whether each of `others` expands to the shape of `target`."""
    shape = target.shape
    return all(t.shape == shape or layout.broadcast((shape, t.shape)) == tuple(shape) for t in others)


_whole = binary_rule(_same)
_quotient = binary_rule(_floating)
_comparison = binary_rule(_truth)

_ARITHMETIC = "add sub mul remainder fmod"
_COMPARISONS = "eq ne lt le gt ge"
_LOGICAL = "logical_and logical_or logical_xor"
_BITWISE = "bitwise_and bitwise_or bitwise_xor"
shape_rule(*overloads(_ARITHMETIC, *_NUMBERS), *overloads("maximum minimum fmax fmin floor_divide"))(_whole)
_power = binary_rule(_real)
shape_rule(*overloads("pow", ".Tensor_Tensor", ".Tensor_Scalar"))(_power)
shape_rule(*overloads("div", *_NUMBERS), *overloads("xlogy", ".Tensor", ".Scalar_Other", ".Scalar_Self"))(_quotient)
shape_rule("aten::atan2")(_quotient)
shape_rule(*overloads(_COMPARISONS, *_NUMBERS), *overloads(_LOGICAL))(_comparison)
shape_rule(*overloads(_BITWISE, *_NUMBERS))(binary_rule(_integral))
shape_rule(*overloads(_ARITHMETIC, *_NUMBERS_IN_PLACE))(binary_in_place_rule(_same))
shape_rule(*overloads("pow", *_NUMBERS_IN_PLACE))(binary_in_place_rule(_real))
shape_rule(*overloads("div", *_NUMBERS_IN_PLACE))(binary_in_place_rule(_floating))
shape_rule(*overloads(_COMPARISONS, *_NUMBERS_IN_PLACE), *overloads(_LOGICAL, "_"))(binary_in_place_rule(_truth))
shape_rule(*overloads(_BITWISE, *_NUMBERS_IN_PLACE))(binary_in_place_rule(_integral))


@shape_rule("aten::rsub.Tensor", "aten::rsub.Scalar")
def _reversed_difference(one: Any, other: Any, *_: Any, **options: Any) -> Any:
    return _whole(other, one, **options)


@shape_rule("aten::pow.Scalar")
def _power_of_number(base: Any, exponent: Any) -> Any:
    """Row-major, whatever the exponent's strides (Pow.cpp)."""
    result = _power(base, exponent)
    return result if result is NotImplemented else empty(result.shape, result.dtype)


# -- three inputs -----------------------------------------------------------------------------------------------------


@shape_rule("aten::where.self")
def _where(condition: Any, one: Any, other: Any) -> Any:
    tensors = _operands(condition, one, other)
    if tensors is None or condition.dtype is not torch.bool or len(tensors) < 3:
        return NotImplemented
    return _combined(torch.result_type(one, other), (), tensors)


@shape_rule("aten::addcmul_", "aten::addcdiv_", "aten::lerp_.Scalar", "aten::lerp_.Tensor")
def _blended_in_place(one: Any, two: Any, three: Any = None, **_: Any) -> Any:
    """Tensors of one floating dtype; mixed ones promote, and PyTorch's kernel does that."""
    tensors = _operands(one, two, three)
    if not tensors or tensors[0] is not one or not are_alike(*tensors) or not one.is_floating_point():
        return NotImplemented
    return one if _reaches(one, *tensors[1:]) and not overlaps(one) else NotImplemented


@shape_rule("aten::masked_fill.Scalar", "aten::masked_fill.Tensor")
def _masked_fill(tensor: Any, mask: Any, value: Any) -> Any:
    """A row-major copy, filled in place (aten/src/ATen/native/cuda/Indexing.cu clones to contiguous)."""
    if not are_plain(tensor, mask) or mask.dtype is not torch.bool or _operands(value) is None:
        return NotImplemented
    shape = layout.broadcast((tensor.shape, mask.shape))
    if shape is None or not torch.can_cast(torch.result_type(tensor, value), tensor.dtype):
        return NotImplemented
    return empty(shape, tensor.dtype)


@shape_rule("aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor")
def _masked_fill_in_place(tensor: Any, mask: Any, value: Any) -> Any:
    if not are_plain(tensor, mask) or mask.dtype is not torch.bool or _operands(value) is None:
        return NotImplemented
    fits = torch.can_cast(torch.result_type(tensor, value), tensor.dtype)
    return tensor if fits and _reaches(tensor, mask) and not overlaps(tensor) else NotImplemented


# -- bounds -----------------------------------------------------------------------------------------------------------


@shape_rule("aten::clamp", "aten::clamp_min", "aten::clamp_max")
def _clamp(tensor: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    return mapped(tensor) if _bounded(tensor, low, high, min, max) else NotImplemented


@shape_rule("aten::clamp_", "aten::clamp_min_", "aten::clamp_max_")
def _clamp_in_place(tensor: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    return tensor if _bounded(tensor, low, high, min, max) and not overlaps(tensor) else NotImplemented


def _bounded(tensor: Any, *bounds: Any) -> bool:
    """Numbers as bounds, at least one, that don't promote the tensor."""
    numbers = [bound for bound in bounds if bound is not None]
    if not numbers or not are_plain(tensor) or tensor.dtype is torch.bool:
        return False
    return all(isinstance(b, (int, float)) and torch.result_type(tensor, b) is tensor.dtype for b in numbers)


shape_rule("aten::clamp_min.Tensor", "aten::clamp_max.Tensor")(binary_rule(_same))
shape_rule("aten::clamp_min_.Tensor", "aten::clamp_max_.Tensor")(binary_in_place_rule(_same))


# -- gradients of activation functions --------------------------------------------------------------------------------

_READ = {
    (0, 1): (
        *overloads("gelu mish hardswish hardsigmoid hardtanh softplus sigmoid tanh log_sigmoid", "_backward"),
        *overloads("rrelu_with_noise rrelu_with_noise_backward _prelu_kernel"),
    ),
    # Activation.cpp: these kernels read the input first, so that its strides decide.
    (1, 0): overloads("threshold leaky_relu", "_backward"),
    (0, 5): ("aten::elu_backward",),
}
"""The ops, by the positions of the operands that their kernels read, in the order in which they read them."""


def _read_in_order(positions: tuple[int, ...], *args: Any, **_: Any) -> Any:
    operands = [args[position] for position in positions]
    return elementwise(operands[0].dtype, *operands) if are_floating(*operands) else NotImplemented


for _positions, _names in _READ.items():
    shape_rule(*_names)(partial(_read_in_order, _positions))


@shape_rule("aten::_prelu_kernel_backward")
def _prelu_backward(grad: Any, tensor: Any, weight: Any) -> Any:
    if not are_plain(grad, tensor, weight) or not are_alike(grad, tensor, weight):
        return NotImplemented
    result = elementwise(grad.dtype, tensor, weight, grad)
    return result if result is NotImplemented else (result, like(result))


@shape_rule("aten::log_sigmoid_forward")
def _log_sigmoid(tensor: Any) -> Any:
    """CUDA keeps no buffer (Activation.cpp: an empty one)."""
    return (like(tensor), empty((0,), tensor.dtype)) if are_floating(tensor) else NotImplemented


@shape_rule("aten::glu_backward")
def _glu_backward(grad: Any, tensor: Any, _dim: int) -> Any:
    """Row-major, whatever the input's layout (cuda/GatedLinearUnit.cpp resizes a new tensor)."""
    if not are_plain(grad, tensor) or not are_alike(grad, tensor):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype) if grad.numel() * 2 == tensor.numel() else NotImplemented


# -- dropout ----------------------------------------------------------------------------------------------------------


LAST_FIRST.add(torch.ops.aten.native_dropout.default)


@shape_rule("aten::native_dropout")
def _dropout(tensor: Any, _probability: float, _train: bool | None) -> Any:
    """The result and a mask of one byte per element, which is allocated first (cuda/Dropout.cu, `dropout_cuda`)."""
    return (like(tensor), like(tensor, torch.bool)) if are_floating(tensor) else NotImplemented


@shape_rule("aten::native_dropout_backward")
def _dropout_backward(grad: Any, mask: Any, _scale: float) -> Any:
    if not are_plain(grad, mask) or mask.dtype is not torch.bool or grad.shape != mask.shape:
        return NotImplemented
    return like(grad)


# -- lists of tensors --------------------------------------------------------------------------------------------------

# Optimizers and gradient clipping are made of these ops. An in-place one returns None. Only norms take temporaries
# (aten/src/ATen/native/cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`; MultiTensorApply.cuh, `kChunkSize`).
# A list has one entry per parameter, so a rule does as little per entry as it can.

_LIST_UNARY = (
    "abs neg sqrt rsqrt reciprocal exp expm1 log log1p log2 log10 sign sigmoid tanh floor ceil round trunc cos sin erf"
)
_LIST_BINARY = "sub maximum minimum clamp_min clamp_max pow lerp add mul div"
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
        _LIST_UNARY: ("",),
        _LIST_BINARY: (".Scalar", ".ScalarList", ".List"),
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
def _list_norms(tensors: Any, _order: Any = 2, dtype: torch.dtype | None = None) -> Any:
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
