"""Live memory over a run: bytes by role after each event, its phase and layer, and what the allocator holds.

Everything is read from a `Trace` and its replay through the caching allocator. Events stand in for time, which a run
that computes nothing does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Final

from memsize.analysis.findings.unfinished_runs import lagging, out_of_memory
from memsize.device.allocation_events import flow_of
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.gpu_estimate import Replays, lag, replay_on, stream_shares
from memsize.records.aggregates import split_phase, traffic
from memsize.records.gpu import Card
from memsize.records.roles import Role, in_order
from memsize.records.timeline import AROUND, Phase, Segment, Timeline
from memsize.records.trace import Trace

_FEW: Final = 4
"""How many events outside every phase are no phase of their own."""


def timeline(
    trace: Trace, config: AllocatorConfig | None = None, where: Card | None = None, *, few: int = _FEW
) -> Timeline:
    """The timeline of `trace` on the card `where` (None: one whose memory never ends), with the caching allocator set
    by `config`. Up to `few` events outside every phase are part of the one that follows.
    """
    events, storages = trace.events, tuple(trace.storages)
    replayed, shortage = replay_on(trace, where, config or AllocatorConfig(), timeline=True)
    levels = replayed.timeline
    assert levels is not None
    lags = lag(trace, where, Replays(config))
    delta = tuple(0 if event.storage in replayed.skipped else event.delta for event in events)
    role = [storages[event.storage].role for event in events]
    return Timeline(
        model=trace.model,
        scenario=trace.scenario,
        layers=tuple(layer.path for layer in trace.layers),
        phases=tuple(phases(trace, few)),
        op=tuple(event.op for event in events),
        layer=tuple(event.layer for event in events),
        delta=delta,
        live={name: tuple(_column(name, role, delta)) for name in in_order(role)},
        allocated=tuple(levels.allocated.tolist()),
        reserved=tuple(levels.reserved.tolist()),
        assumptions=trace.assumptions,
        notes=(
            *trace.notes,
            *([out_of_memory(shortage, "the run", where.name).text()] if shortage and where else []),
            *([lagging(lags, replayed.reserved.bytes).text()] if lags else []),
        ),
        stack=trace.stack,
        torch=trace.torch,
        card=where,
        lines=trace.lines,
        world=trace.world,
        collectives=traffic(trace),
        streams=stream_shares(trace, flow_of(trace), replayed),
        storage=tuple(event.storage for event in events),
        address=tuple(levels.address.tolist()),
        storages=storages,
        segments=tuple(Segment(*segment) for segment in levels.segments),
    )


def _column(name: Role, role: Sequence[Role], delta: Sequence[int]) -> Iterator[int]:
    return accumulate(change if of == name else 0 for of, change in zip(role, delta, strict=True))


def phases(trace: Trace, few: int = _FEW) -> Iterator[Phase]:
    """Runs of events of the same phase.

    Up to `few` events outside every phase (the seed of a backward, a scaled loss) belong to the one that follows them.
    """
    start = stop = 0
    for index, events in groupby(trace.events, key=attrgetter("phase")):
        stop += sum(1 for _ in events)
        name, step = split_phase(trace.phases[index])
        between = start > 0 and stop - start <= few and (index == 0 or name == AROUND)
        if not between or stop == len(trace.events):
            yield Phase(name, step, start, stop)
            start = stop
