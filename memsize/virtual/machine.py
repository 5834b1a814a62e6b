"""A GPU for code that is imported, called or recorded: what a target's file puts there, or a run that needs a real host
beside its GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from memsize.device.allocator_config import AllocatorConfig
from memsize.device.context import context
from memsize.records.gpu import Card
from memsize.records.world import World
from memsize.spec.stack import INSTALLED, Stack
from memsize.tracing.ledger import Ledger, Workspaces
from memsize.tracing.run import RunDevice, Setup
from memsize.virtual.allocator_state import DeviceMemory
from memsize.virtual.driver import Driver
from memsize.virtual.gpu_ledger import VirtualLedger
from memsize.virtual.region import virtual_gpu


@dataclass(frozen=True)
class VirtualMachine(RunDevice):
    """The GPU `card` of a process, which is one of `world` if there are others; what is larger than its memory is there
    all the same.
    """

    card: Card
    world: World | None = None

    def ledger(self, setup: Setup) -> VirtualLedger:
        return VirtualLedger(setup.gpu.workspaces, lambda: None)

    def regions(self, setup: Setup, ledger: Ledger) -> Iterable[AbstractContextManager[Any]]:
        assert isinstance(ledger, VirtualLedger)
        return (self._gpu(ledger, setup.gpu.stack),)

    def _gpu(self, ledger: VirtualLedger, stack: Stack = INSTALLED) -> AbstractContextManager[None]:
        memory = DeviceMemory(
            self.card.bytes, context().low, AllocatorConfig, ledger.events, ledger.streams, bounded=False
        )
        return virtual_gpu(Driver(self.card, memory, stack=stack), ledger, world=self.world)


@contextmanager
def machine_with(card: Card) -> Iterator[None]:
    """While open, this process has that GPU; a model that is larger than its memory is built all the same."""
    with VirtualMachine(card)._gpu(VirtualLedger(Workspaces(), lambda: None)):
        yield
