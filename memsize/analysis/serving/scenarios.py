"""The scenarios of a server: weights as it stores them, or as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from memsize.errors import ScenarioError
from memsize.loading.hubs import checkpoint_config_of
from memsize.precision.quantization_config import checkpoint_layout
from memsize.spec.scenario import Scenario
from memsize.spec.server_rules import Rules

_ONLINE: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "fp8-weight": ("weights in fp8 but for the head", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "int4-weight": ("weights in AWQ's 4 bits but for the head", {"quant_method": "awq", "bits": 4, "group_size": 128}),
}
"""A server's own way to store a scenario's weights: with experts, without the head (`--quantization fp8` of vLLM)."""


def served_scenarios(scenarios: Sequence[Scenario], model: Any, rules: Rules) -> tuple[Scenario, ...]:
    """The scenarios to serve `model` under: as given means as its checkpoint is quantized, where its config says so;
    else fp8 and int4 weights are those that a server has.

    Raises `ScenarioError` where another scenario alone would quantize such a model anew.
    """
    quantization = checkpoint_config_of(model)
    if not isinstance(quantization, dict):
        return tuple(as_served(scenario, rules) for scenario in scenarios)
    method = quantization.get("quant_method", "no method")
    layout = checkpoint_layout(quantization, unpacked=rules.products == "unpacks")
    title = f"weights of the checkpoint ({method})"
    served = tuple(
        replace(scenario, title=title, recipe="quantized", layout=layout)
        for scenario in scenarios
        if scenario.recipe == "as-given"
    )
    if not served:
        raise ScenarioError(f"the checkpoint's weights are quantized already ({method}): serve it as-given")
    return served


def as_served(scenario: Scenario, rules: Rules) -> Scenario:
    """`scenario` with quantized weights as a server has them."""
    if scenario.layout not in _ONLINE:
        return scenario
    title, entries = _ONLINE[scenario.layout]
    return replace(scenario, title=title, layout=checkpoint_layout(entries, unpacked=rules.products == "unpacks"))
