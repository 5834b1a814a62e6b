"""What each CUDA stream of a run holds at most, and has of the allocator's segments."""

from __future__ import annotations

from collections import Counter

from memsize.device.allocation_events import AllocationEvents
from memsize.device.allocator import Replay
from memsize.records.columns import numbers
from memsize.records.gpu import StreamShare
from memsize.records.roles import Role
from memsize.records.trace import Trace


def stream_shares(trace: Trace, flow: AllocationEvents, replayed: Replay) -> tuple[StreamShare, ...]:
    """The streams that the `flow` of `trace` allocates on, as `replayed` serves it; none where there is only one."""
    import numpy as np

    if not flow.streams:
        return ()
    served = ~np.isin(flow.storages, list(replayed.skipped))
    flow = AllocationEvents(flow.storages[served], flow.deltas[served], flow.streams)
    streams = numbers(trace.storages, "stream")[flow.storages]
    found = np.unique(streams).tolist()
    parts = (AllocationEvents(flow.storages[streams == each], flow.deltas[streams == each], {}) for each in found)
    shares = tuple(_share(trace, number, part, replayed) for number, part in zip(found, parts, strict=True))
    return shares if len(shares) > 1 else ()


def _share(trace: Trace, stream: int, flow: AllocationEvents, replayed: Replay) -> StreamShare:
    live = flow.deltas.cumsum()
    peak = int(live.argmax())
    roles: Counter[Role] = Counter()
    for storage, size in flow.alive(peak).items():
        roles[trace.storages[storage].role] += size
    kinds = dict.fromkeys(each.kind for each in trace.collectives if each.stream == stream)
    role = max(roles, key=lambda each: roles[each])
    return StreamShare(stream, tuple(kinds), role, int(live[peak]), replayed.of_streams.get(stream, 0))
