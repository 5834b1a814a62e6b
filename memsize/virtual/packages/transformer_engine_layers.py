"""Transformer Engine's layers, in 16 bits and in float8.

A float8 product reads both operands along the dimension that is summed, so a tensor that is read in the forward and in
the backward is there twice before Blackwell: row by row and transposed. Of an input the transposed copy is kept, of a
weight both; the weight itself stays in its own dtype.

Source: TransformerEngine 2.20, `pytorch/module/` and `pytorch/transformer.py`; `linear_products` has what the layers
save. Known limits: attention is that of the fused kernels, without cuDNN's workspace; NVFP4, context parallelism and
the functions that Megatron calls for its fused permutations are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from memsize.processes.simulation import running, running_part
from memsize.virtual.packages.flash_attn import flash_attn_func, flash_attn_varlen_func
from memsize.virtual.packages.float8 import (
    DelayedScaling,
    Float8Tensor,
    Numerics,
    Operands,
    Recipe,
    TensorParallel,
    default_recipe,
)
from memsize.virtual.packages.linear_products import (
    GroupedProduct,
    LinearProduct,
    NormProduct,
    NormProducts,
)

_PASSED_ON: Final = ("bias", "normalization", "params_dtype", "device", "fuse_wgrad_accumulation")
_GATED: Final = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")


class Recipes(NamedTuple):
    """The recipes in force: of products, and of the weights of new layers; None is 16 bits."""

    products: Recipe | None = None
    weights: Recipe | None = None


@contextmanager
def _changed(**recipes: Recipe | None) -> Iterator[None]:
    simulation = running()
    assert simulation is not None, "this package is there in simulations alone"
    with simulation.with_part(Recipes, running_part(Recipes)._replace(**recipes)):
        yield


@contextmanager
def autocast(enabled: bool = True, *_: Any, recipe: Recipe | None = None, **options: Any) -> Iterator[None]:
    """While open, layers multiply in float8 by `recipe`, `fp8_recipe` of old."""
    recipe = recipe or options.get("fp8_recipe") or default_recipe()
    with _changed(products=recipe if enabled else None):
        yield


@contextmanager
def quantized_model_init(enabled: bool = True, recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    """While open, the weights of new layers are in float8 by `recipe`, and nowhere else."""
    with _changed(weights=(recipe or default_recipe()) if enabled else None):
        yield


class Layer(nn.Module):
    """A layer with its parameters, the recipe in force, float8 weights, and the history of maxima."""

    products: int = 1

    def __init__(
        self,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        super().__init__()
        self.use_bias, self.return_bias = bias, return_bias
        self._accumulates: bool = options.get("fuse_wgrad_accumulation", False)
        self.parallel_mode, self.sequence_parallel = (
            options.get("parallel_mode"),
            options.get("sequence_parallel", False),
        )
        self.tp_group, self.tp_size = options.get("tp_group"), options.get("tp_size", 1)
        if self.tp_group is not None:
            self.tp_size = torch.distributed.get_world_size(self.tp_group)
        self._options: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self._weights: list[list[Operands]] = []
        self._histories: list[Tensor] = []

    def parameter(self, *shape: int) -> nn.Parameter:
        """A new parameter; a matrix may be one in float8."""
        tensor, recipe = torch.empty(shape, **self._options), running_part(Recipes).weights
        if recipe is not None and len(shape) == 2:
            numerics = Numerics(tensor.dtype, recipe)
            operands = numerics.operands(tensor, columns=torch.is_grad_enabled(), is_weight=True)
            tensor = Float8Tensor(tensor, operands)
        return nn.Parameter(tensor)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Name the ranks that share the layer."""
        self.tp_group = tp_group

    def part(self, size: int, mode: str) -> int:
        """This rank's part of the inputs or outputs that a layer of a parallel `mode` divides."""
        return size // self.tp_size if self.parallel_mode == mode else size

    def numerics(self, x: Tensor) -> Numerics:
        """How the layer multiplies `x`."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        for name, parameter in self.named_parameters():
            if dtype == x.dtype and not torch.is_autocast_enabled("cuda") and parameter.dtype != dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {x.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        recipe = running_part(Recipes).products
        if isinstance(recipe, DelayedScaling) and not self._histories:
            self._histories = recipe.histories(self.products, x.device)
        parallel = TensorParallel(self.parallel_mode, self.tp_group, self.sequence_parallel)
        return Numerics(dtype, recipe, self._accumulates, parallel)

    def weights_of(self, is_first_microbatch: bool | None) -> list[Any] | None:
        """The float8 weights that micro-batches share, one list for each product; None: they share none."""
        if is_first_microbatch is None or running_part(Recipes).products is None:
            return None
        if is_first_microbatch or not self._weights:
            self._weights = [[] for _ in range(self.products)]
        return self._weights


class Linear(Layer):
    def __init__(self, in_features: int, out_features: int, *_: Any, **options: Any) -> None:
        super().__init__(**options)
        self.in_features, self.out_features = self.part(in_features, "row"), self.part(out_features, "column")
        self.weight = self.parameter(self.out_features, self.in_features)
        self.bias = self.parameter(self.out_features) if self.use_bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        cache, numerics = self.weights_of(is_first_microbatch), self.numerics(inp)
        bias = None if self.return_bias else self.bias
        out = LinearProduct.apply(inp, self.weight, bias, numerics, cache and cache[0])  # type: ignore[no-untyped-call]
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Layer):
    """A norm and a linear layer."""

    def __init__(
        self, in_features: int, out_features: int, *_: Any, normalization: str = "LayerNorm", **options: Any
    ) -> None:
        super().__init__(**options)
        self.in_features, self.out_features = in_features, self.part(out_features, "column")
        self.normalization = normalization
        self.layer_norm_weight = self.parameter(in_features)
        self.layer_norm_bias = self.parameter(in_features) if normalization == "LayerNorm" else None
        self.weight = self.parameter(self.out_features, in_features)
        self.bias = self.parameter(self.out_features) if self.use_bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        cache = self.weights_of(is_first_microbatch)
        out = NormProduct.apply(  # type: ignore[no-untyped-call]
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            None if self.return_bias else self.bias,
            self.normalization,
            self.numerics(inp),
            cache and cache[0],
        )
        return (out, self.bias) if self.return_bias else out


class GroupedLinear(Layer):
    """Linear layers of equal shape, as experts are; each takes its part of the rows."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, *_: Any, **options: Any) -> None:
        super().__init__(**options)
        self.num_gemms = num_gemms
        self.in_features, self.out_features = self.part(in_features, "row"), self.part(out_features, "column")
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", self.parameter(self.out_features, self.in_features))
            self.register_parameter(f"bias{number}", self.parameter(self.out_features) if self.use_bias else None)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        weights, biases = ([getattr(self, f"{name}{n}") for n in range(self.num_gemms)] for name in ("weight", "bias"))
        added = [None] * self.num_gemms if self.return_bias else biases
        out = GroupedProduct.apply(inp, self.num_gemms, self.numerics(inp), *weights, *added)  # type: ignore[no-untyped-call]
        return (out, biases if self.use_bias else None) if self.return_bias else out


