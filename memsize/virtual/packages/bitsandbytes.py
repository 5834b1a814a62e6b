"""bitsandbytes 0.50: linear layers with weights of 4 and 8 bits.

Source: bitsandbytes 0.50.2, `nn/modules.py`, `functional.py` and `autograd/_functions.py`. What its ops
allocate is in `memsize.kernels.bitsandbytes`, for the installed package. As there, products of five rows or more unpack
a 4-bit weight, and activations have no outliers.
"""

from __future__ import annotations

import importlib
import json
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from memsize.kernels.bitsandbytes import FUSED_ROWS

_BLOCK: Final = 64
"""Weights that share a maximum."""
_MAXIMA_IN_BLOCK: Final = 256
"""Maxima that share one under double quantization."""


def functional() -> Any:
    """The module with what the library makes once."""
    return importlib.import_module("bitsandbytes.functional")  # transformers keeps the package of an earlier run


def note_use() -> None:
    """Say once that the package is simulated."""
    functional()._first_use()


def _codes_of(device: torch.device) -> Tensor:
    """The values of 8-bit codes on the GPU, which the library makes once."""
    by_name: dict[str, Tensor] = vars(functional()).setdefault("name2qmap", {})
    if "dynamic" not in by_name:
        by_name["dynamic"] = torch.zeros(256, device=device)
    return by_name["dynamic"]


# -- weights of 4 bits -------------------------------------------------------------------------------------------------


class QuantState(SimpleNamespace):
    """The tensors that unpack a weight: maxima of blocks, their state under double quantization, and 16 values."""

    absmax: Tensor
    state2: QuantState | None
    shape: torch.Size
    dtype: torch.dtype
    quant_type: str
    nested: bool

    def to(self, device: Any) -> None:
        for name, value in vars(self).items():
            if isinstance(value, QuantState):
                value.to(device)
            elif isinstance(value, Tensor):
                vars(self)[name] = value.to(device)

    @classmethod
    def from_dict(cls, qs_dict: dict[str, Any], device: Any) -> QuantState:
        """Read the tensors of a checkpoint, and the other entries, which it keeps as JSON in another one."""
        entries = {name.rpartition(".")[2]: value for name, value in qs_dict.items()}
        (packed,) = [name for name in entries if name.startswith("bitsandbytes__")]
        entries |= json.loads(bytes(entries.pop(packed).tolist()))
        offset = state2 = None
        if nested := "nested_absmax" in entries:
            offset = torch.tensor(entries["nested_offset"]).to(device)
            outer = {"absmax": entries["nested_absmax"], "code": entries["nested_quant_map"]}
            state2 = cls(**{name: tensor.to(device) for name, tensor in outer.items()}, dtype=torch.float32)
        return cls(
            absmax=entries["absmax"].to(device),
            code=entries["quant_map"].to(device),
            shape=torch.Size(entries["shape"]),
            dtype=getattr(torch, entries["dtype"]),
            blocksize=entries["blocksize"],
            quant_type=entries["quant_type"],
            **{"offset": offset, "state2": state2, "nested": nested},
        )


