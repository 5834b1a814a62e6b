"""The products of Transformer Engine's layers, with the norm before them and the activation between them.

Source: TransformerEngine 2.20, `pytorch/module/linear.py`, `layernorm_linear.py`, `layernorm_mlp.py` and
`grouped_linear.py`: what they save and clear, and the workspaces of `pytorch/cpp_extensions/gemm.py`. Known limits:
partial sums of norms' backward are not counted, and of grouped products those of cuBLASLt's own kernel are not
simulated (`use_grouped_tensor`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memsize.virtual.packages.float8 import Numerics, Operands

_WORKSPACE: Final = {True: (32 << 20) + 1024, False: 4 << 20}
"""cuBLAS's workspace from Hopper on, and before."""


def multiply(rows: int, columns: int, like: Tensor, numerics: Numerics, streams: int = 0) -> Tensor:
    """An empty product, after Transformer Engine's own workspaces for cuBLAS, which stay: one, or one of each stream
    that grouped products use.
    """
    package, name = vars(sys.modules["transformer_engine"]), "grouped_workspaces" if streams else "workspace"
    if name not in package:
        size = _WORKSPACE[torch.cuda.get_device_capability() >= (9, 0)]
        package[name] = [torch.empty(size, dtype=torch.uint8, device=like.device) for _ in range(streams or 1)]
    return like.new_empty((rows, columns), dtype=numerics.dtype)


def unread_gradient(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """The gradient to return for a weight whose own was added to its `main_grad`: all weights of a shape share it."""
    unread = vars(sys.modules["transformer_engine"]).setdefault("unread_gradients", {})
    key = tuple(shape), dtype
    if key not in unread:
        unread[key] = torch.empty(key[0], dtype=dtype, device="cuda", requires_grad=False)
    gradient: Tensor = unread[key].detach()
    return gradient.zero_() if zero else gradient


def accumulated(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The same where Megatron's data parallelism waits for one; None: the weight gets none."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return unread_gradient(weight.shape, dtype)


def _free(tensors: tuple[Tensor, ...]) -> None:
    """Free tensors that a layer has allocated and saved."""
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)


class _Needs(NamedTuple):
    """The gradients that a product's backward makes."""

    of_input: bool
    of_weight: bool
    of_bias: bool


def _backward(
    gradient: Operands, weight: Tensor, needs: _Needs, numerics: Numerics
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a product's input, its `weight`, and its bias."""
    like, (rows, columns) = gradient.rows[0], weight.shape
    of_bias = like.new_empty((rows,), dtype=numerics.dtype) if needs.of_bias else None
    of_input = multiply(len(like), columns, like, numerics) if needs.of_input else None
    of_weight = None
    if needs.of_weight:
        of_weight = (
            accumulated(weight, numerics.dtype) if numerics.accumulates else multiply(rows, columns, like, numerics)
        )
    return of_input, of_weight, of_bias


def _normalized(x: Tensor, kind: str, numerics: Numerics, keeps: bool) -> tuple[Operands, tuple[Tensor, ...]]:
    """A norm's output as a product reads it, and the statistics that its backward needs."""
    statistics = tuple(x.new_empty((len(x),), dtype=torch.float32) for _ in range(2 if kind == "LayerNorm" else 1))
    whole = None if numerics.fuses_norms else torch.empty_like(x)
    operands = numerics.operands(x if whole is None else whole, columns=keeps)
    return operands, statistics


def _norm_gradients(x: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, ...]:
    of_x = torch.empty_like(x)
    return of_x, *(torch.empty_like(weight) for _ in range(2 if kind == "LayerNorm" else 1))


class LinearProduct(torch.autograd.Function):
    """A linear layer. `cache` has the float8 weight of former micro-batches, or takes it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, numerics: Numerics, cache: list[Operands] | None
    ) -> Tensor:
        operands = numerics.operands(x.reshape(-1, x.shape[-1]), columns=ctx.needs_input_grad[1])
        weights = numerics.weight(weight, ctx.needs_input_grad[0], cache)
        if bias is not None:
            bias = bias.to(numerics.dtype)
        rows = numerics.parallel.gathered(operands.rows, "column")
        out = numerics.parallel.reduced(multiply(len(rows[0]), len(weight), x, numerics), "row")
        saved = operands.for_backward(ctx.needs_input_grad[1])
        ctx.numerics, ctx.shape, ctx.weight, ctx.count = numerics, x.shape, weight, len(saved)
        ctx.save_for_backward(*saved, *weights.all, bias)
        return out.view(-1, *x.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        numerics, needs = ctx.numerics, _Needs(*ctx.needs_input_grad[:3])
        (gradient,) = numerics.parallel.gathered((gradient.reshape(-1, len(ctx.weight)).contiguous(),), "row")
        operands = numerics.operands(gradient, columns=needs.of_weight)
        _inputs = numerics.parallel.gathered(ctx.saved_tensors[: ctx.count], "column")
        to_x, to_weight, to_bias = _backward(operands, ctx.weight, needs, numerics)
        if to_x is not None:
            to_x = numerics.parallel.reduced(to_x, "column").view(ctx.shape)
        return to_x, to_weight, to_bias, None, None


class NormProduct(torch.autograd.Function):
    """A norm and a linear layer. The norm's input and output are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        numerics: Numerics,
        cache: list[Operands] | None,
    ) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1]).to(numerics.dtype)
        operands, statistics = _normalized(x, kind, numerics, ctx.needs_input_grad[3])
        weights = numerics.weight(weight, True, cache)
        rows = numerics.parallel.gathered(operands.rows, "column")
        out = multiply(len(rows[0]), len(weight), x, numerics)
        saved = operands.for_backward(ctx.needs_input_grad[3])
        ctx.numerics, ctx.kind, ctx.shape, ctx.weight, ctx.count = numerics, kind, shape, weight, len(saved)
        ctx.save_for_backward(*saved, x, scale, *statistics, *weights.all)
        return out.view(-1, *shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        normalized, (x, scale) = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count : ctx.count + 2]
        gradient = gradient.reshape(-1, len(ctx.weight)).contiguous()
        needs = _Needs(True, *ctx.needs_input_grad[3:5])
        operands = ctx.numerics.operands(gradient, columns=needs.of_weight)
        _inputs = ctx.numerics.parallel.gathered(normalized, "column")
        of_norm, of_weight, of_bias = _backward(operands, ctx.weight, needs, ctx.numerics)
        of_norm = ctx.numerics.parallel.reduced(of_norm, "column")
        _free(normalized)
        of_x, of_scale, *of_shift = _norm_gradients(x, scale, ctx.kind)
        del of_norm
        return (
            *(of_x.view(ctx.shape), of_scale, of_shift[0] if of_shift else None),
            *(of_weight, of_bias, None, None, None),
        )


