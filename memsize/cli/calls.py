"""A call of a tool: one command in a process of its own, which can be limited and ended.

Where processes can be forked they come from one that has imported PyTorch already, so that no call waits for that.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from memsize.cli.working import stdout_to_stderr
from memsize.processes.workers import can_fork

_MOST_LINES: Final = 20
"""Lines of stderr that an error shows: the end of a traceback."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The folder that calls run in, and what each may take: seconds, and bytes for every process."""

    folder: Path
    seconds: float
    memory: int


def start_processes() -> BaseContext:
    """The source of processes for calls. Where they are forked, the one that they come from starts now."""
    if not can_fork():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preload"])
    with stdout_to_stderr():  # what imports print is no message of the protocol
        forkserver.ensure_running()
    return context


class Call:
    """One command in a process of its own: `run` is a function of `arguments` that prints, and returns a status.

    Its files are in `scratch`: what it prints, and its messages.
    """

    def __init__(self, context: Any, run: Callable[[Any], int], arguments: Any, scratch: Path, limits: Limits) -> None:
        self._files = scratch / "stdout", scratch / "stderr"
        self._read = 0
        for file in self._files:
            file.touch()
        self._process: BaseProcess = context.Process(target=_serve, args=(run, arguments, self._files, limits))

    def start(self) -> None:
        """Start the process; waits until there is one to fork from."""
        self._process.start()

    @property
    def is_running(self) -> bool:
        """Tell whether the process has not ended yet."""
        return self._process.is_alive()

    def progress(self) -> list[str]:
        """The lines on what it does that are new since the last time."""
        with self._files[1].open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix("memsize: ") for line in lines if line.startswith("memsize: ")]

    def result(self) -> tuple[str, bool]:
        """The output, with the end of its messages if it failed, and whether it did."""
        text = self._files[0].read_text(encoding="utf-8", errors="replace")
        status = self._process.exitcode
        if not status:
            return text, False
        messages = self._files[1].read_text(encoding="utf-8", errors="replace").splitlines()
        if status < 0:
            messages.append(f"error: the process was ended by {signal.Signals(-status).name}")
        return "\n".join((*text.splitlines(), *messages[-_MOST_LINES:])), True

    def end(self) -> None:
        """Kill the process, and those that it started."""
        if self._process.pid is not None:
            with contextlib.suppress(OSError, AttributeError):  # it has ended already; Windows has no groups
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


def _serve(run: Callable[[Any], int], arguments: Any, files: Sequence[Path], limits: Limits) -> None:
    """The process of a call, from its first line on."""
    gc.freeze()  # a collection would copy every page of what was imported
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_server, daemon=True).start()
    for descriptor, (path, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), *((str(file), os.O_WRONLY | os.O_APPEND) for file in files))
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(limits.folder)
    _limit_memory(limits.memory)
    sys.exit(run(arguments))


def _end_with_server() -> None:
    """End this process, and those that it started, when the server has ended, however it did."""
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _limit_memory(limit: int) -> None:
    """Let this process, and each that it starts, allocate at most `limit` bytes."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has none; a lower one may be set already
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
