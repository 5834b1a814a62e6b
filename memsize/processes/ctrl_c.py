"""Ctrl-C while a model runs: raised where it leaves nothing half done.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. Amid a patch, or before a ``finally``
has begun, it would leave PyTorch patched; in a callback of a weak reference it is lost. So it is raised at once only in
the user's own code, and otherwise at the next op, module call or run. A second one does not wait. While parts of an
answer are collected (`found_kept`), the same is true of the command, which Ctrl-C ends at once otherwise.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final, NoReturn

from memsize import interrupt
from memsize.processes.user_code import is_library

_OURS: Final = __name__.partition(".")[0]


class _Waiting:
    """Whether a Ctrl-C waits to be raised, and whether the next one after it ends the process."""

    now = last = False


_waiting: Final = _Waiting()


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

    __slots__ = ("_before",)
    replaced: ClassVar[tuple[Any, ...]] = (signal.default_int_handler,)

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if is_main else None
        self._before = before if before in self.replaced else None
        if self._before is not None:
            _waiting.last = self._before is interrupt.end
            signal.signal(signal.SIGINT, _interrupted)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            raise_waiting()


class found_kept(deferred):  # noqa: N801
    """`deferred`, in the command too. Where Ctrl-C ends it, `Interrupted` is raised with what `so_far` then returns, or
    `KeyboardInterrupt` as it is where that is None.
    """

    __slots__ = ("_so_far",)
    replaced = (*deferred.replaced, interrupt.end)

    def __init__(self, so_far: Callable[[], object]) -> None:
        self._so_far = so_far

    def __exit__(self, *raised: object) -> None:
        try:
            super().__exit__(*raised)
            if not any(isinstance(error, KeyboardInterrupt) for error in raised):
                return
        except KeyboardInterrupt:
            pass
        answer = self._so_far()
        raise KeyboardInterrupt if answer is None else interrupt.Interrupted(answer)


def _interrupted(_: int, frame: FrameType | None) -> None:
    if _waiting.now:
        _raised()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != _OURS:
        if not is_library(frame.f_code.co_filename):
            _raised()
        frame = frame.f_back
    _waiting.now = True


def _raised() -> NoReturn:
    if _waiting.last:
        signal.signal(signal.SIGINT, interrupt.end)
    _waiting.now = False
    raise KeyboardInterrupt
