"""Quantized weights: which parameters of a model a storage layout replaces, by what, and which it leaves alone; and
how quantized layers use their weights while they run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from memsize.errors import ScenarioError, UnknownScenarioError, first_line, quoted
from memsize.kernels.bitsandbytes import FUSED_ROWS
from memsize.loading.hubs import quiet
from memsize.model.tensor_storage import TORCHSCRIPT_CONSTANT, dtype_name, stored_tensors, wrapper_name
from memsize.precision.layouts import Kernel, Layout, Parts
from memsize.precision.quantization_config import CHECKPOINT, is_ignored, is_skipped, read_quantization_config
from memsize.records.trace import StoredTensor

_UNCONVERTED = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The output projection of an attention module, whose weight is read directly: no library here converts it."""
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


@dataclass(frozen=True, slots=True)
class Quantized:
    """The parameters of a model that quantizing replaces, and those that it leaves.

    `replaced` maps the name of a parameter to the tensors that replace it; `left` maps the path of each module whose
    parameters stay as they are to the reason.
    """

    layout: str
    replaced: Mapping[str, Parts]
    left: Mapping[str, str]
    wrapper: str
    packed: bool = False
    claims: str | None = None
    note: str = ""
    separate: bool = False


def apply_layout(model: nn.Module, layout: Layout, skipped: tuple[str, ...] | None = None) -> Quantized:
    """How `model` would be stored under `layout`. Its shapes stay; replaced parameters stop requiring a gradient.

    Modules that match a pattern of `skipped` stay as they are (None: those that the library skips by default).

    Raises `ScenarioError` when the layout covers nothing in the model, when the library would refuse it, or when the
    model already holds quantized tensors.
    """
    _refuse_quantized(model)
    covered, left = _converted(model, layout, _skipped_by_default(model, layout) if skipped is None else skipped)
    replaced: dict[str, Parts] = {}
    converted: list[tuple[nn.Module, str]] = []
    for path, module in covered.items():
        parts = _parts(module, layout)
        replaced |= {f"{path}.{name}" if path else name: value for name, value in parts.items()}
        converted += [(module, name) for name in parts]
    if not replaced:
        # For the first reason that is not about a module's class, if there is one.
        general = f"{layout.library} converts {layout.converts}"
        special = next((reason for reason in left.values() if not reason.startswith(general)), None)
        why = f" that it can convert: {special}" if special else ""
        raise ScenarioError(f"{general}; this model has none{why}")
    _freeze(model, converted)
    run_as(layout.kernel, dict.fromkeys(module for module, _ in converted))
    return Quantized(
        layout.name, replaced, left, layout.wrapper, layout.packed, layout.claims, layout.note, layout.separate
    )


ADAPTER: Final = "_memsize_adapter"
"""Set on modules whose parameters are an adapter's: no scenario casts or quantizes them."""
WHOLE: Final = "_memsize_trained_whole"
"""Set on modules that are trained in full beside adapters, and on their originals: no base takes them."""
BASE: Final = "_memsize_base"
"""Set on a model whose linear layers every scenario stores as this format of a base."""


def is_adapter(module: nn.Module) -> bool:
    """Whether `module` was marked as part of an adapter."""
    return ADAPTER in vars(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is a linear layer of transformers with the weight [in, out], as GPT-2 has."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nx", None), int)


def converts(model: nn.Module, layout: Layout) -> bool:
    return bool(_converted(model, layout, _skipped_by_default(model, layout))[0])


def stored_under(tensors: tuple[StoredTensor, ...], quantized: Quantized) -> tuple[StoredTensor, ...]:
    """The stored tensors of the original model as they are once it is quantized.

    Libraries quantize module by module, so a weight tied to a replaced one becomes a tensor of its own: a head tied to
    an embedding gets int8 values, and the embedding keeps the floating-point ones. A bias stays shared.

    Known limit: a module registered under two parents counts as converted once. torch.ao makes a copy for each parent,
    and torchao 0.18 fails on the second visit.
    """
    owners: dict[str, str] = {}
    bytes_of = {tensor.name: tensor.bytes for tensor in tensors if tensor.tied_to is None}
    return tuple(_stored(tensor, quantized, owners, bytes_of) for tensor in tensors)


