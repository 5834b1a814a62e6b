"""How a scenario acts on a twin: casts, autocast regions, apex's levels, quantized storage.

Sources: `torch.nn.Module.half` (casts floating parameters and buffers, nothing else), torch.amp's documentation,
apex.amp's `opt_levels` and `_initialize` (what O0 to O3 cast, and that O2 and O3 cast inputs down and outputs to
float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsize.errors import ScenarioError
from memsize.precision.layouts import LAYOUTS
from memsize.precision.quantized import Quantized, apply_layout, apply_torchao, stored_under
from memsize.record import StoredTensor, TensorSpec
from memsize.scenario import TORCHAO, Scenario
from memsize.semantics import autocast_region, cuda_semantics
from memsize.tracing.feed import cast_floating
from memsize.tracing.ledger import Ledger

Region = Callable[[Ledger], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Recipe:
    """A twin made ready for a scenario.

    `floating` is the dtype that floating inputs come in (None: as they are), `region` what the forward runs in,
    `rewrite` how the scenario stores the twin's tensors.
    """

    twin: nn.Module
    floating: torch.dtype | None
    region: Region
    rewrite: Callable[[tuple[StoredTensor, ...]], tuple[StoredTensor, ...]]
    quantized: Quantized | None = None


def apply_scenario(twin: nn.Module, scenario: Scenario) -> Recipe:
    """`twin` (ours to change) as `scenario` stores and runs it; raises `ScenarioError` with the reason if it can't."""
    if scenario.recipe == "quantized":
        return _quantized(twin, scenario)
    if scenario.dtype is not None:
        _cast(twin, _dtype(scenario.dtype), scenario.keep_norms)
    if scenario.cast_io:
        _cast_inputs_and_outputs(twin, _dtype(scenario.dtype))
    floating = _dtype(scenario.dtype) if scenario.recipe == "cast" or scenario.autocast else floating_dtype(twin)
    if scenario.recipe == "apex":
        floating = torch.float32
    return Recipe(
        twin, floating, _region(scenario), _with_masters if scenario.master_weights else lambda tensors: tensors
    )


def _with_masters(tensors: tuple[StoredTensor, ...]) -> tuple[StoredTensor, ...]:
    """`tensors` and the float32 copies that apex's optimizer keeps of every trainable float16 parameter."""
    halves = [
        t for t in tensors if t.kind == "parameter" and t.trainable and t.spec.dtype == "float16" and not t.tied_to
    ]
    return (*tensors, *map(_master, halves))


def _master(tensor: StoredTensor) -> StoredTensor:
    size, spec = tensor.elements * 4, TensorSpec("float32", tensor.spec.shape)
    return StoredTensor(f"{tensor.name} (master)", "master", tensor.layer, spec, tensor.elements, size, size, False)


def floating_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the model's first floating parameter: what an input without a dtype is taken to be."""
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1), None)


def _dtype(name: str | None) -> torch.dtype:
    found: torch.dtype = getattr(torch, name or "float32")
    return found


def _cast(twin: nn.Module, dtype: torch.dtype, keep_norms: bool) -> None:
    try:
        if keep_norms:
            _cast_all_but_norms(twin, dtype)
        else:
            twin.to(dtype)
    except Exception as error:  # a wrapper subclass may raise anything when it is asked to change its dtype
        raise ScenarioError(f"the model's tensors cannot be cast to {dtype}: {str(error).splitlines()[0]}") from error


def _cast_all_but_norms(twin: nn.Module, dtype: torch.dtype) -> None:
    """apex's `convert_network`: batch norms with parameters of their own stay float32."""
    cast: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    twin.to(torch.float32)
    for module in twin.modules():
        if not (isinstance(module, _BatchNorm) and module.affine):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = cast(parameter.data)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else cast(buffer)


def _cast_inputs_and_outputs(twin: nn.Module, dtype: torch.dtype) -> None:
    """apex's patched forward: floating inputs cast down on the way in, outputs cast to float32 on the way out."""
    forward = twin.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = forward(*cast_floating(args, dtype), **cast_floating(kwargs, dtype))
        return cast_floating(result, torch.float32)

    twin.forward = patched


def _region(scenario: Scenario) -> Region:
    autocast = None if scenario.autocast is None else _dtype(scenario.autocast)

    @contextmanager
    def region(ledger: Ledger) -> Iterator[None]:
        def copied(source: torch.Tensor, copy: torch.Tensor) -> None:
            ledger.mark(copy, "cast copy")

        with cuda_semantics(autocast_observer=copied), nullcontext() if autocast is None else autocast_region(autocast):
            yield

    return region


def _quantized(twin: nn.Module, scenario: Scenario) -> Recipe:
    layout = scenario.layout or ""
    if layout.startswith(TORCHAO):
        apply_torchao(twin, layout[len(TORCHAO) :])
        return Recipe(twin, floating_dtype(twin), _region(scenario), lambda tensors: tensors)
    quantized = apply_layout(twin.to(torch.float32), LAYOUTS[layout])
    return Recipe(twin, torch.float32, _region(scenario), lambda tensors: stored_under(tensors, quantized), quantized)
