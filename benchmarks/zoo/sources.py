"""Where the zoo's models come from: one file per library, all with the same names.

`ABOUT` says which models they are, `DISTRIBUTIONS` are the packages whose versions matter, `cases()` yields the models,
and `parameters(case)` is the library's own count of one's parameters, as its own constructor makes them.
`refusal(case)` is what the library itself says to a model of its own that it cannot build or run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from benchmarks.zoo.case import Case

FILES = {"timm": "pytorch_image_models", "torchvision": "vision", "hf": "huggingface"}


class Source(Protocol):
    """What each library's file offers."""

    ABOUT: str
    DISTRIBUTIONS: tuple[str, ...]

    def cases(self) -> Iterator[Case]: ...

    def parameters(self, case: Case) -> int: ...

    def refusal(self, case: Case) -> str: ...


@cache
def source(library: str) -> Source:
    """The models of `library`. What a torchvision that was built for another torch misses is declared first."""
    from benchmarks.zoo import operators

    operators.declare()
    return cast(Source, import_module(f"benchmarks.zoo.{FILES[library]}"))