class LayerNormMLP(Layer):
    """A norm and two linear layers with an activation between them."""

    products = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *_: Any,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.normalization, self.activation = normalization, activation
        inner = 2 * ffn_hidden_size if activation in _GATED else ffn_hidden_size
        self.layer_norm_weight = self.parameter(hidden_size)
        self.layer_norm_bias = self.parameter(hidden_size) if normalization == "LayerNorm" else None
        self.fc1_weight = self.parameter(inner, hidden_size)
        self.fc1_bias = self.parameter(inner) if self.use_bias else None
        self.fc2_weight = self.parameter(hidden_size, ffn_hidden_size)
        self.fc2_bias = self.parameter(hidden_size) if self.use_bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        return NormProducts.apply(  # type: ignore[no-untyped-call]
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            self.fc2_bias,
            (self.normalization, self.activation),
            self.numerics(inp),
            self.weights_of(is_first_microbatch),
        )


class DotProductAttention(nn.Module):
    """Attention of ``[length, batch, heads, width]``, or of ``[batch, length, heads, width]`` for ``bshd``."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        **_: Any,
    ) -> None:
        super().__init__()
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, *_: Any, **options: Any) -> Tensor:
        layout = options.get("qkv_format") or self.qkv_format
        if layout == "thd":
            begins = options["cu_seqlens_q"]
            packed: Tensor = flash_attn_varlen_func(query_layer, key_layer, value_layer, begins)
            return packed.flatten(-2)
        tensors = [query_layer, key_layer, value_layer]
        batched = [tensor.transpose(0, 1) for tensor in tensors] if layout == "sbhd" else tensors
        if query_layer.dtype == torch.float32:
            query, key, value = (tensor.transpose(1, 2) for tensor in batched)
            dropout = self.attention_dropout if self.training else 0.0
            with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
                out = functional.scaled_dot_product_attention(
                    query, key, value, dropout_p=dropout, enable_gqa=True
                ).transpose(1, 2)
        else:
            out = flash_attn_func(*batched)
        return (out.transpose(0, 1) if layout == "sbhd" else out).flatten(-2)


class MultiheadAttention(nn.Module):
    """Queries, keys and values by one layer with a norm before it or without, attention, and a projection."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        num_gqa_groups: int | None = None,
        input_layernorm: bool = False,
        qkv_format: str = "sbhd",
        **options: Any,
    ) -> None:
        super().__init__()
        options = {name: options[name] for name in _PASSED_ON if name in options}
        self.width = kv_channels or hidden_size // num_attention_heads
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        outputs = (self.heads + 2 * self.groups) * self.width
        layer = LayerNormLinear if input_layernorm else Linear
        name = "layernorm_qkv" if input_layernorm else "qkv"
        self.add_module(name, layer(hidden_size, outputs, **options))
        self.core_attention = DotProductAttention(
            self.heads, self.width, self.groups, attention_dropout, qkv_format=qkv_format
        )
        self.proj = Linear(self.heads * self.width, hidden_size, **options)

    def forward(self, hidden_states: Tensor, *_: Any, is_first_microbatch: bool | None = None, **__: Any) -> Any:
        joint = next(self.children())(hidden_states, is_first_microbatch=is_first_microbatch)
        joint = joint.unflatten(-1, (-1, self.width))
        parts = joint.split([self.heads, self.groups, self.groups], dim=-2)
        return self.proj(self.core_attention(*parts), is_first_microbatch=is_first_microbatch)