class NormProducts(torch.autograd.Function):
    """A norm, a linear layer, an activation and a second linear layer, whose inputs are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        scale, _, weight1, _, weight2, _, (kind, activation), numerics, cache = others
        shape, x = x.shape, x.reshape(-1, x.shape[-1]).to(numerics.dtype)
        normalized, statistics = _normalized(x, kind, numerics, ctx.needs_input_grad[3])
        first = numerics.weight(weight1, True, cache and cache[0])
        second = numerics.weight(weight2, True, cache and cache[1])
        inner = multiply(len(x), len(weight1), x, numerics)
        whole = inner.new_empty((len(x), weight2.shape[1])) if not numerics.fuses_activations else inner
        activated = numerics.operands(
            whole, columns=ctx.needs_input_grad[5], shape=(len(x), weight2.shape[1]), new=True
        )
        del whole
        out = multiply(len(x), len(weight2), x, numerics)
        parts = normalized.for_backward(ctx.needs_input_grad[3]), activated.for_backward(ctx.needs_input_grad[5])
        ctx.numerics, ctx.kind, ctx.activation, ctx.counts = numerics, kind, activation, [len(part) for part in parts]
        ctx.shape, ctx.weights = shape, (weight1, weight2)
        ctx.save_for_backward(*parts[0], *parts[1], inner, x, scale, *statistics, *first.all, *second.all)
        return out.view(*shape[:-1], len(weight2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved, numerics, (first, second) = ctx.saved_tensors, ctx.numerics, ctx.weights
        normalized, activated = saved[: ctx.counts[0]], saved[ctx.counts[0] : sum(ctx.counts)]
        inner, x, scale = saved[sum(ctx.counts) :][:3]
        gradient = gradient.reshape(-1, len(second)).contiguous()
        needs = _Needs(True, *ctx.needs_input_grad[5:7])
        of_out = numerics.operands(gradient, columns=needs.of_weight)
        of_activated, to_weight2, to_bias2 = _backward(of_out, second, needs, numerics)
        _free(activated)
        needs = _Needs(True, *ctx.needs_input_grad[3:5])
        whole = inner if numerics.fuses_gradient_of(ctx.activation) else torch.empty_like(inner)
        of_inner = numerics.operands(whole, columns=needs.of_weight, new=True)
        del whole
        _free((inner,))
        to_normalized, to_weight1, to_bias1 = _backward(of_inner, first, needs, numerics)
        _free(normalized)
        to_x, to_scale, *to_shift = _norm_gradients(x, scale, ctx.kind)
        del to_normalized, of_activated, of_out, of_inner
        return (
            *(to_x.view(ctx.shape), to_scale, to_shift[0] if to_shift else None),
            *(to_weight1, to_bias1, to_weight2, to_bias2, None, None, None),
        )


_STREAMS: Final = 4
"""The streams of grouped products, `nvte_get_num_compute_streams`."""


class GroupedProduct(torch.autograd.Function):
    """Products of the parts of `x` with as many weights, `count`, into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, numerics: Numerics, *weights_and_biases: Tensor | None) -> Tensor:
        weights: Any = weights_and_biases[:count]
        operands = numerics.operands(x.reshape(-1, x.shape[-1]), columns=ctx.needs_input_grad[3])
        read = [numerics.weight(weight, ctx.needs_input_grad[0], None) for weight in weights]
        out = multiply(len(operands.rows[0]), len(weights[0]), x, numerics, _STREAMS)
        ctx.numerics, ctx.shape, ctx.weights = numerics, x.shape, weights
        ctx.biases = [bias for bias in weights_and_biases[count:] if bias is not None]
        ctx.save_for_backward(
            *operands.for_backward(ctx.needs_input_grad[3]), *(part for weight in read for part in weight.all)
        )
        return out.view(*x.shape[:-1], len(weights[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        numerics, weights = ctx.numerics, ctx.weights
        rows, columns = weights[0].shape
        gradient = gradient.reshape(-1, rows).contiguous()
        needs_input, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        _operands = numerics.operands(gradient, columns=needs_weights)
        to_biases: list[Any] = [torch.empty_like(bias, dtype=numerics.dtype) for bias in ctx.biases] or [None] * len(
            weights
        )
        to_x = multiply(len(gradient), columns, gradient, numerics, _STREAMS) if needs_input else None
        to_weights: Any = [None] * len(weights)
        if needs_weights and numerics.accumulates:
            to_weights = [accumulated(weight, numerics.dtype) for weight in weights]
        elif needs_weights:
            to_weights = gradient.new_empty((len(weights), rows, columns), dtype=numerics.dtype).unbind()
        return None if to_x is None else to_x.view(ctx.shape), None, None, *to_weights, *to_biases
