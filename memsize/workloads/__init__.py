"""Workloads: values that turn a setup into the trace of its run. This module has the simplest, one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from memsize.records.trace import Trace
from memsize.tracing.run import Run, Setup


class Workload(Protocol):
    """Something to run with a model: one forward, some training steps, the user's own loop."""

    def run(self, setup: Setup) -> Trace:
        """Run the workload on `setup`, whose model it may change.

        Raises `ForwardError` when the model's own code fails; its `trace` holds the layers that ran.
        """
        ...


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward in gradient mode, up to the tensors that autograd saves, as shown in the tables of a report."""

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
    """Measure the bytes that one forward saves for backward, parameters apart."""
    run = Run(setup, tables=False)
    with run.recording(inner=False), torch.enable_grad(), setup.precision.autocast():
        run.result = setup.model(*setup.call[0], **setup.call[1])
    return run.ledger.saved_bytes(run.calls.saved_storages)
