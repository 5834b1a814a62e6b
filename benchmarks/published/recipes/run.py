"""What every recipe ends with: the workload of a row traced as on its GPU and stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import memsize
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace

Loop = Callable[[nn.Module], Callable[..., None]]
"""Makes the body of a loop for a copy of the model; the body is called with the inputs."""


def traced(row: Row, model: nn.Module, loop: Loop, inputs: dict[str, Any], steps: int = 2) -> StepTrace:
    """The run of `loop` on the row's GPU and stack."""
    options: dict[str, Any] = {"step": loop, "steps": steps, "gpu": row.source.gpu, "stack": row.source.stack}
    return memsize.trace(model, kwargs=inputs, **options)
