"""Remedies that change a twin which is ready to run: recomputed blocks, frozen weights, adapters, in-place activations.

The twin is ours; the model that it stands for is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memsize.fitting.case import NotApplicable
from memsize.tracing.run import Setup

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_IN_PLACE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Hardtanh, nn.RReLU)
"""Activations whose backward needs their output only, so that writing it over the input loses nothing."""


def recompute_blocks(setup: Setup) -> Setup:
    """Checkpoint each of the repeated blocks: it keeps its input, and runs again in backward."""
    for block in repeated_blocks(setup.twin):
        block.forward = _checkpointed(block.forward)
    config = getattr(setup.twin, "config", None)
    if getattr(config, "use_cache", False):
        # Running a block twice would also write its keys and values to the cache twice.
        config.use_cache = False  # type: ignore[union-attr]
    return setup


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of one class, not leaves, that stand in lists or sequences: the class that holds most parameters.

    Raises `NotApplicable` where no class comes twice.
    """
    found: dict[type, list[nn.Module]] = {}
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            for child in container.children():
                if not isinstance(child, _CONTAINERS) and any(True for _ in child.children()):
                    found.setdefault(type(child), []).append(child)
    repeated = [blocks for blocks in found.values() if len(blocks) > 1]
    if not repeated:
        raise NotApplicable("no module of several layers stands more than once in a list or a sequence")
    return max(repeated, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def write_in_place(setup: Setup) -> Setup:
    """Let activations write over their input, where a backward without it exists."""
    found = [module for module in setup.twin.modules() if isinstance(module, _IN_PLACE) and not module.inplace]
    if not found:
        raise NotApplicable("no activation module has an in-place form that it doesn't use already")
    for module in found:
        module.inplace = True
    return setup


def freeze_all_but_head(setup: Setup) -> Setup:
    """Train the last module with parameters only."""
    owners = [module for module in setup.twin.modules() if module._parameters]
    trained = [module for module in owners if any(p.requires_grad for p in module.parameters(recurse=False))]
    if len(trained) < 2:
        raise NotApplicable("one module is trained at most")
    _freeze(setup.twin)
    for parameter in trained[-1].parameters(recurse=False):
        parameter.requires_grad_(True)
    return setup


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA: everything is frozen, and each linear layer gains ``B·A·x``, with A [rank, in] and B [out, rank]."""

    rank: int

    def __call__(self, setup: Setup) -> Setup:
        linears = list(_linears(setup.twin))
        if not linears:
            raise NotApplicable("the model has no linear layer")
        _freeze(setup.twin)
        for module, inside, outside in linears:
            self._adapt(module, inside, outside)
        return setup

    def _adapt(self, module: nn.Module, inside: int, outside: int) -> None:
        weight, forward = module.weight, module.forward
        dtype = weight.dtype if isinstance(weight, torch.Tensor) and weight.is_floating_point() else torch.float32
        down, up = (
            torch.empty(shape, dtype=dtype, device="meta") for shape in ((self.rank, inside), (outside, self.rank))
        )
        module.register_parameter("lora_a", nn.Parameter(down))
        module.register_parameter("lora_b", nn.Parameter(up))

        def adapted(x: torch.Tensor) -> torch.Tensor:
            added = functional.linear(functional.linear(x, module.lora_a), module.lora_b)  # type: ignore[arg-type]
            result: torch.Tensor = forward(x) + added / math.sqrt(self.rank)
            return result

        module.forward = adapted


def _freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The head of a language model, which adapters leave alone as PEFT's ``all-linear`` does."""
    ask = getattr(model, "get_output_embeddings", None)
    return ask() if callable(ask) else None


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, int, int]]:
    """Linear layers with their widths; transformers' `Conv1D` is one that stores its weight the other way round."""
    head = _output_layer(model)
    for module in model.modules():
        if module is head:
            continue
        if isinstance(module, nn.Linear):
            yield module, module.in_features, module.out_features
        elif type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nx", None), int):
            yield module, int(module.nx), int(module.nf)  # type: ignore[arg-type]
