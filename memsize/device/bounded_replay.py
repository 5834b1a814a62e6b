"""The replay of a run on a card, whose memory is left to the allocator only in part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from memsize.device.allocation_events import AllocationEvents
from memsize.device.allocator import OutOfMemory, Replay, replay
from memsize.device.allocator_config import AllocatorConfig
from memsize.records.gpu import Interval


class Limited(NamedTuple):
    """A replay on a card with the least that may be taken outside the allocator, `tightest` that with the most, and the
    request that fails there.

    Where a run only completes with the least, both are that replay. `certain`: it fails even so, and they are a replay
    without any bound.
    """

    replay: Replay
    tightest: Replay
    failure: OutOfMemory | None = None
    certain: bool = False


def replay_within(
    events: Collection[tuple[int, int]] | AllocationEvents,
    config: AllocatorConfig,
    total: int,
    outside: Interval,
    *,
    streams: Mapping[int, int] | None = None,
    optional: Collection[int] = (),
    emptied: Collection[int] = (),
    deferred: Mapping[int, int] | None = None,
    timeline: bool = False,
) -> Limited:
    """The replay on a card of `total` bytes, of which the CUDA context, and NCCL, take between the ends of `outside`.

    Near the limit the ends differ: what is taken outside decides when cached segments are given back, and a run that
    gives some back reserves less. The rest is as for `replay`.
    """
    how: Any = {"streams": streams, "emptied": emptied, "deferred": deferred, "timeline": timeline}

    def beside(taken: int) -> Replay:
        return replay(events, config, capacity=max(total - taken, 0), total=total, optional=optional, **how)

    tightest = beside(outside.high)
    if tightest.refused is None:
        return Limited(tightest, tightest)
    roomiest, failure = beside(outside.low), tightest.out_of_memory
    if roomiest.out_of_memory is None:
        return Limited(roomiest, tightest if failure is None else roomiest, failure)
    if failure is None:
        return Limited(tightest, tightest)
    ample = replay(events, replace(config, memory_fraction=1.0), **how)
    return Limited(ample, ample, failure, certain=True)
