"""The memory that a GPU would report for a trace: its peaks in the allocator's terms, and what is alive there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from memsize.device.allocation_events import AllocationEvents, dispensable, flow_of, variants
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cuda_context import cuda_context
from memsize.device.cuda_libraries import nccl
from memsize.device.replay import BoundedReplay, Replay, replay, replay_within
from memsize.records.aggregates import split_phase, traffic
from memsize.records.columns import distinct, numbers, places, rows_at, texts_at
from memsize.records.gpu import (
    Card,
    GpuEstimate,
    Interval,
    LiveStorage,
    PhasePeak,
    RecordStreamCost,
    Shortage,
    StreamShare,
)
from memsize.records.roles import Role
from memsize.records.trace import Trace
from memsize.spec.stack import Stack

_LISTED: Final = 20
"""How many of the storages that are alive at the peak are listed."""


class Replays:
    """The replays with one setting of the allocator: of each distinct list of events one for all cards that serve it
    alike.
    """

    def __init__(self, config: AllocatorConfig | None = None, *, timeline: bool = False) -> None:
        self.config = config or AllocatorConfig()
        self._timeline = timeline
        self._replays: dict[object, BoundedReplay] = {}
        self._of_events: dict[object, list[Replay]] = {}

    def of(self, trace: Trace, events: AllocationEvents, where: Card | None, *, lags: bool = False) -> BoundedReplay:
        """`events` of the trace, or of one like it, on a card (None: one whose memory never ends), whose streams have
        always done what they were given; with `lags` only when the program has waited for them.
        """
        optional, card = dispensable(trace), None if where is None else (where.bytes, _outside(trace, where))
        of_events = events.digest, optional, lags
        key = of_events, card
        if key not in self._replays:
            how: Any = {"streams": events.streams, "emptied": events.emptied, "timeline": self._timeline}
            how["deferred"] = events.deferred if lags else None
            if card is None:
                unbounded = replay(events, self.config, **how)
                self._replays[key] = BoundedReplay(unbounded, unbounded)
            else:
                shared = self._of_events.setdefault(of_events, [])
                self._replays[key] = replay_within(events, self.config, *card, optional=optional, shared=shared, **how)
        return self._replays[key]


def estimate_gpu(
    trace: Trace,
    where: Card | None = None,
    *,
    config: AllocatorConfig | None = None,
    replays: Replays | None = None,
) -> GpuEstimate:
    """The memory that a GPU would report for `trace`, at its peak.

    `where` is the card (None: one whose memory never ends), `config` sets the caching allocator (None: PyTorch's
    defaults). The size of the CUDA context is that of the trace's stack. `replays`, with settings of their own, are
    shared with other traces: float16 and bfloat16 often make equal events.
    """
    import numpy as np

    replays = replays or Replays(config)
    flow = flow_of(trace)
    tensors = ~np.isin(flow.storages, places(trace.storages, "role", {"workspace"}))
    replayed, shortage = replay_on(trace, flow, where, replays)
    index = replayed.requested.event
    live = {storage: size for storage, size in flow.alive(index).items() if storage not in replayed.skipped}
    event = trace.events[index] if index >= 0 else None
    phase, step = split_phase(trace.phases[event.phase]) if event else ("", 0)
    return GpuEstimate(
        requested=replayed.requested.bytes,
        allocated=replayed.allocated.bytes,
        reserved=replayed.reserved.bytes,
        device=_device(trace, where, replays, bounded=not (shortage and shortage.certain)),
        fragmentation=replayed.fragmentation,
        peak_phase=phase,
        peak_step=step,
        peak_layer=trace.layers[event.layer].path if event and event.layer >= 0 else "",
        peak_op=event.op if event else "",
        roles=roles_of(trace, live),
        storages=_largest(trace, flow, live),
        shortage=shortage,
        tensors=int(flow.deltas[tensors].cumsum().max(initial=0)),
        collectives=traffic(trace),
        nccl=nccl(trace.collectives),
        streams=stream_shares(trace, flow, replayed),
        lag=lag(trace, where, replays),
    )


def lag(trace: Trace, where: Card | None, replays: Replays) -> RecordStreamCost | None:
    """The additional bytes reserved if the GPU lags behind the program; None if that makes no difference."""
    flow = flow_of(trace)
    if not flow.deferred:
        return None
    prompt, late = (replays.of(trace, flow, where, lags=is_late) for is_late in (False, True))
    reserved, most = prompt.with_least_overhead.reserved.bytes, late.with_least_overhead.reserved.bytes
    runs_out = late.failure is not None and prompt.failure is None
    return RecordStreamCost(len(flow.deferred), max(reserved, most), runs_out) if most > reserved or runs_out else None


def replay_on(
    trace: Trace, flow: AllocationEvents, where: Card | None, replays: Replays
) -> tuple[Replay, Shortage | None]:
    """The run on a card, where cached segments are given back before memory runs out, and how it ends if it does.

    If it certainly does, the replay is that of a card whose memory never ends.
    """
    bounded = replays.of(trace, flow, where)
    return bounded.with_least_overhead, _shortage(trace, where, bounded) if where else None


def _outside(trace: Trace, where: Card | None) -> Interval:
    """The bytes taken outside the allocator: by the CUDA context, and by NCCL if the run is one process of many."""
    alone = cuda_context(where, Stack.parse(trace.stack), distinct(trace.events, "op") - {""})
    among = nccl(trace.collectives) or Interval(0, 0)
    return Interval(alone.low + among.low, alone.high + among.high)


def device_since(trace: Trace, where: Card, config: AllocatorConfig, event: int) -> Interval:
    """The most that the GPU would show from `event` of the run on."""
    replays = Replays(config, timeline=True)
    return _device(trace, where, replays, bounded=True, since=event)


def _device(trace: Trace, where: Card | None, replays: Replays, *, bounded: bool, since: int = 0) -> Interval:
    """Reserved memory plus what is taken outside the allocator, which decides how much can be reserved: with the
    smallest and the largest convolution workspaces that are possible, and with a GPU that lags behind or doesn't, at
    its peak `since` an event. For one that isn't the first the replays have timelines.
    """
    outside = _outside(trace, where)
    flows = variants(trace)
    cases = [*((flow, False) for flow in flows), *((flow, True) for flow in flows if flow.deferred)]
    replays_of_cases = [replays.of(trace, flow, where, lags=lags) for flow, lags in cases]
    reserved = [
        int(replayed.timeline.reserved[since:].max()) if since and replayed.timeline else replayed.reserved.bytes
        for bounded in replays_of_cases
        for replayed in (bounded.with_least_overhead, bounded.with_most_overhead)
    ]
    high = max(reserved) + outside.high
    return Interval(min(reserved) + outside.low, min(high, where.bytes) if where and bounded else high)


def _shortage(trace: Trace, where: Card, bounded: BoundedReplay) -> Shortage | None:
    if bounded.failure is None:
        return None
    event, levels = trace.events[bounded.failure.event], bounded.failure.levels
    phase, step = split_phase(trace.phases[event.phase])
    return Shortage(
        request=bounded.failure.request,
        tried=bounded.failure.segment,
        total=where.bytes,
        free=max(where.bytes - _outside(trace, where).high - levels.reserved, 0),
        allocated=levels.allocated,
        reserved=levels.reserved,
        phase=phase,
        step=step,
        layer=trace.layers[event.layer].path if event.layer >= 0 else "",
        op=event.op,
        certain=bounded.certain,
        event=bounded.failure.event,
        nccl=among.high if (among := nccl(trace.collectives)) else 0,
    )


def stream_shares(trace: Trace, flow: AllocationEvents, replayed: Replay) -> tuple[StreamShare, ...]:
    """The most bytes that each CUDA stream of `trace` needs, and its part of the segments in `replayed`.

    Empty where there is only one stream.
    """
    import numpy as np

    if not flow.streams:
        return ()
    allocated = ~np.isin(flow.storages, list(replayed.skipped))
    flow = AllocationEvents(flow.storages[allocated], flow.deltas[allocated], flow.streams)
    streams = numbers(trace.storages, "stream")[flow.storages]
    shares = []
    for stream in sorted(set(streams.tolist())):
        part = AllocationEvents(flow.storages[streams == stream], flow.deltas[streams == stream], {})
        live = part.deltas.cumsum()
        peak = int(live.argmax())
        kinds = dict.fromkeys(collective.kind for collective in trace.collectives if collective.stream == stream)
        share = StreamShare(
            stream=stream,
            collectives=tuple(kinds),
            role=next(iter(roles_of(trace, part.alive(peak)))),
            requested=int(live[peak]),
            reserved=replayed.of_streams.get(stream, 0),
        )
        shares.append(share)
    return tuple(shares) if len(shares) > 1 else ()


def roles_of(trace: Trace, live: Mapping[int, int]) -> dict[Role, int]:
    """The bytes of `live` storages by role, most first."""
    roles: dict[Role, int] = {}
    for role, size in zip(texts_at(trace.storages, "role", live), live.values(), strict=True):
        roles[role] = roles.get(role, 0) + size
    return dict(sorted(roles.items(), key=lambda item: -item[1]))


def _largest(trace: Trace, flow: AllocationEvents, live: Mapping[int, int]) -> tuple[LiveStorage, ...]:
    import numpy as np

    largest = []
    indexes, sizes = np.array([*live], dtype=np.int64), np.array([*live.values()], dtype=np.int64)
    for index in indexes[np.lexsort((indexes, -sizes))[:_LISTED]].tolist():
        storage, phase = trace.storages[index], trace.phases[trace.events[flow.born(index)].phase]
        layer = trace.layers[storage.layer].path if storage.layer >= 0 else None
        origin = storage.op, phase, storage.dtype, storage.shape
        largest.append(LiveStorage(live[index], storage.role, layer, *origin, trace.line_of(index)))
    return tuple(largest)


_WEIGHTS = ("parameter", "buffer")


def phase_peaks(trace: Trace, where: Card | None, replays: Replays, phases: Mapping[str, str]) -> Iterator[PhasePeak]:
    """Yield the peak of each phase of `trace`, in the order in which they begin; `phases` has that of each part.

    `replays` have timelines.
    """
    import numpy as np

    flow = flow_of(trace)
    replayed, _ = replay_on(trace, flow, where, replays)
    levels, phase_of = replayed.timeline, numbers(trace.events, "phase")
    assert levels is not None
    tops = [layer.path.partition(".")[0] for layer in trace.layers]
    for number, phase in enumerate(trace.phases):
        inside = np.flatnonzero(phase_of == number)
        parts = tuple(name for name, of in phases.items() if of == phase)
        if not len(inside) or not parts:
            continue
        peak = int(inside[levels.requested[inside].argmax()])
        live = {storage: size for storage, size in flow.alive(peak).items() if storage not in replayed.skipped}
        alive = zip(rows_at(trace.storages, live), live.values(), strict=True)
        stored = [(tops[storage.layer], size) for storage, size in alive if storage.role in _WEIGHTS]
        weights = sum(size for top, size in stored if top in parts)
        other_weights = sum(size for _, size in stored) - weights
        requested, layer = int(levels.requested[peak]), trace.events[peak].layer
        yield PhasePeak(
            phase,
            parts,
            requested,
            int(levels.allocated[inside].max()),
            int(levels.reserved[inside].max()),
            weights,
            other_weights,
            requested - weights - other_weights,
            trace.layers[layer].path if layer >= 0 else "",
        )