def quantize_as(model: nn.Module, text: str) -> Quantized:
    """How a server stores `model` by the quantization config that `text` has as JSON; nothing of the model changes.

    Embeddings and the head stay as they are, unless `lm_head` is true. Raises `ScenarioError` for a method that is not
    covered.
    """
    config = json.loads(text)
    stored, method = read_quantization_config(config), str(config.get("quant_method", "no method"))
    if stored is None or stored.method in _NOT_SERVED:
        raise ScenarioError(f"the checkpoint's weights are quantized by {quoted(method)}, which is not covered")
    head = None if config.get("lm_head") else getattr(model, "get_output_embeddings", lambda: None)()
    replaced: dict[str, Parts] = {}
    for path, module in model.named_modules():
        if module is head or any(is_ignored(path, entry, method) for entry in stored.skipped or ()):
            continue
        for name, parameter in module._parameters.items():
            is_linear = isinstance(module, nn.Linear) and name == "weight" and bool(stored.layout.modules)
            if parameter is not None and (is_linear or (parameter.dim() == 3 and name in _EXPERTS)):
                parts = stored.layout.weight(tuple(parameter.shape), dtype_name(parameter.dtype))
                replaced[f"{path}.{name}" if path else name] = parts
    return Quantized(f"{CHECKPOINT}{method}", replaced, {}, f"{method} checkpoint")


_NOT_SERVED: Final = ("bitsandbytes", "torchao", "nvfp4")
_EXPERTS: Final = ("gate_up_proj", "down_proj")
"""The weights of experts that are stored together."""


def apply_torchao(model: nn.Module, config_name: str) -> Quantized:
    """Apply torchao's own `quantize_` to `model` with its configuration class `config_name` and that class's defaults.

    Raises `ScenarioError` when torchao is missing, has no such configuration, or refuses this model.
    """
    _refuse_quantized(model)
    try:
        with quiet(logging.WARNING):
            import torchao.quantization as torchao
    except ImportError as error:
        raise ScenarioError("a torchao: scenario needs torchao: pip install memsize[quant]") from error
    config = _config(torchao, config_name)
    try:
        with quiet(logging.WARNING):
            torchao.quantize_(model, config)
    except Exception as error:
        raise ScenarioError(f"torchao cannot apply {config_name} to this model: {first_line(error)}") from error
    return _read_back(model, config_name)


# What a layout covers


