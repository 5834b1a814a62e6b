"""Workloads: values that turn a setup into the trace of its run. This module has the simplest, one forward."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from memsize.records.trace import Trace
from memsize.tracing.run import Run, Setup
from memsize.workloads.pipeline_phases import in_phases, phases_of


class Proof(NamedTuple):
    """A run of the whole model that shows whether runs of a `kind` follow from those of models with fewer blocks."""

    kind: Hashable
    workload: Workload


class Record(Protocol):
    """Data that a run records beside its trace: for each of its `steps`, values that blocks add to in their order."""

    steps: list[Any]


class Workload(Protocol):
    """Something to run with a model: one forward, some training steps, the user's own loop."""

    record: Record | None = None

    @property
    def proof(self) -> Proof | None:
        """The run that has to be extended correctly before this one is. There is none where a function of the user's,
        or a size, may tell one block from another: then all blocks are run.
        """
        return None

    @property
    def apart(self) -> Workload | None:
        """The workload that short models run in place of this one, where sizes tell one block from another."""
        return None

    def joined(self, apart: Trace, like: Trace) -> Trace:
        """Return the run of this workload that follows from a run of `apart`; `like` is a run of this one at any depth.

        Raises `NotRepeatedError` where it does not follow.
        """
        return apart

    def run(self, setup: Setup) -> Trace:
        """Run the workload on `setup`, whose model it may change; the `trace` of a `ForwardError` has what ran."""
        ...


@dataclass(frozen=True, slots=True)
class Forward(Workload):
    """One forward in gradient mode, up to the tensors that autograd saves, as shown in the tables of a report."""

    gradients: ClassVar = True

    @property
    def proof(self) -> Proof:
        return Proof(type(self), self)

    def run(self, setup: Setup) -> Trace:
        return in_phases(_forward(Run(setup), self.gradients).trace(), phases_of(setup.model))


@dataclass(frozen=True, slots=True)
class Inference(Forward):
    """One forward without gradients, outputs freed as PyTorch frees them."""

    gradients: ClassVar = False


def kept_for_backward(setup: Setup) -> int:
    """Measure the bytes that one forward saves for backward, parameters apart."""
    run = Run(setup, tables=False)
    run.ledger.line = -1
    _forward(run, gradients=True, inner=False)
    return run.ledger.saved_bytes(run.calls.saved_storages)


def _forward(run: Run, gradients: bool, inner: bool = True) -> Run:
    with run.recording(inner), torch.set_grad_enabled(gradients), run.setup.precision.autocast():
        run.result = run.setup.model(*run.setup.call[0], **run.setup.call[1])
    return run
