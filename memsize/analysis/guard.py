"""`Guard`: a predicted peak against a budget, and beside what CUDA measured in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memsize.analysis.step import StepTrace
from memsize.records.finding import moment_in_words
from memsize.records.roles import noun
from memsize.units import format_bytes

ALLOCATED: Final = "allocated_bytes.all.peak"
RESERVED: Final = "reserved_bytes.all.peak"
"""The peaks' names in `torch.cuda.memory_stats`."""


@dataclass(frozen=True)
class Guard:
    """The predicted `step`, and the bytes that PyTorch's allocator may take (None: nobody knows)."""

    step: StepTrace
    budget: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the predicted reserved memory is within the budget; None without one."""
        return None if self.budget is None else self.step.peak.reserved <= self.budget

    @property
    def predicted(self) -> dict[str, int]:
        """The predicted peaks in bytes, by their names in `torch.cuda.memory_stats`."""
        return {ALLOCATED: self.step.peak.allocated, RESERVED: self.step.peak.reserved}

    def measured(self) -> dict[str, int] | None:
        """The peaks that CUDA measured so far, by the same names; None without CUDA."""
        import torch

        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats()
        return {name: stats.get(name, 0) for name in (ALLOCATED, RESERVED)}

    def text(self) -> str:
        """The prediction in a sentence: what it needs, what is there, and what most of it is."""
        peak = self.step.peak
        role, size = max(peak.roles.items(), key=lambda item: item[1], default=("activation", 0))
        where = moment_in_words(peak.peak_phase, peak.peak_layer)
        needs = f"{self.step.trace.model} needs {format_bytes(peak.reserved)} at its peak, in {where}"
        there = "" if self.budget is None else f"; {format_bytes(self.budget)} are there"
        return f"{needs}{there}. The most are {noun(role)}, {format_bytes(size)}."
