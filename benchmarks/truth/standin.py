"""Stands in for a GPU's memory where there is none: reads real tensors on the CPU as if they were on one.

The ledger that every real run on the CPU is compared with records what is allocated; the simulated allocator tells
blocks and segments. What CUDA decides otherwise than the CPU is not in it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch

from memsize.analysis.verify.cuda_memory import AllocationEvent, allocation_events
from memsize.device.replay import replay
from memsize.records.measurement import DeviceUse, Peaks, SoftwareStack
from memsize.records.roles import Role
from memsize.tracing.ledger import Ledger

STACK = SoftwareStack(
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
    """The CPU as a `MemoryReader`. It listens from its first `settle` until it is left, so that it does not count what
    a prediction allocates on the host.
    """

    def __init__(self, stack: SoftwareStack = STACK) -> None:
        self.device = torch.device("cpu")
        self._stack = stack
        self._ledger = HostApart("cpu")
        self._since = 0
        self._listening = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._listening:
            self._ledger.__exit__(*error)
        self._ledger.close()

    def settle(self) -> None:
        if self.live_bytes():
            gc.collect()
        if not self._listening:
            self._ledger.leave_out(
                candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor)
            )
            self._ledger.__enter__()
            self._listening = True

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are on the host."""
        self._ledger.leave_out(tensors)

    def live_bytes(self) -> int:
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
    def recorded(self) -> Iterator[list[AllocationEvent]]:
        """As the memory history would have it."""
        start = len(self._ledger.events)
        history: list[AllocationEvent] = []
        yield history
        history += allocation_events(trace_entry(e.storage, e.delta) for e in self._ledger.events[start:])

    def use(self) -> DeviceUse:
        return DeviceUse(self.peaks().reserved + CONTEXT, "mem_get_info")

    def stack(self) -> SoftwareStack:
        return self._stack


class HostApart(Ledger):
    """Where the device is the CPU, host tensors have to be told apart: those of before the run, and what
    `torch.tensor` makes (an optimizer's step counters), which is on the host whatever the device.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are on the host."""
        for storage in filter(None, map(_storage, tensors)):
            self._host[storage._cdata] = weakref.ref(storage)

    def enter(self, tensor: torch.Tensor, role: Role, op: str = "", size: int | None = None) -> int:
        if op == "lift_fresh":
            self.leave_out([tensor])
        storage = _storage(tensor)
        on_host = None if storage is None else self._host.get(storage._cdata)
        return -1 if on_host is not None and on_host() is not None else super().enter(tensor, role, op, size)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor on the CPU that has one: sparse, opaque and lazy ones have none."""
    with suppress(NotImplementedError, RuntimeError, ValueError):
        return tensor.untyped_storage() if tensor.device.type == "cpu" else None
    return None


def trace_entry(storage: int, delta: int) -> dict[str, Any]:
    """An entry of `device_traces` without the fields that nobody reads."""
    action = "alloc" if delta > 0 else "free_requested"
    return {"action": action, "addr": storage * 512, "size": abs(delta), "stream": 0}
