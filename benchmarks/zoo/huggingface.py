"""Every architecture of transformers whose config builds with defaults, with few layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from benchmarks.zoo.case import Case
from benchmarks.zoo.counting import counted

LAYERS = 2
"""Hidden layers that are left of each model: more are more of the same."""

ABOUT = f"transformers: every model type whose config can be made with defaults, with {LAYERS} of its hidden layers."
DISTRIBUTIONS = ("transformers",)


def cases() -> Iterator[Case]:
    """Every model type of transformers' config mapping whose config class can be made without arguments."""
    import transformers

    for name in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[name]()
        except Exception:  # configs check themselves, each in its own words
            continue
        yield Case("hf", name, _reduced(config))


def _reduced(config: Any) -> dict[str, Any]:
    layers = getattr(config, "num_hidden_layers", None)
    return {"num_hidden_layers": LAYERS} if isinstance(layers, int) and layers > LAYERS else {}


def parameters(case: Case) -> int:
    """What the constructor of the class that memsize chose makes of the same config, counted."""
    from memsize.loading import load

    model: Any = load(case.target, case.arguments).module
    kind, config = type(model), copy.deepcopy(model.config)
    del model
    return counted(lambda: kind(config))
