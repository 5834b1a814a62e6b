"""What a trace asks of the allocator, and how far that may be off: workspaces of convolutions can be estimates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memsize.records.trace import Trace

CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
"""Ops that cuDNN computes with a workspace."""
DOUBLED: Final = 2
"""How much more than estimated is taken for possible (`python -m benchmarks.workspaces` says how often it is)."""

Requests = list[tuple[int, int]]
"""Storage and bytes of each event: more than 0 where it appears."""


def requests(trace: Trace, factor: int = 1) -> Requests:
    """The events of a trace, with the workspaces of its convolutions `factor` times as large; 0 leaves them out."""
    if factor == 1:
        return [(event.storage, event.delta) for event in trace.events]
    return list(_scaled(trace, factor))


def is_estimated(trace: Trace) -> bool:
    """Whether workspaces of convolutions in it are estimates."""
    return trace.cudnn is None and any(_is_workspace(trace, event.storage) for event in trace.events)


def variants(trace: Trace) -> list[Requests]:
    """The events as they are; where workspaces are estimates, also without them, and with twice as much."""
    return [requests(trace, factor) for factor in ((1, 0, DOUBLED) if is_estimated(trace) else (1,))]


def _scaled(trace: Trace, factor: int) -> Iterator[tuple[int, int]]:
    for event in trace.events:
        if not _is_workspace(trace, event.storage):
            yield event.storage, event.delta
        elif factor:
            yield event.storage, factor * event.delta


def _is_workspace(trace: Trace, storage: int) -> bool:
    found = trace.storages[storage]
    return found.role == "workspace" and found.op in CONVOLUTIONS
