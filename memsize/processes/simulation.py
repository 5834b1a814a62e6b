"""The simulation: all process-wide state of a run on a GPU that is not there, and the lock that allows one at a time.

Patches of PyTorch, settings and random generators belong to the whole process, so one thread at a time has a
simulation. It is held in a context variable: code that runs in it asks for `current()`. Threads do not inherit context
variables before Python 3.14, so threads that the user's code starts are outside, unless they run in a copy of the
context, as they do on a virtual GPU. A hook that Python calls in any thread asks for `running()` instead.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from memsize.errors import MemsizeError
from memsize.processes.ctrl_c import deferred, raise_waiting
from memsize.processes.patches import Patches

Part = TypeVar("Part")


class Simulation:
    """The patches in place, and one object of each kind of state, by its class."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.regions: Counter[object] = Counter()
        """How often each set of patches has been entered."""
        self._parts: dict[type, Any] = {}

    def __repr__(self) -> str:
        parts = ", ".join(sorted(kind.__name__ for kind in self._parts))
        return f"Simulation({len(self.patches)} patches; {parts or 'no state'})"

    def get(self, kind: type[Part]) -> Part | None:
        """Return the object of this kind, `None` if there is none."""
        return cast("Part | None", self._parts.get(kind))

    @contextmanager
    def with_part(self, kind: type[Part], part: Part) -> Iterator[None]:
        """Let `part` be the object of this kind while open."""
        before = self._parts.get(kind)
        self._parts[kind] = part
        try:
            yield
        finally:
            if before is None:
                del self._parts[kind]
            else:
                self._parts[kind] = before


_current: ContextVar[Simulation | None] = ContextVar("simulation", default=None)


def current() -> Simulation | None:
    """Return the simulation that this code runs in."""
    return _current.get()


def running() -> Simulation | None:
    """Return the simulation that is open in this process, whichever thread it belongs to."""
    return _lock.simulation


class _ProcessLock:
    """The lock on process-wide state, and its owner. Threads started by the owner's code are exempt from waiting: the
    owner may be waiting for them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.simulation: Simulation | None = None
        self.started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    @contextmanager
    def opened(self) -> Iterator[Simulation]:
        """Open a simulation in this thread, which has the lock."""
        before, simulation = _current.get(), Simulation()
        self.owner, self.simulation = threading.get_ident(), simulation
        start = threading.Thread, "start", self._noting(threading.Thread.start)
        try:
            _current.set(simulation)
            with simulation.patches.applied([start]):
                yield simulation
        finally:
            _current.set(before)
            self.started.clear()
            self.owner = self.simulation = None

    def _noting(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def noted(thread: threading.Thread) -> None:
            if self.owner == threading.get_ident() or threading.current_thread() in self.started:
                self.started.add(thread)
            start(thread)

        return noted


_lock = _ProcessLock()
"""Outside of any simulation, since it decides which one is next."""


@contextmanager
def open_simulation() -> Iterator[Simulation]:
    """Wait until no other thread has a simulation, and open one. Inside itself it returns the one that is open.

    Raises `MemsizeError` in a thread that was started inside. Known limit: a thread of a pool that was there before is
    not recognised as such, and waits for ever if the owner waits for it.
    """
    process_lock = _lock
    if process_lock.owner == threading.get_ident() and process_lock.simulation is not None:
        yield process_lock.simulation
        return
    if threading.current_thread() in process_lock.started:
        raise MemsizeError("memsize was called in a thread that the model started while memsize was running it")
    with deferred():
        while not process_lock.lock.acquire(timeout=0.1):
            raise_waiting()
        try:
            with process_lock.opened() as simulation:
                yield simulation
        finally:
            process_lock.lock.release()


def _after_fork() -> None:
    """In a forked process only the thread that forked goes on: the lock of another would never be released."""
    global _lock
    if _lock.owner != threading.get_ident():
        _lock = _ProcessLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
