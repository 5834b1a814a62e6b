"""Ctrl-C ends a command at once, with status 130, wherever it is; silently, where it has found nothing yet.

Python's own way, an exception, is wrong nearly everywhere in a command: it shows a traceback while modules are
imported, aborts the process where C++ had called Python code, and may be caught by the user's code.

`Interrupted` carries the finished parts of an answer to the code that shows them.

The command runs this before it imports anything that takes time. Before that, Python itself decides.
"""

from __future__ import annotations

import os
import sys

# `signal` itself takes ten times as long to import.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

INTERRUPTED = 130
cleanups: list[Callable[[], None]] = []
"""Called before the process ends. They must neither wait for a lock nor take long."""
_process: list[int] = []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended the work on an answer. `answer` has the parts that were finished, and says which are missing."""

    def __init__(self, answer: Any) -> None:
        super().__init__("what was found until then is the `answer` of this exception")
        self.answer = answer


def ends_the_process() -> None:
    """Let Ctrl-C end this process from now on, unless it was started with Ctrl-C ignored."""
    if getsignal(SIGINT) is default_int_handler:
        _process[:] = [os.getpid()]
        signal(SIGINT, end)


def end(*_: object) -> None:
    """The handler of the signal."""
    try:
        if os.getpid() in _process:  # and not a process that was forked from this one
            for cleanup in cleanups:
                cleanup()
            # The children of `multiprocessing` would wait for work for ever.
            multiprocessing: Any = sys.modules.get("multiprocessing")
            for child in multiprocessing.active_children() if multiprocessing else ():
                child.kill()
    finally:
        os._exit(INTERRUPTED)
