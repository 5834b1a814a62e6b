"""One forward as a workload: with what autograd keeps, or without gradients."""

from __future__ import annotations

import torch

from memsize.records.trace import Trace
from memsize.tracing.run import Run, Setup


def run_forward(setup: Setup) -> Trace:
    """The trace of one forward in gradient mode, with what autograd keeps at its end.

    Raises `ForwardError` when the model's own code fails; its `trace` holds the layers that ran.
    """
    run = Run(setup)
    with run.recording(), torch.enable_grad(), setup.autocast():
        run.result = setup.model(*setup.call[0], **setup.call[1])
    return run.trace()


def run_inference(setup: Setup) -> Trace:
    """The trace of one forward without gradients, outputs freed as PyTorch frees them."""
    run = Run(setup)
    with run.recording(), torch.no_grad(), setup.autocast():
        run.result = setup.model(*setup.call[0], **setup.call[1])
    return run.trace()


def kept_for_backward(setup: Setup) -> int:
    """Bytes that one forward keeps for backward, parameters apart: all that the search for a batch size asks."""
    run = Run(setup, tables=False)
    with run.recording(inner=False), torch.enable_grad(), setup.autocast():
        run.result = setup.model(*setup.call[0], **setup.call[1])
    return run.ledger.kept(run.calls.kept)
