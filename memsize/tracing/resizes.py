"""Storages that are resized in place, as sharded training does with gathered parameters, as events of a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memsize.processes.simulation import current
from memsize.torch_internals.thread_patches import Function, Override, ThreadPatches
from memsize.tracing.ledger import Ledger


@contextmanager
def resizes_seen(ledger: Ledger) -> Iterator[None]:
    """Record the ``untyped_storage().resize_(n)`` calls of this run in `ledger` while open."""
    with _patches.active() as simulation, simulation.with_part(Ledger, ledger):
        yield


def _observed(original: Function) -> Function:
    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if (simulation := current()) and (ledger := simulation.get(Ledger)):
            ledger.resized(storage)
        return result

    return resize


_patches = ThreadPatches(lambda: (Override(torch.UntypedStorage, "resize_", _observed),))
