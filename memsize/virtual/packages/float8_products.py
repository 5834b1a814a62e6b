"""Products of Transformer Engine's layers, with the norm before them and the activation between them.

Source: TransformerEngine 2.20, `pytorch/module/linear.py`, `layernorm_linear.py` and `layernorm_mlp.py`: what each
saves and clears. Known limit: partial sums of norms' backward are not counted.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memsize.virtual.packages.float8 import Numerics, Operands

_WORKSPACE: Final = {True: (32 << 20) + 1024, False: 4 << 20}
"""cuBLAS's workspace from Hopper on, and before."""


def _multiply(rows: int, columns: int, like: Tensor, numerics: Numerics) -> Tensor:
    """An empty product, after Transformer Engine's own workspace for cuBLAS, which stays."""
    package: Any = sys.modules["transformer_engine"]
    if not hasattr(package, "workspace"):
        size = _WORKSPACE[torch.cuda.get_device_capability() >= (9, 0)]
        package.workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
    return like.new_empty((rows, columns), dtype=numerics.dtype)


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
    gradient: Operands, shape: tuple[int, int], needs: _Needs, numerics: Numerics
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a product's input, its weight of `shape`, and its bias."""
    like = gradient.rows[0]
    of_bias = like.new_empty((shape[0],), dtype=numerics.dtype) if needs.of_bias else None
    of_input = _multiply(len(like), shape[1], like, numerics) if needs.of_input else None
    of_weight = _multiply(*shape, like, numerics) if needs.of_weight else None
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
        out = _multiply(len(operands.rows[0]), len(weight), x, numerics)
        ctx.numerics, ctx.shapes = numerics, (x.shape, tuple(weight.shape))
        ctx.save_for_backward(*operands.for_backward(ctx.needs_input_grad[1]), *weights.all, bias)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        numerics, (of_x, of_weight) = ctx.numerics, ctx.shapes
        gradient = gradient.reshape(-1, of_weight[0]).contiguous()
        needs = _Needs(ctx.needs_input_grad[0], *ctx.needs_input_grad[1:3])
        operands = numerics.operands(gradient, columns=needs.of_weight)
        to_x, to_weight, to_bias = _backward(operands, of_weight, needs, numerics)
        return None if to_x is None else to_x.view(of_x), to_weight, to_bias, None, None


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
        out = _multiply(len(x), len(weight), x, numerics)
        saved = operands.for_backward(ctx.needs_input_grad[3])
        ctx.numerics, ctx.kind, ctx.shapes, ctx.count = numerics, kind, (shape, tuple(weight.shape)), len(saved)
        ctx.save_for_backward(*saved, x, scale, *statistics, *weights.all)
        return out.view(*shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        normalized, (x, scale) = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count : ctx.count + 2]
        gradient = gradient.reshape(-1, ctx.shapes[1][0]).contiguous()
        needs = _Needs(True, *ctx.needs_input_grad[3:5])
        operands = ctx.numerics.operands(gradient, columns=needs.of_weight)
        of_norm, of_weight, of_bias = _backward(operands, ctx.shapes[1], needs, ctx.numerics)
        _free(normalized)
        of_x, of_scale, *of_shift = _norm_gradients(x, scale, ctx.kind)
        del of_norm
        return (
            *(of_x.view(ctx.shapes[0]), of_scale, of_shift[0] if of_shift else None),
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
        inner = _multiply(len(x), len(weight1), x, numerics)
        whole = inner.new_empty((len(x), weight2.shape[1])) if not numerics.fuses_activations else inner
        activated = numerics.operands(
            whole, columns=ctx.needs_input_grad[5], shape=(len(x), weight2.shape[1]), new=True
        )
        del whole
        out = _multiply(len(x), len(weight2), x, numerics)
        parts = normalized.for_backward(ctx.needs_input_grad[3]), activated.for_backward(ctx.needs_input_grad[5])
        ctx.numerics, ctx.kind, ctx.activation, ctx.counts = numerics, kind, activation, [len(part) for part in parts]
        ctx.shapes = shape, tuple(weight1.shape), tuple(weight2.shape)
        ctx.save_for_backward(*parts[0], *parts[1], inner, x, scale, *statistics, *first.all, *second.all)
        return out.view(*shape[:-1], len(weight2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved, numerics, (shape, of_first, of_second) = ctx.saved_tensors, ctx.numerics, ctx.shapes
        normalized, activated = saved[: ctx.counts[0]], saved[ctx.counts[0] : sum(ctx.counts)]
        inner, x, scale = saved[sum(ctx.counts) :][:3]
        gradient = gradient.reshape(-1, of_second[0]).contiguous()
        needs = _Needs(True, *ctx.needs_input_grad[5:7])
        of_out = numerics.operands(gradient, columns=needs.of_weight)
        of_activated, to_weight2, to_bias2 = _backward(of_out, of_second, needs, numerics)
        _free(activated)
        needs = _Needs(True, *ctx.needs_input_grad[3:5])
        whole = inner if numerics.fuses_gradient_of(ctx.activation) else torch.empty_like(inner)
        of_inner = numerics.operands(whole, columns=needs.of_weight, new=True)
        del whole
        _free((inner,))
        to_normalized, to_weight1, to_bias1 = _backward(of_inner, of_first, needs, numerics)
        _free(normalized)
        to_x, to_scale, *to_shift = _norm_gradients(x, scale, ctx.kind)
        del to_normalized, of_activated, of_out, of_inner
        return (
            *(to_x.view(shape), to_scale, to_shift[0] if to_shift else None),
            *(to_weight1, to_bias1, to_weight2, to_bias2, None, None, None),
        )
