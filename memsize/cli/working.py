"""While a command works: messages and what it is doing show on stderr, and stdout is kept for its answer alone."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TextIO

import click

from memsize.interrupt import cleanups, end
from memsize.printable import printable, printable_lines


@dataclass(slots=True)
class Session:
    """One invocation of the command line; with `debug`, an error shows its traceback."""

    debug: bool = False


def say(text: str) -> None:
    """Print a message to stderr, without anything that a terminal would obey; there, lines are wrapped at words."""
    text = printable_lines(text)
    if sys.stderr.isatty():
        wrap = partial(textwrap.wrap, width=shutil.get_terminal_size().columns, break_long_words=False)
        text = "\n".join(piece for line in text.split("\n") for piece in wrap(line, break_on_hyphens=False) or [""])
    click.echo(text, err=True)


@contextlib.contextmanager
def working() -> Iterator[Progress]:
    """Send what the user's model prints in here to stderr."""
    with Progress() as progress, stdout_to_stderr():
        cleanups.append(progress.wipe)
        try:
            yield progress
        finally:
            cleanups.remove(progress.wipe)


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """While open, Ctrl-C raises `KeyboardInterrupt`: a file that is half written must be removed."""
    if signal.getsignal(signal.SIGINT) is not end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """While open, everything that is written to stdout goes to stderr: also by libraries in C, which write to the file
    descriptor, and by processes that are started meanwhile.
    """
    with contextlib.ExitStack() as redirected:
        for descriptor in _descriptors():
            copy = os.dup(descriptor)
            redirected.callback(os.close, copy)
            redirected.callback(os.dup2, copy, descriptor)
            _to_stderr(descriptor)
        redirected.callback(_flush, sys.stdout)
        with contextlib.redirect_stdout(sys.stderr):
            yield


def fill_closed_streams() -> None:
    """Open the null device where a standard stream is closed: the first files to be opened would take its descriptor,
    and what is meant for stdout or stderr would be written to them.
    """
    for descriptor in (0, 1, 2):
        if not _is_open(descriptor):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    if sys.stderr is None:
        from memsize.processes.patches import assign

        assign(sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lasts


def give_up_stdout() -> None:
    """The answer has been written: what the model's threads and its functions for `atexit` still say goes to stderr."""
    from memsize.processes.patches import assign

    descriptors = _descriptors()
    assign(sys, "stdout", sys.stderr)
    for descriptor in descriptors:
        _to_stderr(descriptor)


def _descriptors() -> set[int]:
    """The file descriptors by which stdout can be reached: none where it is closed, or is no file (in a notebook)."""
    try:
        sys.stdout.flush()
        return {descriptor for descriptor in (1, sys.stdout.fileno()) if _is_open(descriptor)}
    except (AttributeError, OSError, ValueError):
        return set()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _to_stderr(descriptor: int) -> None:
    with contextlib.ExitStack() as opened:
        try:
            target = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):
            target = os.open(os.devnull, os.O_WRONLY)
            opened.callback(os.close, target)
        os.dup2(target, descriptor)


