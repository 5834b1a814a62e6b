"""The replay of a run on a card, whose memory the CUDA context leaves to the allocator only in part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from memsize.device.allocator import OutOfMemory, Replay, replay
from memsize.device.config import AllocatorConfig
from memsize.device.flow import Flow
from memsize.records.gpu import Interval


class Limited(NamedTuple):
    """A replay on a card, and the request that fails there if the CUDA context is as large as it may be.

    `certain`: it fails even with the smallest one. The replay is then one without any bound.
    """

    replay: Replay
    failure: OutOfMemory | None = None
    certain: bool = False


def replay_within(
    events: Collection[tuple[int, int]] | Flow,
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
    """The replay on a card of `total` bytes, of which the CUDA context takes between the ends of `outside`.

    It is that with the largest context with which the run completes. The rest is as for `replay`.
    """
    how: Any = {"streams": streams, "emptied": emptied, "deferred": deferred, "timeline": timeline}
    failure = None
    for taken in dict.fromkeys((outside.high, outside.low)):
        found = replay(events, config, capacity=max(total - taken, 0), total=total, optional=optional, **how)
        if found.out_of_memory is None:
            return Limited(found, failure)
        failure = failure or found.out_of_memory
    return Limited(replay(events, replace(config, memory_fraction=1.0), **how), failure, certain=True)
