"""Bounds on what a trace requests: the workspaces of convolutions may be estimates, with a lower and an upper bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memsize.device.allocator import NOTHING
from memsize.records.trace import Storage, Trace

CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
"""Ops that cuDNN computes with a workspace."""
DOUBLED: Final = 2
"""An estimated workspace may be up to this many times as large (`python -m benchmarks.workspaces` says how often it
is).
"""

Requests = list[tuple[int, int]]
"""The storage and the bytes of each event: positive where the storage appears."""


def requests(trace: Trace, factor: int = 1) -> Requests:
    """The events of a trace, with the workspaces of its convolutions `factor` times as large; 0 leaves them out."""
    if factor == 1:
        return [(event.storage, event.delta) for event in trace.events]
    return list(_scaled(trace, factor))


def is_estimated(trace: Trace) -> bool:
    """Whether any convolution workspace in the trace is an estimate."""
    workspaces = dispensable(trace) if trace.cudnn is None else frozenset()
    return bool(workspaces) and any(event.storage in workspaces for event in trace.events)


def variants(trace: Trace) -> list[Requests]:
    """The events as they are; where workspaces are estimates, also without those and with twice as much (`DOUBLED`)."""
    return [requests(trace, factor) for factor in ((1, 0, DOUBLED) if is_estimated(trace) else (1,))]


def dispensable(trace: Trace) -> frozenset[int]:
    """The storages that a run does without where there is no room: PyTorch then tries the next of cuDNN's plans, and
    most convolutions have one that needs little.
    """
    return frozenset(index for index, storage in enumerate(trace.storages) if _is_workspace(storage))


def _scaled(trace: Trace, factor: int) -> Iterator[tuple[int, int]]:
    for event in trace.events:
        if not _is_workspace(trace.storages[event.storage]):
            yield event.storage, event.delta
        else:
            yield (event.storage, factor * event.delta) if factor else NOTHING


def _is_workspace(storage: Storage) -> bool:
    return storage.role == "workspace" and storage.op in CONVOLUTIONS
