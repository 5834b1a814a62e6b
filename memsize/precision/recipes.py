"""How a scenario changes a copy of a model: casts, autocast regions, apex's optimization levels, quantized storage.

Sources: `torch.nn.Module.half` (casts floating parameters and buffers, nothing else), torch.amp's documentation,
apex.amp's `opt_levels` and `_initialize` (what O0 to O3 cast, and that O2 and O3 cast inputs down and outputs to
float32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsize.cuda.autocast import autocast_region
from memsize.errors import ScenarioError, first_line
from memsize.known_values.toeplitz import cast
from memsize.model.input_tensors import cast_floating
from memsize.precision.layouts import LAYOUTS, base_layout
from memsize.precision.quantization_config import CHECKPOINT, quantization_of
from memsize.precision.quantized import (
    BASE,
    Quantized,
    apply_layout,
    apply_torchao,
    is_adapter,
    quantize_as,
    stored_under,
)
from memsize.records.trace import StoredTensor, TensorSpec
from memsize.spec.scenario import TORCHAO, Scenario

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, kw_only=True)
class RunPrecision:
    """The effects of a scenario's precision on a run.

    `autocast` opens the region around forwards and losses, `forward` a region within it around forwards alone.
    `rewrite` turns the tensors that the model stores into those that the scenario stores, and `sizes` gives the bytes
    of replaced parameters, by name. `masters` asks for float32 master weights in the optimizer, `scaled` for a
    GradScaler.
    """

    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    rewrite: Callable[[tuple[StoredTensor, ...]], tuple[StoredTensor, ...]] = lambda tensors: tensors
    sizes: Mapping[str, int] = field(default_factory=dict)
    masters: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Recipe:
    """A copy of a model, ready to run under a scenario.

    `floating` is the dtype that floating inputs are cast to (None: they stay as they are), `precision` is what the
    scenario does in a run, and `quantized` says which parameters it replaces.
    """

    model: nn.Module
    floating: torch.dtype | None
    precision: RunPrecision = RunPrecision()
    quantized: Quantized | None = None


def apply_scenario(model: nn.Module, scenario: Scenario) -> Recipe:
    """Make `model`, a copy that memsize may change, store and run as `scenario` does.

    Raises `ScenarioError` with the reason where that is impossible.
    """
    if scenario.dtype is not None:
        _cast(model, _dtype(scenario.dtype), scenario.keep_norms)
    base = vars(model).get(BASE)
    if base and scenario.recipe in ("apex", "quantized"):
        raise ScenarioError(f"the base is stored as {base} already")
    if scenario.recipe == "quantized":
        return _quantized(model, scenario)
    if scenario.cast_io:
        _cast_inputs_and_outputs(model, _dtype(scenario.dtype))
    autocast = partial(autocast_region, _dtype(scenario.autocast)) if scenario.autocast else nullcontext
    stored = quantization_of(model) if scenario.recipe == "as-given" else None
    if base:
        return _stored_as(model, scenario, apply_layout(model, base_layout(base)), autocast)
    if stored:
        return _stored_as(model, scenario, apply_layout(model, stored.layout, stored.skipped), autocast)
    is_cast = scenario.dtype is not None and scenario.recipe in ("cast", "autocast")
    floating = _dtype(scenario.dtype) if is_cast else floating_dtype(model)
    if scenario.recipe == "apex":
        floating = torch.float32
    rewrite = _with_masters if scenario.master_weights else tuple
    return Recipe(model, floating, run_precision(scenario, autocast=autocast, rewrite=rewrite))


def run_precision(scenario: Scenario, **effects: Any) -> RunPrecision:
    """Return what `scenario` asks of the optimizer and the GradScaler, with these other `effects` in the run."""
    return RunPrecision(masters=scenario.master_weights, scaled=scenario.autocast == "float16", **effects)


def _with_masters(tensors: tuple[StoredTensor, ...]) -> tuple[StoredTensor, ...]:
    """`tensors` plus the float32 copies that apex's optimizer keeps of all trainable float16 parameters."""
    masters = []
    for t in tensors:
        if t.kind == "parameter" and t.trainable and t.spec.dtype == "float16" and not t.tied_to:
            size, spec = t.elements * 4, TensorSpec("float32", t.spec.shape)
            masters.append(StoredTensor(f"{t.name} (master)", "master", t.layer, spec, t.elements, size, size, False))
    return (*tensors, *masters)


def floating_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the model's first floating parameter, which inputs without a dtype are assumed to have."""
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1), None)


def _dtype(name: str | None) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name or "float32")
    return dtype


def _cast(model: nn.Module, dtype: torch.dtype, keep_norms: bool) -> None:
    try:
        has_adapters = any(map(is_adapter, model.modules()))
        first = torch.float32 if keep_norms else dtype
        # As `Module.half` and its like do. `Module.to` would also make complex tensors real.
        if not has_adapters and not _has_only(model, first):
            model._apply(lambda tensor: cast(tensor, first) if tensor.is_floating_point() else tensor)
        for module in model.modules() if keep_norms or has_adapters else ():
            # apex's `convert_network`: batch norms with parameters of their own stay float32, as adapters do.
            if is_adapter(module) or (keep_norms and isinstance(module, _BatchNorm) and module.affine):
                continue
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = cast(buffer, dtype)
    except Exception as error:  # a wrapper subclass may raise anything when it is asked to change its dtype
        raise ScenarioError(f"the model's tensors cannot be cast to {dtype}: {first_line(error)}") from error


def _has_only(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` changes nothing. Nobody can tell what a module with its own `_apply` casts."""
    for module in model.modules():
        if type(module)._apply is not nn.Module._apply or "_apply" in vars(module):
            return False
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            # Tensor subclasses may cast as they like.
            is_plain = tensor is None or type(tensor) in _PLAIN
            if not is_plain or (tensor is not None and tensor.dtype is not dtype and tensor.is_floating_point()):
                return False
    return True


def _cast_inputs_and_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """apex's patched forward: floating inputs are cast down, and outputs are cast to float32."""
    forward = model.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = forward(*cast_floating(args, dtype), **cast_floating(kwargs, dtype))
        return cast_floating(result, torch.float32)

    model.forward = patched


def _quantized(model: nn.Module, scenario: Scenario) -> Recipe:
    layout = scenario.layout or ""
    if layout.startswith(TORCHAO):
        quantized = apply_torchao(model, layout[len(TORCHAO) :])
        return Recipe(model, floating_dtype(model), run_precision(scenario), quantized)
    if layout.startswith(CHECKPOINT):
        return _stored_as(model, scenario, quantize_as(model, layout[len(CHECKPOINT) :]))
    if LAYOUTS[layout].packed:
        # torch.ao converts float32 modules only; the others quantize a model in the dtype it has.
        model.to(torch.float32)
    return _stored_as(model, scenario, apply_layout(model, LAYOUTS[layout]))


def _stored_as(model: nn.Module, scenario: Scenario, quantized: Quantized, autocast: Any = nullcontext) -> Recipe:
    sizes = {name: sum(part.bytes for part in parts) for name, parts in quantized.replaced.items()}
    rewrite = partial(stored_under, quantized=quantized)
    precision = run_precision(scenario, autocast=autocast, rewrite=rewrite, sizes=sizes)
    return Recipe(model, floating_dtype(model) or torch.float32, precision, quantized)
