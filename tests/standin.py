"""A gauge for machines without a GPU: it reads real tensors on the CPU as if they were on one.

The ledger that every real run on the CPU is compared with records what is allocated; the simulated allocator tells
blocks and segments. What CUDA decides otherwise than the CPU is not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from memsize.device import replay
from memsize.tracing.ledger import Ledger
from memsize.verifying.history import Change, changes
from memsize.verifying.measurement import DeviceUse, Peaks, Stack

STACK = Stack(
    gpu="stand-in",
    capability=(8, 0),
    total=80 * 2**30,
    torch="2.13.0",
    python="3.12.3",
    driver="580.159.04",
    cuda="13.0",
    cudnn=91501,
    cublas="13.1.0",
)
CONTEXT = 400 * 2**20


class StandIn:
    """The gauge. It listens from its first `settle` until it is left: what a prediction makes on the host is not its
    affair.
    """

    def __init__(self, stack: Stack = STACK) -> None:
        self.device = torch.device("cpu")
        self._stack = stack
        self._ledger = Ledger("cpu")
        self._since = 0
        self._listening = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._listening:
            self._ledger.__exit__(*error)
        self._ledger.close()

    def settle(self) -> None:
        if self.held():
            gc.collect()
        if not self._listening:
            self._ledger.__enter__()
            self._listening = True

    def held(self) -> int:
        return sum(event.delta for event in self._ledger.events)

    def reset(self) -> None:
        self._since = len(self._ledger.events)

    def peaks(self) -> Peaks:
        levels = replay([(e.storage, e.delta) for e in self._ledger.events], timeline=True).timeline
        assert levels is not None
        first = max(self._since - 1, 0)
        columns = (levels.requested, levels.allocated, levels.reserved)
        return Peaks(*(max(column.tolist()[first:], default=0) for column in columns))

    def count(self) -> int:
        return sum(1 for event in self._ledger.events if event.delta > 0)

    @contextmanager
    def recorded(self) -> Iterator[list[Change]]:
        """As the memory history would have it."""
        start, found = len(self._ledger.events), []
        yield found
        found += changes(trace_entry(e.storage, e.delta) for e in self._ledger.events[start:])

    def use(self) -> DeviceUse:
        return DeviceUse(self.peaks().reserved + CONTEXT, "mem_get_info")

    def stack(self) -> Stack:
        return self._stack


def trace_entry(storage: int, delta: int) -> dict[str, Any]:
    """An entry of `device_traces` without the fields that nobody reads."""
    action = "alloc" if delta > 0 else "free_requested"
    return {"action": action, "addr": storage * 512, "size": abs(delta), "stream": 0}