def _flush(stream: TextIO | None) -> None:
    """Flush the buffers of Python and C: their text was written while stdout was redirected."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()  # type: ignore[union-attr]
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


_PATIENCE = 1.0
_FILE_PATIENCE = 3.0
_LONG = 10.0
_TICK = 1.0
_FILE_TICK = 5.0
_COUNT = re.compile(r"\b(\d+) of (\d+)\b")
"""A count in what is being done, from which the rest is estimated: ``fp16, 3 of 7``."""
_writing = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A process that is forked while the timer's thread writes would wait for that thread, which it does not have.
    os.register_at_fork(before=_writing.acquire, after_in_parent=_writing.release, after_in_child=_writing.release)


class Progress:
    """Progress on stderr: call it with what is being done now, and it adds about how long that will go on.

    A terminal shows it once it takes longer than `patience` seconds, below the parts of the answer that came before the
    rest where that takes long, and wipes it all at the end. A file or a pipe gets a line every `tick` seconds and for
    each such part, none for quick work. `MEMSIZE_PROGRESS=never` silences both.

    A program that is running writes to the streams `beside` it, each time without progress in the way: lines that it
    has not ended, such as a bar of its own, are left alone.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        patience: float | None = None,
        tick: float | None = None,
        beside: Iterable[TextIO | None] = (),
    ) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream is not None and self._stream.isatty()
        before = self._make_room if self._on_terminal else lambda: None
        streams = {id(lines): lines for lines in (*([self._stream] if self._on_terminal else ()), *beside)}
        self._beside = [_Lines(lines, before) for lines in streams.values() if lines is not None]
        self._patience = (_PATIENCE if self._on_terminal else _FILE_PATIENCE) if patience is None else patience
        self._tick = (_TICK if self._on_terminal else _FILE_TICK) if tick is None else tick
        self._text = ""
        self._count: str | None = None
        self._counted = 0.0
        self._parts: list[str] = []
        self._clear = ""  # what wipes the lines that a terminal shows now
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        # stderr may be closed (`2>&-`).
        if self._stream is not None and os.environ.get("MEMSIZE_PROGRESS") != "never":
            for lines in self._beside:
                lines.watch()
            self._thread = threading.Thread(target=self._tell, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with _writing:
            self._make_room()
            for lines in self._beside if self._thread else ():
                lines.leave()
            self._thread = None

    def wipe(self) -> None:
        """Wipe the lines where the process is about to end: without the lock, which its own thread may hold."""
        if self._clear:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._stream.fileno(), self._clear.encode())

    def __call__(self, text: str) -> None:
        self._text = text
        match = _COUNT.search(text)
        if (count := match and match[0]) != self._count:
            self._count, self._counted = count, time.monotonic() - self._start
        if self._on_terminal and time.monotonic() >= self._start + self._patience:
            self._show()

    def found(self, part: str) -> None:
        """Show a part of the answer, at once or as soon as the rest takes long."""
        with _writing:
            self._parts.append(printable(part))
        if self._is_long():
            self._show()

    def _is_long(self) -> bool:
        return time.monotonic() >= self._start + _LONG

    def _tell(self) -> None:
        wait = self._patience
        while not self._over.wait(wait):
            self._show()
            wait = self._tick

    def _show(self) -> None:
        with _writing:
            if self._thread is None or self._over.is_set() or any(lines.is_open for lines in self._beside):
                return
            spent = remaining(self._text, time.monotonic() - self._start, self._counted)
            line = f"{printable(self._text)} … {spent}" if self._text else ""
            parts = self._parts if self._is_long() else []
            if not (line or parts):
                return
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._draw(parts, line) if self._on_terminal else self._print(parts, line)

    def _print(self, parts: list[str], line: str) -> None:
        """Write lines to a file or a pipe: each part once."""
        self._stream.writelines(f"{text}\n" for text in (*parts, *([f"memsize: {line}"] if line else ())))
        self._stream.flush()
        parts.clear()

    def _draw(self, parts: list[str], line: str) -> None:
        """Replace what a terminal shows. What draws it is imported here: quick work needs none of it."""
        from rich.console import Console, Group
        from rich.live_render import LiveRender
        from rich.text import Text

        drawn = io.StringIO()
        console = Console(file=drawn, force_terminal=True, color_system=None, legacy_windows=False)
        lines = [Text(part) for part in parts[-console.height // 2 :]]
        region = LiveRender(Group(*lines, *([Text(line, no_wrap=True, overflow="ellipsis")] if line else ())))
        console.print(region, crop=False)
        self._make_room()
        self._write(drawn.getvalue())
        self._clear = str(region.position_cursor())

    def _make_room(self) -> None:
        """Wipe the lines for what somebody else writes to the terminal, a library's log message, say."""
        if self._clear:
            text, self._clear = self._clear, ""
            with contextlib.suppress(OSError, ValueError):
                self._write(text)

    def _write(self, text: str) -> None:
        self._beside[0].write(text)
        self._stream.flush()


class _Lines:
    """The lines that are written to a stream of Python's: whether the last one `is_open`. `before` is called before
    each. `write` is not watched.
    """

    def __init__(self, stream: TextIO, before: Callable[[], None] = lambda: None) -> None:
        self.is_open = False
        self.write: Callable[[str], int] = stream.write
        self._before = before
        self._stream: Any = stream

    def watch(self) -> None:
        def watched(text: str) -> int:
            if text:
                self.is_open = not text.endswith("\n")
                self._before()
            return self.write(text)

        self._stream.write = watched

    def leave(self) -> None:
        del self._stream.write


def remaining(text: str, elapsed: float, counted: float | None = None) -> str:
    """How long it has taken so far, and about how much longer where `text` counts: ``12 s, about 16 s left``.

    `counted` is what had elapsed when the count was reached (None: as much). What is counted next may take longer than
    those before: nothing is said of the rest once it should be over.
    """
    spent = _seconds(elapsed)
    count = _COUNT.search(text)
    done, all_ = (int(count[1]) - 1, int(count[2])) if count else (0, 0)
    if not done or done >= all_:
        return spent
    counted = elapsed if counted is None else counted
    left = counted * (all_ - done) / done - (elapsed - counted)
    return f"{spent}, about {_seconds(left)} left" if left > 0 else spent


def _seconds(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 90 else f"{whole // 60} min {whole % 60} s"
