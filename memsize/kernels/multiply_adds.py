"""The number of multiply-adds of an op: the formulas of PyTorch's `FlopCounterMode`, and those that it lacks.

Both count products and convolutions and nothing else: no biases, norms, activations, embeddings or softmax. A mask
spares attention nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from memsize.torch_internals.flop_counter import flop_registry, shape_wrapper
from memsize.torch_internals.sparse_tensors import PARTS, stored_elements

FLOPS_OF_ONE: Final = 2
"""The registry counts a multiplication and an addition as two operations."""

Formula = Callable[..., int]
"""Takes an op's arguments, and its result as `out_val`; returns its floating-point operations."""


def formula_of(overload: Any) -> Formula | None:
    """Return the formula of an overload; None where it does no products."""
    packet = overload._overloadpacket
    formula: Any = _OWN.get(packet._qualified_op_name) or flop_registry.get(packet)
    if getattr(formula, "__code__", None) is not _BY_SHAPES:
        return formula  # type: ignore[no-any-return]

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        named = {name: _shapes(value) for name, value in kwargs.items()}
        return formula.__wrapped__(*map(_shapes, args), out_shape=_shapes(out_val), **named)  # type: ignore[no-any-return]

    return counted


_BY_SHAPES: Final = shape_wrapper(lambda: 0).__code__
"""The code of formulas that take shapes: looking for tensors in every argument takes them longer than to count."""


def _shapes(value: Any) -> Any:
    """Return `value` with the shape of each tensor in its place."""
    if isinstance(value, Tensor):
        return value.shape
    return type(value)(map(_shapes, value)) if type(value) in (list, tuple) else value


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and their sums over values, for every head of the query. Some releases of PyTorch refuse shared keys."""
    return FLOPS_OF_ONE * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _recurrent(tensor: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Each matrix is multiplied once for each step of each sequence."""
    steps = tensor.shape[:-1].numel()
    return FLOPS_OF_ONE * steps * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Every row of `a` meets one group of `b`, or of two batches its own; without any, the groups share out `k`."""
    rows = a.shape[0] * a.shape[1] if a.dim() == b.dim() == 3 else a.shape[-2]
    return FLOPS_OF_ONE * rows * a.shape[-1] * b.shape[-1]


def _convolution(tensor: Tensor, weight: Tensor, *settings: Any, out_val: Tensor) -> int:
    """Every weight is multiplied once at each position that the kernel slides over."""
    transposed = settings[4]
    positions = (tensor if transposed else out_val).shape[2:].numel()
    return FLOPS_OF_ONE * tensor.shape[0] * positions * weight.numel()


def _product(*arguments: Any, **_: Any) -> int:
    """Every element that a matrix stores is multiplied for each column of the other, or for each row."""
    one, other = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]  # a dtype may follow
    if other.layout in PARTS:
        return FLOPS_OF_ONE * one.shape[0] * stored_elements(other)
    return FLOPS_OF_ONE * stored_elements(one) * other.shape[1]


_OWN: Final[dict[str, Formula]] = {
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "memsize::flex_attention": _attention,
    "aten::convolution": _convolution,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_grouped_mm": _grouped,
    "aten::mm": _product,
    "aten::addmm": _product,
    "aten::_sparse_addmm": _product,
}
