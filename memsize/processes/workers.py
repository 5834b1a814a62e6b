"""Independent work side by side, in processes forked from this one.

A forked process has the imports, the model and everything else that its parent had, and shares its memory until either
writes. What it computes comes back pickled. Whatever goes wrong in it (an exception, a crash, an answer that cannot be
pickled) makes the parent do that piece of work itself, so that an error is reported as if there were no workers.

Only the command line forks (`side_by_side`): a process that holds threads, locks or a GPU must not be forked unasked.
Windows cannot fork, and macOS's own libraries do not survive it: there everything runs in this process.

Known limits: threads that a model's file starts on import are not there in a worker; what the model writes to stderr
comes in the order in which the workers get to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from memsize.processes.patches import assign

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_jobs: ContextVar[int | None] = ContextVar("jobs", default=1)
_PATIENCE = 0.1
"""Seconds after which a Ctrl-C that came while all workers were busy is noticed."""

Announce = Callable[[str], None]
Request = tuple[Any, ...]
"""The name of a method of the subject, and its arguments."""


@contextlib.contextmanager
def side_by_side(jobs: int | None) -> Iterator[None]:
    """While open, `Workers` fork up to `jobs` processes; None: one for each core that this process may use."""
    outer = _jobs.set(jobs)
    try:
        yield
    finally:
        _jobs.reset(outer)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """A pool of forked worker processes, each with its own copy of `subject`; empty if no forking was requested.

    They are forked when there is work for more than one, and gone when this is closed. Forking takes as long as several
    runs of a small model: unless the user chose a number of processes, this one works alone for `head_start` seconds. A
    worker in which PyTorch would refuse to work ends at once: where there is a GPU, that is one whose parent has used
    it or has run a backward.
    """

    def __init__(
        self,
        subject: Any,
        announce: Announce,
        deliver: Callable[[Any], None] = lambda _: None,
        *,
        head_start: float = 0,
    ) -> None:
        self._subject = subject
        self._head_start = head_start
        self._announce = announce
        self._deliver = deliver
        self._workers: dict[Connection, int] = {}
        """The process at the other end of each connection."""
        self._parent: Connection | None = None
        self._warned: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(*self._workers.values())
        for connection in self._workers:
            connection.close()
        self._workers.clear()
        self._subject = None

    def announce(self, text: str) -> None:
        """Report progress, from whichever process."""
        if self._parent is None:
            self._announce(text)
        else:
            self._parent.send(("said", text))

    def deliver(self, part: Any) -> None:
        """Hand over a part of an answer at once, from whichever process; work that is done again does it again."""
        if self._parent is None:
            self._deliver(part)
        else:
            self._parent.send(("found", part))

    def answers(self, requests: Sequence[Request]) -> list[Any]:
        """Return the subject's answer to each request, in order; raise the error of a request that fails."""
        answers: list[Any] = []
        jobs = _jobs.get()
        while len(answers) < len(requests) and self._head_start > 0 and jobs is None:
            begin = time.perf_counter()
            answers.append(self._answer(requests[len(answers)]))
            self._head_start -= time.perf_counter() - begin
        rest = requests[len(answers) :]
        count = min(cores() if jobs is None else jobs, len(rest))
        if count < 2 or not can_fork():
            return [*answers, *map(self._answer, rest)]
        self._hire(count)
        return [*answers, *self._shared_out(rest)]

    def apart(self, request: Request) -> Any:
        """Return the subject's answer to one request, from a process that is used for nothing else."""
        self._hire(len(self._workers) + 1)
        return self._shared_out([request])[0]

    def _answer(self, request: Request) -> Any:
        method, *arguments = request
        return getattr(self._subject, method)(*arguments)

    def _hire(self, count: int) -> None:
        from multiprocessing import Pipe

        while len(self._workers) < count:
            here, there = Pipe()
            process = forked(partial(self._serve, there, (here, *self._workers)))
            there.close()
            self._workers[here] = process

    def _shared_out(self, requests: Sequence[Request]) -> list[Any]:
        from multiprocessing.connection import wait

        from memsize.processes.ctrl_c import raise_waiting

        waiting, idle = deque(range(len(requests))), list(self._workers)
        notices: dict[str, Callable[[Any], None]] = {
            "said": self._announce,
            "found": self._deliver,
            "warned": lambda warning: warnings.warn_explicit(*warning, registry=self._warned),  # type: ignore[call-overload]
        }
        answers: dict[int, Any] = {}
        busy: dict[Any, int] = {}
        while waiting or busy:
            while waiting and idle:
                busy[connection := idle.pop()] = waiting.popleft()
                with contextlib.suppress(OSError):  # a worker that is gone: `_heard` finds out
                    connection.send(requests[busy[connection]])
            if not busy:  # all are gone, and nothing will come
                index = waiting.popleft()
                answers[index] = self._answer(requests[index])
                continue
            ready: list[Any] = wait(list(busy), _PATIENCE)
            raise_waiting()
            for connection in ready:
                kind, value = _heard(connection)
                if kind in notices:
                    notices[kind](value)
                    continue
                index = busy.pop(connection)
                if kind == "gone":
                    connection.close()
                    os.waitpid(self._workers.pop(connection), 0)
                else:
                    idle.append(connection)
                answers[index] = value if kind == "done" else self._answer(requests[index])
        return [answers[index] for index in range(len(requests))]

    def _serve(self, parent: Connection, others: Sequence[Connection]) -> None:
        """Answer the parent's requests until it is gone, or has no use for this process."""
        for other in others:
            other.close()
        _jobs.set(1)
        self._parent, self._workers = parent, {}
        use_pytorch()

        def warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
            parent.send(("warned", (str(message), category, filename, lineno)))

        assign(warnings, "showwarning", warn)  # by the parent: each worker meets the same ones
        while True:
            request = parent.recv()
            try:
                parent.send(("done", self._answer(request)))
            except BaseException:  # whatever it is: the parent meets it again
                parent.send(("failed", None))
            sys.stdout.flush()
            sys.stderr.flush()


