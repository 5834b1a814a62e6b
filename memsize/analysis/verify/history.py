"""PyTorch's memory history → which storage appears or disappears when.

`torch.cuda.memory._snapshot()["device_traces"]` has one list per device. Of its actions, ``alloc`` and
``free_requested`` are a tensor's beginning and end, with the bytes that were asked for; segments are the allocator's
affair, and ``free_completed`` follows a free at once unless another stream still uses the block. Source:
torch/csrc/cuda/memory_snapshot.cpp, c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """`delta` bytes of `storage` appear (> 0) or disappear (< 0). A storage below 0 is older than the history."""

    storage: int
    delta: int


def changes(trace: Iterable[Mapping[str, Any]]) -> Iterator[Change]:
    """What one device's trace says, in order; storages are counted from 0."""
    live: dict[int, Change] = {}
    begun = older = 0
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = change = Change(begun, entry["size"])
            begun += 1
            yield change
        elif entry["action"] == "free_requested":
            known = live.pop(entry["addr"], None)
            if known is None:
                older += 1
                known = Change(-older, entry["size"])
            yield Change(known.storage, -known.delta)
