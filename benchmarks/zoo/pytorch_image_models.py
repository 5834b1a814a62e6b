"""Every model of timm."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.zoo.case import Case
from benchmarks.zoo.counting import counted

ABOUT = "timm: every name of `timm.list_models()`."
DISTRIBUTIONS = ("timm",)


def cases() -> Iterator[Case]:
    """All of `timm.list_models()`."""
    import timm

    yield from (Case("timm", name) for name in timm.list_models())


def parameters(case: Case) -> int:
    """What timm itself builds by that name, counted."""
    import timm

    return counted(lambda: timm.create_model(case.name, pretrained=False, **case.arguments))


def refusal(_: Case) -> str:
    """Nothing: each of these models can be built and run."""
    return ""