def _packed(
    weight: Tensor, nested: bool, storage: torch.dtype, kind: str, block: int = _BLOCK
) -> tuple[Tensor, QuantState]:
    device, size = weight.device, weight.numel()
    packed = torch.empty(((size + 1) // (2 * storage.itemsize), 1), dtype=storage, device=device)
    maxima = torch.empty(-(-size // block), dtype=torch.float32, device=device)
    options: dict[str, Any] = {"shape": weight.shape, "dtype": weight.dtype, "blocksize": block, "quant_type": kind}
    values = torch.zeros(16, device=device)
    values.div_(values.abs().max())
    if not nested:
        return packed, QuantState(absmax=maxima, code=values, offset=None, state2=None, nested=False, **options)
    mean = maxima.mean()
    shifted, codes = maxima - mean, _codes_of(device)
    outer = torch.empty(-(-len(maxima) // _MAXIMA_IN_BLOCK), dtype=torch.float32, device=device)
    state2 = QuantState(absmax=outer, code=codes.clone(), blocksize=_MAXIMA_IN_BLOCK, dtype=torch.float32)
    of_maxima = torch.empty_like(shifted, dtype=torch.uint8)
    return packed, QuantState(absmax=of_maxima, code=values, offset=mean, state2=state2, nested=True, **options)


def _unpacked(state: QuantState, dtype: torch.dtype) -> Tensor:
    maxima = torch.empty_like(state.absmax, dtype=torch.float32) if state.state2 is not None else None
    weight = state.absmax.new_empty(state.shape, dtype=dtype)
    del maxima
    return weight


def dequantize_4bit(A: Tensor, quant_state: QuantState, *_: Any, **__: Any) -> Tensor:  # noqa: N803
    """The weight in its own dtype."""
    return _unpacked(quant_state, quant_state.dtype)


def quantize_4bit(
    A: Tensor,  # noqa: N803
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[Tensor, QuantState]:
    """The weight in 4 bits, in memory of its own or in `out`, and what unpacks it."""
    note_use()
    packed, state = _packed(A, compress_statistics, quant_storage, quant_type, blocksize or _BLOCK)
    return packed if out is None else out.copy_(packed), state


def int8_vectorwise_dequant(A: Tensor, stats: Tensor) -> Tensor:  # noqa: N803
    """The weight in float32."""
    return A * stats.view(-1, 1) * (1.0 / 127.0)


class Params4bit(nn.Parameter):
    """A weight that is packed when it is moved to the GPU."""

    quant_state: QuantState | None
    bnb_quantized: bool
    compress_statistics: bool
    quant_type: str
    quant_storage: torch.dtype
    module: Any

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quant_state: QuantState | None = None,
        blocksize: int | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: Any = None,
        bnb_quantized: bool = False,
        **_: Any,
    ) -> Self:
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.quant_state, self.bnb_quantized, self.module = quant_state, bnb_quantized, module
        self.compress_statistics, self.quant_type, self.quant_storage = compress_statistics, quant_type, quant_storage
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = type(self)(deepcopy(self.data, memo), self.requires_grad)
        vars(other).update(vars(self), quant_state=deepcopy(self.quant_state, memo))
        return other

    @classmethod
    def from_prequantized(
        cls,
        data: Tensor,
        quantized_stats: dict[str, Any],
        requires_grad: bool = False,
        device: Any = "cuda",
        module: Any = None,
        **_: Any,
    ) -> Self:
        """A weight that a checkpoint keeps packed."""
        state = QuantState.from_dict(quantized_stats, device)
        kind, nested = state.quant_type, state.nested
        options: dict[str, Any] = {"quant_type": kind, "compress_statistics": nested, "quant_storage": data.dtype}
        return cls(data.to(device), requires_grad, state, module=module, bnb_quantized=True, **options)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:  # type: ignore[override]
        return self.to("cuda" if device is None else device)

    def to(self, *args: Any, **options: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **options)
        if device is None or device.type == "meta" or self.bnb_quantized:
            if self.quant_state is not None and device is not None:
                self.quant_state.to(device)
            other = Params4bit(super().to(device=device, dtype=dtype), self.requires_grad)
            vars(other).update(vars(self))
            return other
        weight = self.data.contiguous().to(device)
        nested = self.compress_statistics
        self.data, self.quant_state = _packed(weight, nested, self.quant_storage, self.quant_type)
        self.bnb_quantized = True
        return self


class _Product4bit(torch.autograd.Function):
    """A product with a packed weight, which is unpacked again for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: QuantState) -> Tensor:
        ctx.state, ctx.bias_dtype = state, None if bias is None else bias.dtype
        out = x.new_empty((*x.shape[:-1], state.shape[0]))
        if x.numel() > FUSED_ROWS * x.shape[-1]:
            _unpacked(state, x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        of_bias = gradient.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(gradient, _unpacked(ctx.state, ctx.state.dtype).to(gradient.dtype))
        return of_x, None, of_bias, None


class Linear4bit(nn.Linear):
    """A linear layer whose weight has 4 bits once it is on the GPU."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        note_use()
        super().__init__(input_features, output_features, bias, device)
        options: dict[str, Any] = {"quant_type": quant_type, "quant_storage": quant_storage, "module": self}
        self.weight = Params4bit(self.weight.data, compress_statistics=compress_statistics, **options)
        self.compute_dtype = compute_dtype

    def forward(self, input: Tensor) -> Tensor:
        state = getattr(self.weight, "quant_state", None)
        if state is None:
            raise RuntimeError("the weight is not quantized: call .cuda() or .to(device) on the layer first")
        if self.compute_dtype is None and input.dtype is not torch.float16:
            self.compute_dtype = input.dtype
        x = input.to(self.compute_dtype or input.dtype)
        bias = None
        if self.bias is not None:
            if self.bias.dtype != x.dtype:
                self.bias.data = self.bias.data.to(x.dtype)
            bias = self.bias
        return _Product4bit.apply(x, self.weight, bias, state).to(input.dtype)  # type: ignore[no-untyped-call,no-any-return]


def _of_kind(name: str) -> type[Linear4bit]:
    def initialize(self: Any, *args: Any, **options: Any) -> None:
        Linear4bit.__init__(self, *args, **options | {"quant_type": name.removeprefix("Linear").lower()})

    return type(name, (Linear4bit,), {"__init__": initialize})


# -- weights of 8 bits -------------------------------------------------------------------------------------------------


def _rows_in_int8(half: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor]:
    """The values of a matrix in int8, and a scale for each row; a `threshold` is compared with all absolute values."""
    if threshold:
        half.abs().ge(threshold)
    return torch.empty_like(half, dtype=torch.int8), half.new_empty((len(half),), dtype=torch.float32)


class Int8Params(nn.Parameter):
    """A weight that is moved to the GPU in int8, unless it keeps its 16 bits."""

    CB: Tensor | None
    SCB: Tensor | None
    has_fp16_weights: bool

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = True,
        has_fp16_weights: bool = False,
        CB: Tensor | None = None,  # noqa: N803
        SCB: Tensor | None = None,  # noqa: N803
        **_: Any,
    ) -> Self:
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.CB, self.SCB, self.has_fp16_weights = CB, SCB, has_fp16_weights
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        data, *both = deepcopy([self.data, self.CB, self.SCB], memo)
        return type(self)(data, self.requires_grad, self.has_fp16_weights, *both)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:  # type: ignore[override]
        return self.to("cuda" if device is None else device)

    def to(self, *args: Any, **options: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **options)
        is_moved = device is not None and device.type != "meta" and self.data.device.type == "cpu"
        if is_moved and self.data.dtype != torch.int8 and not self.has_fp16_weights:
            half = self.data.contiguous().to(device=device, dtype=torch.float16)
            self.data, self.SCB = _rows_in_int8(half)
            self.CB = self.data
            return self
        moved = super().to(device=device, dtype=dtype)
        if is_moved and self.has_fp16_weights and self.data.dtype != torch.int8:
            return moved
        other = Int8Params(moved, self.requires_grad, self.has_fp16_weights)
        if self.data.dtype == torch.int8:
            other.CB, other.SCB = other.data, None if self.SCB is None else self.SCB.to(device)
        return other


class _Library:
    """The compiled kernels, which write to the memory that they get."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


class MatmulLtState:
    """The part of a layer's weight that stays from call to call."""

    CB: Tensor | None = None
    SCB: Tensor | None = None
    threshold = 0.0
    has_fp16_weights = True

    def reset_grads(self) -> None:
        """Forget the weight, which was replaced."""
        self.CB = self.SCB = None


class _Product8bit(torch.autograd.Function):
    """A product in int8 whose input is kept; the weight is cast to the input's dtype for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: MatmulLtState) -> Tensor:
        ctx.shape, ctx.state, ctx.bias_dtype = x.shape, state, None if bias is None else bias.dtype
        rows = x.reshape(-1, x.shape[-1]) if x.dim() == 3 else x
        values, scales = _rows_in_int8(rows.to(torch.float16), state.threshold)
        by_column = None
        if ctx.needs_input_grad[1]:
            by_column = torch.empty_like(values), scales.new_empty((values.shape[1],))
        if state.has_fp16_weights or state.CB is None:
            state.CB = state.SCB = None
            state.CB, state.SCB = _rows_in_int8(weight.to(torch.float16))
        assert state.CB is not None
        product = rows.new_empty((len(rows), len(state.CB)), dtype=torch.int32)
        out = torch.empty_like(product, dtype=torch.float16).to(x.dtype)  # CUDA's kernel writes no other dtype
        if any(ctx.needs_input_grad[:2]):
            ctx.tensors = (by_column, rows)
        return out.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        state, dtype = ctx.state, ctx.tensors[1].dtype
        of_bias = gradient.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        if gradient.dim() == 3:
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_weight = of_x = None
        if ctx.needs_input_grad[1]:
            half = gradient.to(torch.float16)
            both = (_rows_in_int8(half), torch.empty_like(half, dtype=torch.int8))
            turned = both[0][0].t().contiguous()
            product = turned.new_empty((len(turned), ctx.shape[-1]), dtype=torch.int32)
            of_weight = torch.empty_like(product, dtype=torch.float16)
            del half, both, turned, product
        if ctx.needs_input_grad[0]:
            weight = state.CB.to(dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
            of_x = torch.matmul(gradient.to(dtype), weight).view(ctx.shape)
        return of_x, of_weight, of_bias, None


class Linear8bitLt(nn.Linear):
    """A linear layer that multiplies in int8."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = True,
        threshold: float = 0.0,
        index: Any = None,
        device: Any = None,
    ) -> None:
        note_use()
        super().__init__(input_features, output_features, bias, device)
        self.state = MatmulLtState()
        self.state.threshold, self.state.has_fp16_weights = threshold, has_fp16_weights
        self.index = index
        self.weight = Int8Params(self.weight.data, has_fp16_weights, has_fp16_weights)

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        if getattr(weight, "CB", None) is not None:
            self.state.CB, self.state.SCB = weight.CB, weight.SCB
            weight.CB = weight.SCB = None
        if self.bias is not None and self.bias.dtype != input.dtype:
            self.bias.data = self.bias.data.to(input.dtype)
        out: Tensor = _Product8bit.apply(input, weight, self.bias, self.state)  # type: ignore[no-untyped-call]
        if not self.state.has_fp16_weights and self.state.CB is not None:
            weight.data = self.state.CB
        return out


_CLASSES: Final = (Params4bit, Linear4bit, _of_kind("LinearNF4"), _of_kind("LinearFP4"), Int8Params, Linear8bitLt)
_LAYERS: Final = {cls.__name__: cls for cls in _CLASSES}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "bitsandbytes": {"__version__": "0.50.2", "MatmulLtState": MatmulLtState, "supported_torch_devices": {"cuda"}},
    # Pages are the host's, whose memory is counted where this module is patched.
    "bitsandbytes.functional": {
        "QuantState": QuantState,
        **{f"dequantize_{kind}": dequantize_4bit for kind in ("4bit", "nf4", "fp4")},
        **{f"quantize_{kind}": partial(quantize_4bit, quant_type=kind) for kind in ("nf4", "fp4")},
        "quantize_4bit": quantize_4bit,
        "get_ptr": lambda tensor: None,
        "lib": _Library(),
        "int8_vectorwise_dequant": int8_vectorwise_dequant,
        **dict.fromkeys(("get_paged", "fill", "prefetch_tensor")),
    },
    "bitsandbytes.nn": _LAYERS,
    "bitsandbytes.nn.modules": _LAYERS,
}
