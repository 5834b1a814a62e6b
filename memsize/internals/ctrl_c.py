"""Ctrl-C while a model runs: raised where it leaves nothing half done.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. Amid a patch, or before a ``finally``
has begun, it would leave PyTorch patched; in a callback of a weak reference it is lost. So it is raised at once only in
the user's own code, and otherwise at the next op, module call or run. A second one does not wait.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

from memsize.internals.user_code import is_library

_OURS: Final = __name__.partition(".")[0]


class _Waiting:
    """Whether a Ctrl-C waits to be raised."""

    __slots__ = ("now",)
    now: bool


_waiting: Final = _Waiting()
_waiting.now = False


def raise_waiting() -> None:
    """Raise the Ctrl-C that waits, if any. To be called often, where everything is in order."""
    if _waiting.now:
        _waiting.now = False
        raise KeyboardInterrupt


class deferred:  # noqa: N801 - reads as the context manager that it is
    """While open, Ctrl-C waits for the user's own code or the next call of `raise_waiting`.

    Has no effect where the program has a handler of its own, inside itself, or in another thread than the main one. It
    is a class since a generator's frames would be interrupted themselves.
    """

    __slots__ = ("_installed",)

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._installed = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._installed:
            signal.signal(signal.SIGINT, _interrupted)

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise_waiting()


def _interrupted(_: int, frame: FrameType | None) -> None:
    raise_waiting()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != _OURS:
        if not is_library(frame.f_code.co_filename):
            raise KeyboardInterrupt
        frame = frame.f_back
    _waiting.now = True
