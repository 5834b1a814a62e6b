"""The prediction of a run in the terms in which a GPU is measured: peaks, intervals, and the log of the last step.

Peaks are intervals where cuDNN could not be asked for the workspaces of convolutions, or where its benchmark chooses
the plans.
"""

from __future__ import annotations

from collections.abc import Iterator

from memsize.device.allocation_events import AllocationEvents
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.context import context
from memsize.device.library_workspaces import CONVOLUTIONS, dispensable, requests, variants
from memsize.device.replay import replay_within
from memsize.records.aggregates import live_bytes, split_phase
from memsize.records.gpu import Interval
from memsize.records.measurement import AllocationLog, ConvolutionWorkspace, OpLocation, Peaks, SoftwareStack, log_of
from memsize.records.trace import Trace
from memsize.records.verification import Prediction


def predict(
    trace: Trace,
    stack: SoftwareStack,
    workspaces: tuple[ConvolutionWorkspace, ...] = (),
    *,
    greediest: Trace | None = None,
) -> Prediction:
    """What a GPU with the software `stack` would show for `trace`; `workspaces` are those that cuDNN named for
    convolutions.

    `greediest` is the same run with the most that `torch.backends.cudnn.benchmark` may allocate for each convolution:
    which plan the benchmark chooses depends on timing.
    """
    config = AllocatorConfig.parse(stack.allocator)
    possible = variants(trace) if greediest is None else [requests(trace, 0), requests(greediest)]
    outside = context(stack.cuda, stack.module_loading)
    peaks = [found for each in possible for found in _peaks(each, config, trace, stack.total, outside)]
    least, most = Peaks.least(peaks), Peaks.most(peaks)
    first = _last_step(trace)
    return Prediction(
        least,
        most,
        Interval(least.reserved + outside.low, most.reserved + outside.high),
        max(list(live_bytes(trace.events))[max(first - 1, 0) :], default=0),
        _log(trace, first),
        convolves(trace),
        workspaces,
        trace.assumptions,
        trace.notes,
    )


def convolves(trace: Trace) -> bool:
    """Whether the run contains a convolution."""
    return any(event.op in CONVOLUTIONS for event in trace.events)


def _peaks(
    events: AllocationEvents, config: AllocatorConfig, trace: Trace, total: int, outside: Interval
) -> Iterator[Peaks]:
    """The peaks on a card of `total` bytes, beside the least and the most that is taken `outside` the allocator."""
    optional = dispensable(trace)
    bounded = replay_within(events, config, total, outside, streams=events.streams, optional=optional)
    for each in (bounded.with_least_overhead, bounded.with_most_overhead):
        yield Peaks(each.requested.bytes, each.allocated.bytes, each.reserved.bytes)


def _last_step(trace: Trace) -> int:
    """The first event of the last step; of a run without steps, the first after what was there before it."""
    phases = [split_phase(phase) for phase in trace.phases]
    last = max((step for _, step in phases), default=0)
    if last:
        return next((i for i, e in enumerate(trace.events) if phases[e.phase][1] == last), len(trace.events))
    return next((i for i, e in enumerate(trace.events) if phases[e.phase][0] != "setup"), len(trace.events))


def _log(trace: Trace, first: int) -> AllocationLog:
    """The events from `first` on. What was there before is below 0."""
    names = [split_phase(phase)[0] for phase in trace.phases]
    begun: set[int] = set()

    def events() -> Iterator[tuple[int, int, OpLocation]]:
        for event in trace.events[first:]:
            if event.delta > 0:
                begun.add(event.storage)
            layer = trace.layers[event.layer].path if event.layer >= 0 else None
            storage = event.storage if event.storage in begun else -1 - event.storage
            yield storage, event.delta, OpLocation(names[event.phase], layer, event.op)

    return log_of(events())