def _heard(connection: Any) -> tuple[str, Any]:
    """The next message of a worker; ``gone`` where it has ended, killed for its memory perhaps."""
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        return "gone", None
    try:
        kind, value = pickle.loads(message)
    except Exception:  # an exception, say, whose class wants other arguments than it keeps
        return "failed", None
    return kind, value


_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl (include/uapi/linux/prctl.h)."""


# -- how processes start, stay silent, compute with PyTorch, and end with their parent --------------------------------


def can_fork() -> bool:
    """Whether this platform forks, and a forked process can go on."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def forked(work: Callable[[], None]) -> int:
    """Do `work` in a forked process that then ends; returns its number. Ctrl-C is for its parent to answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    # It must not come before the process has learnt to ignore it.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Of threads: those of PyTorch are not needed.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            process = os.fork()
        if not process:
            try:
                gc.freeze()  # a collection would copy every page that holds an object of the parent
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                if sys.platform == "linux":  # elsewhere it notices when it answers
                    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                work()
            finally:
                os._exit(0)
        return process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def end_processes(*processes: int) -> None:
    """Kill forked processes, and wait until they are gone."""
    for process in processes:
        os.kill(process, signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)


def use_pytorch() -> None:
    """Let a forked process compute; where PyTorch would refuse to, it ends or raises. That is one whose parent has used
    a GPU, or has run a backward where there is one.
    """
    import torch

    # OpenMP's threads were not forked along; one core is what this process is for.
    torch.set_num_threads(1)
    torch.zeros(1, requires_grad=True).sum().backward()  # raises where autograd has threads
    # Who asked whether there is a GPU may not ask again in a fork; where there is none, that is no loss.
    if torch.cuda._is_in_bad_fork() and torch.cuda._device_count_nvml() > 0:
        os._exit(0)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send what is printed in this process to the null device, by Python or C."""
    with (
        contextlib.ExitStack() as redirected,
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
        warnings.catch_warnings(action="ignore"),
    ):
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # it is closed
                copy = os.dup(descriptor)
                redirected.callback(os.close, copy)
                redirected.callback(os.dup2, copy, descriptor)
            os.dup2(nothing.fileno(), descriptor)
        yield
