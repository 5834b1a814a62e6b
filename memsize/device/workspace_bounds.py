"""Bounds on what a trace requests: the workspaces of convolutions may be estimates, with a lower and an upper bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator import NOTHING
from memsize.records.columns import places
from memsize.records.trace import Trace

CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
"""Ops that cuDNN computes with a workspace."""
DOUBLED: Final = 2
"""An estimated workspace may be up to this many times as large (`python -m benchmarks.workspaces` says how often it
is).
"""


def requests(trace: Trace, factor: int = 1) -> AllocationEvents:
    """The events of a trace, with the workspaces of its convolutions `factor` times as large; 0 leaves them out."""
    import numpy as np

    flow = flow_of(trace)
    if factor == 1:
        return flow
    scaled = np.isin(flow.storages, list(dispensable(trace)))
    storages = flow.storages if factor else np.where(scaled, NOTHING[0], flow.storages)
    return replace(flow, storages=storages, deltas=np.where(scaled, factor * flow.deltas, flow.deltas))


def is_estimated(trace: Trace) -> bool:
    """Whether any convolution workspace in the trace is an estimate."""
    workspaces = dispensable(trace) if trace.cudnn is None else frozenset()
    return bool(workspaces) and any(event.storage in workspaces for event in trace.events)


def factors(trace: Trace) -> tuple[int, ...]:
    """By how much workspaces may be larger: 1; where they are estimates, also 0 and `DOUBLED`."""
    return (1, 0, DOUBLED) if is_estimated(trace) else (1,)


def variants(trace: Trace) -> list[AllocationEvents]:
    """The events as they are; where workspaces are estimates, also without those and with twice as much (`DOUBLED`)."""
    return [requests(trace, factor) for factor in factors(trace)]


def dispensable(trace: Trace) -> frozenset[int]:
    """The storages that a run does without where there is no room: PyTorch then tries the next of cuDNN's plans, and
    most convolutions have one that needs little.
    """
    storages = trace.storages
    return frozenset(place for place in places(storages, "role", {"workspace"}) if storages[place].op in CONVOLUTIONS)
