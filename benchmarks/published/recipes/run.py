"""What every recipe ends with: the workload of a row traced as on its GPU and stack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import memsize
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace

Loop = Callable[[nn.Module], Callable[..., None]]
"""Makes the body of a loop for a copy of the model; the body is called with the inputs."""


@contextmanager
def without_torchao() -> Iterator[None]:
    """Hide the installed torchao while a diffusers is imported that fails beside it."""
    before = sys.modules.get("torchao")
    sys.modules["torchao"] = None  # type: ignore[assignment]
    yield
    sys.modules.pop("torchao")
    if before is not None:
        sys.modules["torchao"] = before


def traced(row: Row, model: nn.Module, loop: Loop, inputs: dict[str, Any], steps: int = 2) -> StepTrace:
    """The run of `loop` on the row's GPU and stack."""
    options: dict[str, Any] = {"step": loop, "steps": steps, "gpu": row.source.gpu, "stack": row.source.stack}
    return memsize.trace(model, kwargs=inputs, **options)
