"""The simulation: all process-wide state of a run on a GPU that is not there, and the lock that allows one at a time.

Patches of PyTorch, settings and random generators belong to the whole process, so one thread at a time has a
simulation. It is held in a context variable: code that runs in it asks for `current()`. Threads do not inherit context
variables before Python 3.14, so threads that the user's code starts are outside, unless they run in a copy of the
context, as they do on a virtual GPU. A hook that Python calls in any thread asks for `running()` instead.

`ThreadPatches` are patches that only threads inside notice: others get the originals.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast

from memsize.errors import MemsizeError
from memsize.processes.ctrl_c import deferred, raise_waiting
from memsize.processes.patches import Patch, Patches, wrapping

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
    return _current.get()


def running() -> Simulation | None:
    """Return the simulation that is open in this process, whichever thread it belongs to."""
    return _lock.simulation


def current_part(kind: type[Part]) -> Part | None:
    """Return the object of this kind in the simulation that this code runs in, `None` if there is none."""
    simulation = current()
    return simulation.get(kind) if simulation else None


def running_part(kind: type[Part]) -> Part:
    """Return the object of this kind in the simulation that is open in this process; a new one without either."""
    simulation = running()
    return (simulation and simulation.get(kind)) or kind()


class _ProcessLock:
    """The lock on process-wide state, and its owner, who may wait for threads that it started: they need no lock."""

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

        def note_start(original: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
            if self.owner == threading.get_ident() or threading.current_thread() in self.started:
                self.started.add(thread)
            original(thread)

        try:
            _current.set(simulation)
            with simulation.patches.applied([wrapping(threading.Thread, "start", note_start)]):
                yield simulation
        finally:
            _current.set(before)
            self.started.clear()
            self.owner = self.simulation = None


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
    """Replace the lock if another thread had it: in a forked process that thread is gone and never releases it."""
    global _lock
    if _lock.owner != threading.get_ident():
        _lock = _ProcessLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- patches for the threads inside ----------------------------------------------------------------------------------

Function = Callable[..., Any]
"""A function of PyTorch, or its replacement."""


class Override(NamedTuple):
    """A function of PyTorch, by the module or class that holds it, and its replacement, which is called with the
    original before the arguments.

    The original may also be a plain value. It is replaced by what `replacement` makes of it, which has to find out
    itself which thread is asking.
    """

    owner: Any
    name: str
    replacement: Function


class ThreadPatches:
    """Overrides that are in place while a simulation is inside `active`, and that only threads for which `applies()`
    holds notice: by default those that run in the simulation.

    `choose` lists the overrides whenever a region is entered, since more modules may have been imported by then. It
    must return equal overrides each time, so that each replacement is made and installed only once.
    """

    def __init__(self, choose: Callable[[], Iterable[Override]], applies: Callable[[], bool] | None = None) -> None:
        self._choose = choose
        self._applies = applies or self.is_inside
        self._installed: dict[Override, tuple[Any, Any]] = {}
        """The last original of each, and what took its place: making that takes longer than installing it."""

    def is_inside(self) -> bool:
        """Whether this thread runs in a simulation in which these patches are in place."""
        simulation = current()
        return simulation is not None and simulation.regions[self] > 0

    @contextmanager
    def active(self) -> Iterator[Simulation]:
        """Put the patches in place; may be entered again inside itself. Other threads wait for their turn."""
        with open_simulation() as simulation:
            simulation.regions[self] += 1
            try:
                self.renew()
                yield simulation
            finally:
                simulation.regions[self] -= 1
                if not simulation.regions[self]:
                    simulation.patches.restore(self)

    def renew(self) -> None:
        """Put the patches in place whose modules were imported since the region was entered."""
        simulation = running()
        if simulation is None or not simulation.regions[self]:
            return
        in_place = {(id(patch.owner), patch.name) for patch in simulation.patches.of(self)}
        missing = [override for override in self._choose() if (id(override.owner), override.name) not in in_place]
        simulation.patches.apply(self, map(self._patch, missing))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the originals while open, in all threads."""
        simulation = running()
        if simulation is None or not simulation.patches.of(self):  # also inside itself
            yield
            return
        simulation.patches.restore(self)
        try:
            yield
        finally:
            self.renew()

    def _patch(self, override: Override) -> Patch:
        owner, name, replacement = override
        original, applies = getattr(owner, name), self._applies
        if self._installed.get(override, (None,))[0] is not original:

            @functools.wraps(original)
            def chosen(*args: Any, **kwargs: Any) -> Any:
                return replacement(original, *args, **kwargs) if applies() else original(*args, **kwargs)

            self._installed[override] = original, chosen if callable(original) else replacement(original)
        return owner, name, self._installed[override][1]


# -- audit hooks ------------------------------------------------------------------------------------------------------


class Guard:
    """A part of the simulation that is asked before operations of these `events`.

    Python announces operations to audit hooks, and one that raises prevents the operation (PEP 578). A hook cannot be
    removed, so the process has one for each kind of guard, which does nothing while none is in force.
    """

    events: ClassVar[Collection[str]]

    def check(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise an error to prevent the operation."""
        raise NotImplementedError


_HOOKED: Final[set[type[Guard]]] = set()


def install_guard(kind: type[Guard]) -> None:
    """Let the guard of this `kind` in the running simulation be asked, whichever thread an operation is in."""
    if kind in _HOOKED:
        return
    _HOOKED.add(kind)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in kind.events and (simulation := running()) and (guard := simulation.get(kind)):
            guard.check(event, args)

    sys.addaudithook(audit)
