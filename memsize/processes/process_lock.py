"""One thread at a time: patches of PyTorch, settings and random generators belong to the whole process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from memsize.errors import MemsizeError
from memsize.processes.ctrl_c import deferred, raise_waiting


class _Turn:
    """Whose turn it is. The threads that the owner's code starts are known, since they must not wait for their turn:
    the owner may be waiting for them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    @contextmanager
    def starts_noted(self) -> Iterator[None]:
        turn, start = self, threading.Thread.start

        def noted(self: threading.Thread) -> None:
            if turn.owner == threading.get_ident() or threading.current_thread() in turn.started:
                turn.started.add(self)
            start(self)

        threading.Thread.start = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]
            self.started.clear()


_turn = _Turn()


@contextmanager
def turn_taken() -> Iterator[None]:
    """Wait until no other thread is inside, and keep others out; may be entered again inside itself.

    Raises `MemsizeError` in a thread that was started inside. Known limit: a thread of a pool that was there before is
    not recognised as such, and waits for ever if the owner waits for it.
    """
    turn, thread = _turn, threading.get_ident()
    if turn.owner == thread:
        yield
        return
    if threading.current_thread() in turn.started:
        raise MemsizeError("memsize was called in a thread that the model started while memsize was running it")
    with deferred():
        while not turn.lock.acquire(timeout=0.1):
            raise_waiting()
        try:
            turn.owner = thread
            with turn.starts_noted():
                yield
        finally:
            turn.owner = None
            turn.lock.release()


def _after_fork() -> None:
    """In a forked process only the thread that forked goes on: another one's turn would never end."""
    global _turn
    if _turn.owner != threading.get_ident():
        _turn = _Turn()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
