"""The memory that a GPU would report for a trace: its peaks in the allocator's terms, and what is alive there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memsize.device.allocator import Replay, replay
from memsize.device.config import AllocatorConfig
from memsize.device.context import context
from memsize.device.workspace_bounds import Requests, requests, variants
from memsize.records.aggregates import alive, split_phase
from memsize.records.gpu import GpuEstimate, Interval, LiveStorage
from memsize.records.roles import Role
from memsize.records.trace import Storage, Trace


class Replays:
    """The replays with one setting of the allocator, each distinct list of events once."""

    def __init__(self, config: AllocatorConfig | None = None) -> None:
        self.config = config or AllocatorConfig()
        self._made: dict[object, Replay] = {}

    def of(self, events: Requests, streams: Mapping[int, int]) -> Replay:
        """What the allocator holds while `events` happen."""
        key = tuple(events), tuple(streams.items())
        if key not in self._made:
            self._made[key] = replay(events, self.config, streams=streams)
        return self._made[key]


def estimate_gpu(
    trace: Trace,
    *,
    config: AllocatorConfig | None = None,
    cuda: str | None = None,
    largest: int = 20,
    replays: Replays | None = None,
) -> GpuEstimate:
    """The memory that a GPU would report for `trace`, at its peak.

    `config` sets the caching allocator (None: PyTorch's defaults), `cuda` is the CUDA version that determines the size
    of the context (None: a current one), and `largest` is how many of the storages alive at the peak are listed.
    `replays`, with settings of their own, are shared with other traces: float16 and bfloat16 often make equal events.
    """
    replays = replays or Replays(config)
    replayed = replays.of(requests(trace), trace.streams)
    index = replayed.requested.event
    live = alive(trace, index)
    event = trace.events[index] if index >= 0 else None
    phase, step = split_phase(trace.phases[event.phase]) if event else ("", 0)
    return GpuEstimate(
        requested=replayed.requested.bytes,
        allocated=replayed.allocated.bytes,
        reserved=replayed.reserved.bytes,
        device=_device(trace, replayed, replays, context(cuda)),
        fragmentation=replayed.fragmentation,
        peak_phase=phase,
        peak_step=step,
        peak_layer=trace.layers[event.layer].path if event and event.layer >= 0 else "",
        peak_op=event.op if event else "",
        roles=_roles(trace, live),
        storages=_largest(trace, live, largest),
    )


def _device(trace: Trace, replayed: Replay, replays: Replays, outside: Interval) -> Interval:
    """Reserved memory plus the CUDA context, with the smallest and the largest convolution workspaces that are
    possible.
    """
    others = (replays.of(each, trace.streams) for each in variants(trace)[1:])
    reserved = [each.reserved.bytes for each in (replayed, *others)]
    return Interval(min(reserved) + outside.low, max(reserved) + outside.high)


def _roles(trace: Trace, live: Mapping[int, int]) -> dict[Role, int]:
    roles: dict[Role, int] = {}
    for storage, size in live.items():
        role = trace.storages[storage].role
        roles[role] = roles.get(role, 0) + size
    return dict(sorted(roles.items(), key=lambda item: -item[1]))


def _largest(trace: Trace, live: Mapping[int, int], count: int) -> tuple[LiveStorage, ...]:
    born = {event.storage: event.phase for event in trace.events if event.delta > 0}
    ordered: Iterable[int] = sorted(live, key=lambda storage: (-live[storage], storage))
    return tuple(_live_storage(trace, trace.storages[i], live[i], born[i]) for i in list(ordered)[:count])


def _live_storage(trace: Trace, storage: Storage, size: int, phase: int) -> LiveStorage:
    layer = trace.layers[storage.layer].path if storage.layer >= 0 else None
    return LiveStorage(size, storage.role, layer, storage.op, trace.phases[phase], storage.dtype, storage.shape)
