"""Parameters of a mixture of experts: all, and those that one token uses, which has a few experts in each layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch import nn

_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk", "moe_router_topk", "topk")
"""Attributes that say how many experts a router chooses: of transformers' configs and modules, torchtitan's
`TokenChoiceTopKRouter`, and Megatron Core's configs."""
_LISTS: Final = (nn.ModuleList, nn.ModuleDict)


class _ExpertLayer(NamedTuple):
    experts: int
    parameters: int
    chosen: int | None
    """How many experts a token goes to."""
    fused: bool
    """Whether one weight holds all experts."""


def active_parameters(model: nn.Module) -> int | None:
    """How many parameters one token uses; None without experts, or where nothing says how many a router chooses."""
    idle = 0
    for experts, parameters, chosen, _ in _expert_layers(model, None):
        if chosen is None:
            return None
        idle += parameters // experts * max(experts - chosen, 0)
    return sum(p.numel() for p in model.parameters()) - idle if idle else None


def expert_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters belong to experts, and how many of these to 3-dimensional weights; (0, 0) without experts."""
    layers = list(_expert_layers(model, None))
    return sum(layer.parameters for layer in layers), sum(layer.parameters for layer in layers if layer.fused)


def _expert_layers(module: nn.Module, chosen: int | None) -> Iterator[_ExpertLayer]:
    """Yield each layer of experts: a module of 3-dimensional weights, or a list."""
    chosen = _chosen(module) or next(filter(None, map(_chosen, module.children())), None) or chosen
    for name, child in module.named_children():
        weights = [weight for weight in child._parameters.values() if weight is not None]
        is_named = "expert" in f"{name} {type(child).__name__}".lower()
        if is_named and any(weight.dim() == 3 for weight in weights) and len(set(map(len, weights))) == 1:
            yield _ExpertLayer(len(weights[0]), sum(weight.numel() for weight in weights), chosen, True)
        elif is_named and isinstance(child, _LISTS) and len(child) > 1:
            yield _ExpertLayer(len(child), sum(weight.numel() for weight in child.parameters()), chosen, False)
        else:
            yield from _expert_layers(child, chosen)


def _chosen(module: nn.Module) -> int | None:
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for holder in (vars(module), getattr(config, "__dict__", {})):
        for name in _CHOSEN:
            if type(number := holder.get(name)) is int and number > 0:
                return number
    return None
