"""Audit hooks: Python announces operations to them, and one that raises prevents the operation (PEP 578).

A hook cannot be removed, so the process has one for each kind of guard, which does nothing while none is in force.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, ClassVar, Final

from memsize.processes.simulation import running


class Guard:
    """A part of the simulation that is asked before operations of these `events`."""

    events: ClassVar[Collection[str]]

    def check(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise an error to prevent the operation."""
        raise NotImplementedError


_HOOKED: Final[set[type[Guard]]] = set()


def install(kind: type[Guard]) -> None:
    """Let the guard of this `kind` in the running simulation be asked, whichever thread an operation is in."""
    if kind in _HOOKED:
        return
    _HOOKED.add(kind)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in kind.events and (simulation := running()) and (guard := simulation.get(kind)):
            guard.check(event, args)

    sys.addaudithook(audit)
