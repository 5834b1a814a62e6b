"""A model with its weights, on a device, as a scenario stores and runs it: what really runs beside the prediction.

Weights that were never made get random values on the device itself, in the dtype in which the scenario keeps them, so
that nothing larger is there on the way. Small tensors keep the values that the constructor gave them. Memory depends on
none of them, except where a model looks at its own numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from memsize.analysis.runner import Runner
from memsize.errors import ScenarioError
from memsize.internals.pytree import arguments_in, map_tensors
from memsize.model.materialize import executable_call
from memsize.model.meta_copy import in_mode, inside
from memsize.precision.quantized import apply_torchao
from memsize.precision.recipes import Recipe, apply_scenario, floating_dtype
from memsize.spec.scenario import TORCHAO, Scenario
from memsize.tracing.run import Setup, give_shapes

_BY_TORCHAO: Final = {"int8-weight": "Int8WeightOnlyConfig", "fp8-weight": "Float8WeightOnlyConfig"}
"""Layouts that torchao itself makes, and its configuration for them."""
_SPREAD: Final = 0.02
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")


def realized(runner: Runner, scenario: Scenario, device: torch.device) -> Setup:
    """The runner's model (left as it is) and its inputs on `device`, ready to run under `scenario`.

    Raises `ScenarioError` for a scenario that does not run on a GPU, or whose library is missing.
    """
    model = copy.deepcopy(inside(runner.model))
    recipe = _applied(model, scenario, device)
    in_mode(model, runner.training)
    call = executable_call(runner.call(scenario, recipe.floating), device)
    give_shapes(model, call, runner.training, str(device))
    autocast = partial(torch.autocast, device.type, getattr(torch, scenario.autocast)) if scenario.autocast else None
    return Setup(
        name=runner.name,
        scenario=scenario.name,
        model=model,
        call=call,
        training=runner.training,
        batch_size=runner.inputs.batch_size,
        device=str(device),
        masters=scenario.master_weights,
        scaled=scenario.autocast == "float16",
        autocast=autocast or nullcontext,
    )


def _applied(model: nn.Module, scenario: Scenario, device: torch.device) -> Recipe:
    """`model` on the device, as the scenario has it. What is cast is cast first; a library quantizes what is there."""
    if scenario.recipe != "quantized":
        recipe = apply_scenario(model, scenario)
        place(model, device)
        return recipe
    layout = scenario.layout or ""
    config = layout[len(TORCHAO) :] if layout.startswith(TORCHAO) else _BY_TORCHAO.get(layout)
    if config is None:
        raise ScenarioError(f"{scenario.name} cannot be run on a GPU here: torchao:CONFIG runs what torchao quantizes")
    floating = floating_dtype(model) or torch.float32
    place(model, device)
    apply_torchao(model, config)
    return Recipe(model, floating)


@torch.no_grad()
def place(model: nn.Module, device: torch.device) -> None:
    """Move everything that `model.to(device)` moves, children first as it does; what has no values gets some."""
    made: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []  # an id is one tensor's as long as that lives

    def placed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _placed(name, tensor, device)
            originals.append(tensor)
        return made[id(tensor)]

    for module in _children_first(model):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = placed(name, tensor)  # type: ignore[assignment]
        for name, value in _unmade(module):
            vars(module)[name] = map_tensors(partial(placed, name), value)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # else the first forward does it


def _unmade(module: nn.Module) -> list[tuple[str, Any]]:
    """Plain attributes that hold tensors without values. `to` leaves others where they are."""
    held = [(name, value) for name, value in vars(module).items() if name not in _REGISTRIES]
    return [(name, value) for name, value in held if any(tensor.is_meta for tensor in arguments_in([value]))]


def _children_first(model: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from walk(child)
            yield module

    return walk(model)


def _placed(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        kind: Any = type(tensor)
        return kind(tensor.requires_grad, device=device, dtype=tensor.dtype)  # type: ignore[no-any-return]
    if tensor.is_meta:
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        _fill(name, moved)
    else:
        moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Values with which a network neither dies nor overflows: scales and variances of one, small weights."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.zero_()
    elif tensor.dim() == 1 and name in ("weight", "running_var"):
        tensor.fill_(1)
    else:
        tensor.normal_(0.0, _SPREAD)
