"""Tensors in float8 as Transformer Engine's products read them: the bytes of data and scales, by recipe.

Source: TransformerEngine 2.20, `common/recipe/__init__.py`, `pytorch/quantization.py` and `pytorch/tensor/`
(`float8_tensor.py`, `mxfp8_tensor.py`, `float8_blockwise_tensor.py`: shapes of data and scales, `update_usage`), and
`pytorch/quantized_tensor.py` for parameters that are float8 themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed as dist

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


_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Since PyTorch 2.13 their old names warn."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks of `group` that share a layer: its outputs by `mode` "column", its inputs by "row".

    With `sequence`, each holds its part of the tokens outside of products: inputs are gathered, outputs scattered.
    """

    mode: str | None = None
    group: Any = None
    sequence: bool = False

    @property
    def size(self) -> int:
        """The number of ranks; 1 where they share nothing."""
        return dist.get_world_size(self.group) if self.mode and self.group is not None else 1

    def gathered(self, tensors: tuple[Tensor, ...], mode: str) -> tuple[Tensor, ...]:
        """The tokens of all ranks, of which each has its part; as they are in another mode."""
        if self.size == 1 or not self.sequence or self.mode != mode:
            return tensors
        whole = tuple(tensor.new_empty((len(tensor) * self.size, *tensor.shape[1:])) for tensor in tensors)
        for out, tensor in zip(whole, tensors, strict=True):
            _gather(out, tensor.contiguous(), group=self.group)
        return whole

    def reduced(self, product: Tensor, mode: str) -> Tensor:
        """The sum over all ranks, or this rank's part of its tokens; as it is in another mode."""
        if self.size == 1 or self.mode != mode:
            return product
        if not self.sequence:
            dist.all_reduce(product, group=self.group)
            return product
        out = product.new_empty((len(product) // self.size, *product.shape[1:]))
        _scatter(out, product, group=self.group)
        return out


@dataclass(frozen=True, slots=True)
class Numerics:
    """The dtype that products return, the recipe of their operands (None: that dtype), and who shares the layer."""

    dtype: torch.dtype
    recipe: Recipe | None
    accumulates: bool = False
    """Whether the gradients of weights are added to their `main_grad`."""
    parallel: TensorParallel = TensorParallel()

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
