"""What memsize says of a run, in the terms in which a GPU is measured: peaks, intervals, and the log of the last step.

cuDNN's convolutions take a workspace that cannot be derived without the library: from nothing to about what the largest
tensor takes that they work on. Peaks of convolutional nets are intervals for that reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memsize.device import AllocatorConfig, Interval, replay
from memsize.device.context import context
from memsize.device.outlook import CONVOLUTIONS
from memsize.device.workspace import cudnn_workspace
from memsize.folds import live_bytes, split_phase
from memsize.record import Trace
from memsize.verifying.log import Log, Place, log_of
from memsize.verifying.measurement import Peaks, Stack

_PASSING = frozenset({"input", "output", "activation", "temporary", "cast copy"})
"""Roles of the tensors that a convolution works on."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The peaks of a run. `most` are those with the largest workspaces that cuDNN may take, the same where it takes
    none; `device` is reserved and the CUDA context. `log` holds what the last step allocates and frees."""

    peaks: Peaks
    most: Peaks
    device: Interval
    steady: int
    log: Log
    convolutional: bool = False
    """Whether a convolution runs: cuDNN's workspaces and its benchmark are theirs."""
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def predicted(trace: Trace, stack: Stack, *, benchmark: bool = False) -> Prediction:
    """What a GPU of `stack` would show of `trace`; `benchmark` is `torch.backends.cudnn.benchmark`."""
    config = AllocatorConfig.parse(stack.allocator)
    plain = _peaks([(event.storage, event.delta) for event in trace.events], config)
    # A workspace that another tensor finds free later can even save a segment: the least stays the least.
    most = plain.over(_peaks(list(_with_workspaces(trace, benchmark)), config))
    outside = context(stack.cuda, stack.module_loading)
    first = _last_step(trace)
    return Prediction(
        plain,
        most,
        Interval(plain.reserved + outside.low, most.reserved + outside.high),
        max(list(live_bytes(trace.events))[max(first - 1, 0) :], default=0),
        _log(trace, first),
        convolves(trace),
        trace.assumptions,
        trace.notes,
    )


def convolves(trace: Trace) -> bool:
    """Whether a convolution runs."""
    return any(event.op in CONVOLUTIONS for event in trace.events)


def _peaks(events: list[tuple[int, int]], config: AllocatorConfig) -> Peaks:
    found = replay(events, config)
    return Peaks(found.requested.bytes, found.allocated.bytes, found.reserved.bytes)


def _with_workspaces(trace: Trace, benchmark: bool) -> Iterator[tuple[int, int]]:
    """The events, and after each tensor that a convolution makes the largest workspace that it may have meanwhile."""
    live: dict[int, int] = {}
    extra = len(trace.storages)
    for event in trace.events:
        yield event.storage, event.delta
        left = live.get(event.storage, 0) + event.delta
        if trace.storages[event.storage].role in _PASSING:
            live[event.storage] = left
        if not left:
            live.pop(event.storage, None)
        if event.delta > 0 and event.op in CONVOLUTIONS:
            most = cudnn_workspace(max(live.values(), default=0), benchmark=benchmark).high
            if most:
                yield extra, most
                yield extra, -most
                extra += 1


def _last_step(trace: Trace) -> int:
    """The first event of the last step; of a run without steps, the first after what was there before it."""
    phases = [split_phase(phase) for phase in trace.phases]
    last = max((step for _, step in phases), default=0)
    if last:
        return next((i for i, e in enumerate(trace.events) if phases[e.phase][1] == last), len(trace.events))
    return next((i for i, e in enumerate(trace.events) if phases[e.phase][0] != "setup"), len(trace.events))


def _log(trace: Trace, first: int) -> Log:
    """The events from `first` on. What was there before is below 0."""
    names = [split_phase(phase)[0] for phase in trace.phases]
    begun: set[int] = set()

    def events() -> Iterator[tuple[int, int, Place]]:
        for event in trace.events[first:]:
            if event.delta > 0:
                begun.add(event.storage)
            layer = trace.layers[event.layer].path if event.layer >= 0 else None
            storage = event.storage if event.storage in begun else -1 - event.storage
            yield storage, event.delta, Place(names[event.phase], layer, event.op)

    return log_of(events())
