"""Ctrl-C ends a command at once: silently, with status 130, wherever it is.

Python's own way, an exception, is wrong nearly everywhere in a command: it shows a traceback while modules are
imported, aborts the process where C++ had called Python code, and may be caught by the user's code. Only a file that is
being written needs it, to be removed.

This module imports next to nothing: it is the first thing that the command runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

INTERRUPTED: Final = 130
_process: list[int] = []
_cleanups: list[Callable[[], None]] = []


def ends_the_process() -> None:
    """From now on Ctrl-C ends this process, unless it was started with Ctrl-C ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _process[:] = [os.getpid()]
        signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    try:
        if os.getpid() in _process:  # and not a process that was forked from this one
            for cleanup in _cleanups:
                cleanup()
            _end_children()
    finally:
        os._exit(INTERRUPTED)


def _end_children() -> None:
    """Those that `multiprocessing` started would wait for work for ever."""
    multiprocessing: Any = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for child in multiprocessing.active_children():
            child.kill()


@contextmanager
def cleaned_up(cleanup: Callable[[], None]) -> Iterator[None]:
    """While open, Ctrl-C calls `cleanup`, which must neither wait for a lock nor take long."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)


@contextmanager
def raised() -> Iterator[None]:
    """While open, Ctrl-C raises `KeyboardInterrupt`, as it does in other programs."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
