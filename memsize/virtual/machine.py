"""A GPU for code that is only imported and called once: what a target's file or its constructor puts there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memsize.device.config import AllocatorConfig
from memsize.device.context import context
from memsize.records.gpu import Card
from memsize.tracing.ledger import Workspaces
from memsize.virtual.driver import Driver
from memsize.virtual.ledger import VirtualLedger
from memsize.virtual.memory import DeviceMemory
from memsize.virtual.region import virtual_gpu


@contextmanager
def machine_with(card: Card) -> Iterator[None]:
    """While open, this process has that GPU; a model that is larger than its memory is built all the same."""
    ledger = VirtualLedger(Workspaces(), lambda: None)
    memory = DeviceMemory(card.bytes, context().low, AllocatorConfig, ledger.events, ledger.streams, bounded=False)
    with virtual_gpu(Driver(card, memory), ledger):
        yield
