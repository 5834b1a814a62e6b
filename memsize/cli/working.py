"""While a command works: messages and what it is doing show on stderr, and stdout is kept for its answer alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import click

from memsize.cli.progress import Progress
from memsize.interrupt import cleanups, end
from memsize.printable import printable_lines


@dataclass(slots=True)
class Session:
    """One invocation of the command line. `debug`: whether an error shows its traceback; an option sets it before
    anything can go wrong.
    """

    debug: bool = False


def say(text: str) -> None:
    """Print a message to stderr, without anything that a terminal would obey."""
    click.echo(printable_lines(text), err=True)


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
            redirected.callback(_put_back, descriptor, os.dup(descriptor))
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


def _put_back(descriptor: int, copy: int) -> None:
    os.dup2(copy, descriptor)
    os.close(copy)
