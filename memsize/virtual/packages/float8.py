"""Tensors in float8 as Transformer Engine's products read them: the bytes of data and scales, by recipe; and
the products of its layers, with the norm before them and the activation between them.

Source: TransformerEngine 2.20, `common/recipe/__init__.py`, `pytorch/quantization.py` and `pytorch/tensor/`
(`float8_tensor.py`, `mxfp8_tensor.py`, `float8_blockwise_tensor.py`: shapes of data and scales, `update_usage`), and
`pytorch/quantized_tensor.py` for parameters that are float8 themselves;
`pytorch/module/linear.py`, `layernorm_linear.py` and `layernorm_mlp.py`: what the products of layers save and clear.
Known limit: partial sums of norms' backward are not counted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memsize.torch_internals.pytree import map_tensors

_BLACKWELL: Final = (10, 0)
_SM120: Final = (12, 0)
_MX_BLOCK: Final = 32
_BLOCK: Final = 128


class Format(Enum):
    """The float8 formats of the forward and the backward; both have one byte."""

    E4M3 = 1
    E5M2 = 2
    HYBRID = 3


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Recipe:
    """How tensors are scaled: one scale for each here."""

    fuses_norms = False
    """Whether a norm writes float8 at once."""
    fuses_activations = False
    fused_gradients: tuple[str, ...] = ()
    """Activations whose backward writes float8 at once."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    def scales(self, shape: tuple[int, int], columns: bool, is_weight: bool) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the scales of one copy."""
        return (1,), torch.float32

    @property
    def transposes(self) -> bool:
        """Whether the backward reads a copy of its own."""
        return torch.cuda.get_device_capability() < _BLACKWELL


class DelayedScaling(Recipe):
    """Scales from the maxima of former steps, which are kept."""

    amax_history_len = 1024
    fuses_norms = fuses_activations = True
    fused_gradients = ("gelu", "relu", "qgelu", "srelu")

    def histories(self, products: int, device: torch.device) -> list[Tensor]:
        """Scales and maxima: of three tensors for each product in the forward, and of two in the backward."""
        counts = [3 * products, 2 * products]
        scales = [torch.ones(count, device=device) for count in counts]
        return scales + [torch.zeros((self.amax_history_len, count), device=device) for count in counts]


class Float8CurrentScaling(Recipe):
    """Scales from the tensors themselves."""


class MXFP8BlockScaling(Recipe):
    """A scale of one byte for each 32 values, along the dimension that is summed."""

    fuses_activations = True
    fused_gradients = DelayedScaling.fused_gradients
    transposes = True

    def scales(self, shape: tuple[int, int], columns: bool, is_weight: bool) -> tuple[tuple[int, ...], torch.dtype]:
        if columns:
            return (_rounded(shape[0] // _MX_BLOCK, 4), _rounded(shape[1], _BLOCK)), torch.uint8
        return (_rounded(shape[0], _BLOCK), _rounded(shape[1] // _MX_BLOCK, 4)), torch.uint8


class Float8BlockScaling(Recipe):
    """A float32 scale for each 128 values, and for each square of them in weights."""

    transposes = True

    def scales(self, shape: tuple[int, int], columns: bool, is_weight: bool) -> tuple[tuple[int, ...], torch.dtype]:
        first, second = shape if columns else shape[::-1]
        across = -(-second // _BLOCK) if is_weight else second
        return (-(-first // _BLOCK), _rounded(across, 4)), torch.float32


def default_recipe() -> Recipe:
    """The recipe of this GPU."""
    capability = torch.cuda.get_device_capability()
    if capability >= _SM120:
        return Float8CurrentScaling()
    return MXFP8BlockScaling() if capability >= _BLACKWELL else DelayedScaling()


class Operands(NamedTuple):
    """A tensor as products read it: in the forward, and in the backward. Both are the same where one copy does."""

    rows: tuple[Tensor, ...]
    columns: tuple[Tensor, ...]

    @property
    def all(self) -> tuple[Tensor, ...]:
        """Every tensor once."""
        return self.rows if self.columns is self.rows else (*self.rows, *self.columns)

    def for_backward(self, needed: bool) -> tuple[Tensor, ...]:
        """The part for the backward, if it is `needed`."""
        return self.columns if needed else ()


class Float8Tensor(Tensor):
    """A weight that is there in float8 alone, and passes for one of `dtype`: any op reads it in that dtype, an op that
    writes to it converts it back.
    """

    operands: Operands

    @staticmethod
    def __new__(cls, like: Tensor, operands: Operands) -> Float8Tensor:
        tensor: Float8Tensor = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        tensor.operands = operands
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0], args[0].operands)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            return args[0]
        result = func(*map_tensors(_dequantized, args), **map_tensors(_dequantized, kwargs or {}))
        return args[0] if func._schema.is_mutable else result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [f"part{number}" for number, _ in enumerate(self.operands.all)], None

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("part"):
            return self.operands.all[int(name[4:])]
        raise AttributeError(name)


def _dequantized(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Float8Tensor):
        return tensor.operands.rows[0].new_empty(tensor.shape, dtype=tensor.dtype)
    return tensor


@dataclass(frozen=True, slots=True)
class Numerics:
    """The dtype that products return, and the recipe of their operands; None: that dtype."""

    dtype: torch.dtype
    recipe: Recipe | None
    accumulates: bool = False
    """Whether the gradients of weights are added to their `main_grad`."""

    @property
    def fuses_norms(self) -> bool:
        """Whether a norm writes what the product after it reads."""
        return self.recipe is not None and self.recipe.fuses_norms

    @property
    def fuses_activations(self) -> bool:
        """Whether an activation writes what the product after it reads."""
        return self.recipe is None or self.recipe.fuses_activations

    def fuses_gradient_of(self, activation: str) -> bool:
        """Whether an activation's backward writes what the products after it read."""
        return self.recipe is None or activation in self.recipe.fused_gradients

    def operands(
        self,
        tensor: Tensor,
        *,
        columns: bool,
        is_weight: bool = False,
        shape: tuple[int, int] | None = None,
        new: bool = False,
    ) -> Operands:
        """Copy `tensor`, or a `new` one of `shape`, for the forward, and with `columns` for the backward too."""
        size: Any = shape or tuple(tensor.shape)
        if self.recipe is None:
            both = (tensor.new_empty(size, dtype=self.dtype) if new else tensor.to(self.dtype),)
            return Operands(both, both)
        rows = self._copy(tensor, size, False, is_weight)
        if not self.recipe.transposes:
            return Operands(rows, rows)
        return Operands(rows, self._copy(tensor, size, True, is_weight) if columns else ())

    def weight(self, weight: Tensor, columns: bool, cache: list[Operands] | None) -> Operands:
        """The same for a weight, from `cache` where it is there, or as it is."""
        if isinstance(weight, Float8Tensor):
            if self.recipe is not None:
                return weight.operands
            weight = _dequantized(weight)
        if cache:
            return cache[0]
        operands = self.operands(weight, columns=columns, is_weight=True)
        if cache is not None:
            cache.append(operands)
        return operands

    def _copy(self, like: Tensor, shape: tuple[int, int], columns: bool, is_weight: bool) -> tuple[Tensor, ...]:
        recipe: Any = self.recipe
        scales, dtype = recipe.scales(shape, columns, is_weight)
        return like.new_empty(shape, dtype=torch.uint8), like.new_empty(scales, dtype=dtype)


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
    of_weight = _multiply(*shape, like, numerics) if needs.of_weight and not numerics.accumulates else None
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
