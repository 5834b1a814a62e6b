"""Storages that are resized in place, as sharded training does with gathered parameters, as events of a ledger."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memsize.tracing.ledger import Ledger

_original = torch.UntypedStorage.resize_
_running = threading.local()


@contextmanager
def resizes_seen(ledger: Ledger) -> Iterator[None]:
    """While open, this thread's ``untyped_storage().resize_(n)`` calls are events of `ledger`."""
    outer = getattr(_running, "ledger", None)
    _running.ledger = ledger
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _running.ledger = outer
        if outer is None:
            torch.UntypedStorage.resize_ = _original  # type: ignore[method-assign]


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _original(storage, size)
    ledger: Ledger | None = getattr(_running, "ledger", None)
    if ledger is not None:
        ledger.resized(storage)
    return result
