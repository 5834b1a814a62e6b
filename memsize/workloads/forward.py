"""One forward as a workload: with what autograd keeps for backward, or without gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memsize.records.trace import Trace
from memsize.tracing.run import Run, Setup


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward in gradient mode, up to what autograd keeps at its end: what the tables of a report show."""

    def run(self, setup: Setup) -> Trace:
        run = Run(setup)
        with run.recording(), torch.enable_grad(), setup.precision.autocast():
            run.result = setup.model(*setup.call[0], **setup.call[1])
        return run.trace()


@dataclass(frozen=True, slots=True)
class Inference:
    """One forward without gradients, outputs freed as PyTorch frees them."""

    def run(self, setup: Setup) -> Trace:
        run = Run(setup)
        with run.recording(), torch.no_grad(), setup.precision.autocast():
            run.result = setup.model(*setup.call[0], **setup.call[1])
        return run.trace()


def kept_for_backward(setup: Setup) -> int:
    """Bytes that one forward keeps for backward, parameters apart: all that the search for a crossover asks for."""
    run = Run(setup, tables=False)
    with run.recording(inner=False), torch.enable_grad(), setup.precision.autocast():
        run.result = setup.model(*setup.call[0], **setup.call[1])
    return run.ledger.saved_bytes(run.calls.saved_storages)