def _converted(
    model: nn.Module, layout: Layout, patterns: tuple[str, ...]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The modules that `layout` converts by their paths, and the reasons for those that it leaves alone."""
    covered, left = {}, {}
    for path, module in model.named_modules():
        if (
            is_adapter(module)
            or WHOLE in vars(module)
            or not any(parameter is not None for parameter in module._parameters.values())
        ):
            continue
        reason = _left_alone(module, path, layout)
        if reason is None and is_skipped(path, patterns):
            reason = f"{layout.library} leaves it alone"
        if reason:
            left[path] = reason
        else:
            covered[path] = module
    return covered, left


def _left_alone(module: nn.Module, path: str, layout: Layout) -> str | None:
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(is_lazy(parameter) for parameter in parameters):
        return "not initialised yet"
    if isinstance(module, _UNCONVERTED):
        return "the output projection of an attention module is read directly"
    if layout.experts and _has_experts(module):
        return None
    classes = tuple(getattr(nn, name) for name in layout.modules)
    is_converted = isinstance(module, classes) if layout.subclasses else type(module) in classes
    if not is_converted and not (layout.transposed and is_conv1d(module)):
        return f"{layout.library} converts {layout.converts} only"
    if layout.packed and not path:
        return f"{layout.library} converts modules inside a model, not the model itself"
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    is_recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    if not is_recurrent and module._parameters.get("weight") is None:
        return "its weight is computed from other tensors (pruning, a norm or another parametrization)"
    if any(weight.dtype not in _FLOATS for weight in weights):
        return f"its weight is {str(weights[0].dtype).removeprefix('torch.')}"
    # torch.ao asserts that recurrent modules have a bias, and drops the projection of an LSTM that has one.
    if is_recurrent and (not module.bias or getattr(module, "proj_size", False)):
        problem = "it has a projection" if module.bias else "it has no bias"
        raise ScenarioError(f"{layout.library} cannot convert {type(module).__name__} {path!r}: {problem}")
    return next(filter(None, (layout.skips(tuple(weight.shape)) for weight in weights)), None)


def _has_experts(module: nn.Module) -> bool:
    """Whether `module` is the experts of a layer in one: transformers' classes of 3-dimensional weights."""
    weights = (p for p in module._parameters.values() if p is not None)
    return type(module).__name__.endswith("Experts") and any(weight.dim() == 3 for weight in weights)


def _skipped_by_default(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """The modules of a transformers model that its quantizers leave alone, unless `layout` takes heads too.

    Source: transformers 5.23, `quantizers/base.py`: `get_keys_to_not_convert`: output embeddings, what is tied, and the
    module of the last parameter.
    """
    ask = getattr(model, "get_output_embeddings", None)
    if layout.heads or not callable(ask):
        return ()
    names = [name for name, _ in nn.Module.named_parameters(model)]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    head = ask()
    paths = [path for path, module in model.named_modules() if head is not None and module is head]
    return tuple(re.escape(name.removesuffix(".weight")) for name in (*tied, *tied.values(), *names[-1:], *paths))


def _parts(module: nn.Module, layout: Layout) -> dict[str, Parts]:
    replacing: dict[str, Parts] = {}
    least = 3 if layout.experts and _has_experts(module) else 0
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() >= least:
            shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
            shape = shape[::-1] if is_conv1d(module) else shape
            make = layout.weight if parameter.dim() > 1 else partial(layout.bias, type(module).__name__)
            replacing[name] = make(shape, dtype)
    return {name: parts for name, parts in replacing.items() if parts}


def _freeze(model: nn.Module, converted: list[tuple[nn.Module, str]]) -> None:
    those = {(id(module), name) for module, name in converted}
    unconverted = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()  # TorchScript's table cannot be iterated itself
        if (id(module), name) not in those
    }
    for module, name in converted:
        parameter = getattr(module, name)
        if id(parameter) in unconverted:
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
        else:
            parameter.requires_grad_(False)


def _refuse_quantized(model: nn.Module) -> None:
    for tensor in stored_tensors(model):
        if tensor.wrapper == TORCHSCRIPT_CONSTANT and tensor.kind == "packed":
            raise ScenarioError(f"the model is frozen TorchScript: {tensor.name} is a constant in its code")
        if tensor.kind != "attribute" and (tensor.wrapper or tensor.spec.dtype.startswith(("qint", "quint"))):
            raise ScenarioError(
                f"the model is converted already: {tensor.name} is {tensor.wrapper or tensor.spec.dtype}"
            )


# What is stored afterwards


def _stored(
    tensor: StoredTensor, quantized: Quantized, owners: dict[str, str], bytes_of: Mapping[str, int]
) -> StoredTensor:
    parts = quantized.replaced.get(tensor.name)
    if parts:
        return _quantized_row(tensor, parts, quantized)
    origin = tensor.tied_to
    if origin is not None and _untied(quantized.replaced.get(origin, ())):
        owner = owners.setdefault(origin, tensor.name)
        if owner == tensor.name:
            return dataclasses.replace(tensor, bytes=bytes_of.get(origin, 0), tied_to=None)
        return dataclasses.replace(tensor, tied_to=owner)
    return tensor


def _untied(parts: Parts) -> bool:
    """Whether `parts` are new memory in place of the parameter's; a packed bias is the parameter itself."""
    return bool(parts) and parts[0].name != "bias"


def _quantized_row(tensor: StoredTensor, parts: Parts, quantized: Quantized) -> StoredTensor:
    shared = tensor.tied_to is not None and not _untied(parts)
    total = sum(part.bytes for part in (parts[1:] if shared else parts))
    spec = tensor.spec if quantized.claims is None or not _untied(parts) else parts[0].spec
    reported = tensor.reported_bytes if spec == tensor.spec else parts[0].bytes
    reported = total if quantized.separate else reported
    return dataclasses.replace(
        tensor,
        kind="packed" if quantized.packed else tensor.kind,
        spec=spec,
        bytes=total,
        reported_bytes=reported,
        trainable=False,
        tied_to=tensor.tied_to if shared and not total else None,
        wrapper=quantized.wrapper,
        parts=parts if len(parts) > 1 else (),
    )


# How quantized layers run


def run_as(kernel: Kernel, modules: Iterable[nn.Module]) -> None:
    """Let `modules` (of a copy that memsize may change) make the copies that a library's quantized modules make.

    Sources: torchao's `Int8Tensor` and `Float8Tensor` (a weight-only linear multiplies by a copy of the weight in the
    input's dtype, which autograd keeps for the input's gradient), bitsandbytes 0.50's `MatMul4Bit` and `gemm_4bit` (a
    copy in the forward and one in the backward, none kept), its `MatMul8bitLt` (see `_UnpackedLinear`), transformers'
    `FP8LinearFunction` (a copy in the backward), torch.ao (int8 kernels without a gradient). In place of `Conv1D`,
    transformers puts bitsandbytes' layers with the transposed weight (5.23, `integrations/bitsandbytes.py`).
    """
    for module in modules:
        if kernel == "no gradient":
            vars(module)["forward"] = torch.no_grad()(module.forward)
        elif kernel == "copy kept" and isinstance(module, nn.Linear):
            vars(module)["forward"] = partial(_with_copy, module)
        elif kernel in _UNPACKED and (isinstance(module, nn.Linear) or is_conv1d(module)):
            vars(module)["forward"] = partial(_unpacked, kernel, module)


_UNPACKED: Final = ("copy freed", "copy in backward", "int8 product")


def is_unpacked(module: nn.Module) -> bool:
    """Whether `run_as` lets `module` unpack its weight as bitsandbytes' layers do."""
    return getattr(vars(module).get("forward"), "func", None) is _unpacked


def _with_copy(module: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight.to(x.dtype, copy=True), module.bias)


def _unpacked(kernel: Kernel, module: Any, x: Tensor) -> Any:
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    weight = module.weight.t() if is_conv1d(module) else module.weight
    result = _UnpackedLinear.apply(x.to(dtype), weight, bias, kernel)  # type: ignore[no-untyped-call]
    return result.to(x.dtype)


class _UnpackedLinear(torch.autograd.Function):
    """A linear layer whose weight is unpacked for a product and dropped after it, in the forward or the backward.

    An int8 product takes values of its input in float16 and int8, makes one in int32, and keeps its input (bitsandbytes
    0.50, `autograd/_functions.py`: `MatMul8bitLt`, and `int8_scaled_mm` in `backends/default`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel) -> Tensor:
        ctx.save_for_backward(weight, *((x,) if kernel == "int8 product" else ()))
        ctx.bias_dtype = None if bias is None else bias.dtype
        if kernel == "copy freed" and x.numel() > FUSED_ROWS * x.shape[-1]:
            return functional.linear(x, weight.to(x.dtype, copy=True), bias)
        rows, outputs, half = x.shape[:-1], weight.shape[0], x
        if kernel == "int8 product":
            half = x.to(torch.float16)
            _ = torch.empty_like(half, dtype=torch.int8), x.new_empty((*rows, outputs), dtype=torch.int32)
        del half
        # Stored values of another dtype are unpacked in registers, which no op on `meta` does.
        return functional.linear(x, weight, bias) if weight.dtype == x.dtype else x.new_empty((*rows, outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, Tensor | None, None]:
        weight, gradient = ctx.saved_tensors[0], gradients[0]
        has_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        bias = gradient.flatten(0, -2).sum(0, dtype=ctx.bias_dtype) if has_bias else None
        back = gradient.matmul(weight.to(gradient.dtype, copy=True)) if ctx.needs_input_grad[0] else None
        return back, None, bias, None


# torchao itself


def _config(torchao: ModuleType, name: str) -> Any:
    names = [entry for entry in dir(torchao) if entry.endswith("Config")]
    if name not in names:
        raise UnknownScenarioError("configuration", name, names, problem=f"torchao has no {quoted(name)}")
    try:
        with quiet(logging.WARNING):
            config = getattr(torchao, name)()
    except Exception as error:
        raise ScenarioError(f"torchao's {name} cannot be made from its defaults: {first_line(error)}") from error
    # Left on, it would change the matmul precision of the whole process.
    if hasattr(config, "set_inductor_config"):
        config.set_inductor_config = False
    return config


def _read_back(model: nn.Module, config_name: str) -> Quantized:
    replaced = {t.name: t.parts for t in stored_tensors(model) if t.kind == "parameter" and t.wrapper}
    if not replaced:
        raise ScenarioError(f"torchao's {config_name} changed nothing: it converts Linear, of the shapes that suit it")
    left = {
        path: f"torchao's {config_name} left it alone"
        for path, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
        and not any(p is not None and wrapper_name(p) for p in module._parameters.values())
    }
    wrapper = next(t.wrapper for t in stored_tensors(model) if t.wrapper) or "torchao"
    return Quantized(f"torchao:{config_name}", replaced, left, wrapper)
