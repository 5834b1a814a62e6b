"""`Progress`: one line on a terminal's stderr that says what is being done, once it takes longer than a second."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from memsize.printable import printable

_PATIENCE = 1.0
_CLEAR = "\r\x1b[2K"
_writing = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A process that is forked while the timer's thread writes would wait for that thread, which it does not have.
    os.register_at_fork(before=_writing.acquire, after_in_parent=_writing.release, after_in_child=_writing.release)


class Progress:
    """Call it with what is being done now. It shows on a terminal only, not in a quick run, and is wiped at the end."""

    def __init__(self, stream: TextIO | None = None, patience: float = _PATIENCE) -> None:
        self._stream = stream or sys.stderr
        self._patience = patience
        self._text = ""
        self._shown = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if self._stream is not None and self._stream.isatty():  # there is no stderr where it is closed
            self._due = time.monotonic() + self._patience
            self._timer = threading.Timer(self._patience, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        with _writing:
            self._timer = None
            if self._shown:
                self._stream.write(_CLEAR)
                self._stream.flush()

    def wipe(self) -> None:
        """Wipe the line where the process is about to end: without the lock, which its own thread may hold."""
        if self._shown:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._stream.fileno(), _CLEAR.encode())

    def __call__(self, text: str) -> None:
        self._text = text
        if self._timer is not None and time.monotonic() >= self._due:
            self._show()

    def _show(self) -> None:
        with _writing:
            if self._timer is None or not self._text:
                return
            room = shutil.get_terminal_size().columns - 3
            self._stream.write(f"{_CLEAR}{printable(self._text)[:room]} …")
            self._stream.flush()
            self._shown = True