class TransformerLayer(nn.Module):
    """Attention and an MLP, each with its norm, dropout and residual."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation: str = "gelu",
        attn_input_format: str = "sbhd",
        **options: Any,
    ) -> None:
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            options.pop("kv_channels", None),
            attention_dropout,
            num_gqa_groups,
            input_layernorm=True,
            qkv_format=attn_input_format,
            **options,
        )
        passed = {name: options[name] for name in _PASSED_ON if name in options}
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, activation=activation, **passed)

    def forward(self, hidden_states: Tensor, *_: Any, is_first_microbatch: bool | None = None, **__: Any) -> Any:
        for layer in (self.self_attention, self.layernorm_mlp):
            out = layer(hidden_states, is_first_microbatch=is_first_microbatch)
            hidden_states = hidden_states + functional.dropout(out, self.hidden_dropout, self.training)
        return hidden_states


class LayerNorm(nn.LayerNorm):
    """Layer norm, which keeps its input and statistics as PyTorch's does; `params_dtype` is `dtype` of old."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, device: Any = "cuda", dtype: Any = None, **others: Any
    ) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype or others.get("params_dtype"))


class RMSNorm(nn.RMSNorm):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, device: Any = "cuda", dtype: Any = None, **others: Any
    ) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype or others.get("params_dtype"))
