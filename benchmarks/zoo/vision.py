"""Every model of torchvision."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from benchmarks.zoo.case import Case
from benchmarks.zoo.counting import counted

ABOUT = "torchvision: every name of `torchvision.models.list_models()`."
DISTRIBUTIONS = ("torchvision",)


def cases() -> Iterator[Case]:
    """All of `torchvision.models.list_models()`."""
    from torchvision import models

    yield from (Case("torchvision", name) for name in models.list_models())


def parameters(case: Case) -> int:
    """What torchvision itself builds by that name without weights, counted."""
    from torchvision import models

    taken = inspect.signature(models.get_model_builder(case.name)).parameters
    none = {name: None for name in ("weights", "weights_backbone") if name in taken}
    return counted(lambda: models.get_model(case.name, **none, **case.arguments))


def refusal(_: Case) -> str:
    """Nothing: each of these models can be built and run."""
    return ""
