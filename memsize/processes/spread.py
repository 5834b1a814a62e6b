"""Independent work spread over processes by joblib: on this machine or on a Dask cluster.

Each piece of work is a function of a module and plain arguments, which go to a process that imports what it needs, and
may be on another machine. A process that dies (killed for its memory, a crash in C++) takes down what joblib had begun:
what was not answered is then run piece by piece, which tells whose fault it was.

`workers` does something else: it forks this process, so that scenarios share the model that was built, and answers come
within the second that joblib's processes take to import PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, TypeVar

from memsize.errors import InputError, first_line
from memsize.spec.file_requests import Backend

_PATIENCE: Final = 10
"""Seconds in which a scheduler should answer."""

Task = TypeVar("Task")
Result = TypeVar("Result")


class Died(NamedTuple):
    """Stands for an answer where the process that worked on it ended, or could not be reached any more."""

    reason: str


class _Raised(NamedTuple):
    error: Exception


def spread(
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    jobs: int | None = None,
    backend: Backend = "loky",
    scheduler: str | None = None,
) -> Iterator[tuple[Task, Result | Died]]:
    """Each of `tasks` with what `work` makes of it, as they come; raises what `work` raises.

    `jobs` processes work side by side (None: one per core of this machine, all of a cluster), with 1 this one alone.
    `scheduler` is the cluster's address; None is one on this machine. Raises `InputError` where there is none.
    """
    waiting = dict(enumerate(tasks))
    with _cluster(backend, scheduler):
        count = (-1 if jobs is None else jobs) if backend == "loky" else (jobs or -1)
        while waiting:
            begun: list[int] = []
            error: Exception | None = None
            try:
                for number, result in _answers(work, dict(waiting), begun, count):
                    if isinstance(result, _Raised):
                        error = result.error
                        break
                    yield waiting.pop(number), result
            except Exception:
                suspects = [number for number in begun if number in waiting]
                if not suspects:
                    raise
                for number in suspects:
                    yield (task := waiting.pop(number)), _alone(work, task)
            if error is not None:
                raise error from error.__cause__


def _answers(
    work: Callable[[Any], Any], waiting: dict[int, Any], begun: list[int], count: int
) -> Iterator[tuple[int, Any]]:
    """The number and the answer of each task that waits; `begun` takes the numbers of those that were sent out."""
    from joblib import Parallel, delayed
    from joblib.parallel import get_active_backend

    def calls() -> Iterator[Any]:
        for number, task in waiting.items():
            begun.append(number)
            yield delayed(_answer)(work, number, task)

    backend, _ = get_active_backend()
    return_as = "generator_unordered" if backend.supports_return_generator else "list"
    parallel = Parallel(n_jobs=count, return_as=return_as, batch_size=1, pre_dispatch="n_jobs")
    yield from parallel(calls())


def _answer(work: Callable[[Any], Any], number: int, task: Any) -> tuple[int, Any]:
    try:
        return number, work(task)
    except Exception as error:
        return number, _Raised(error)


def _alone(work: Callable[[Any], Any], task: Any) -> Any:
    from joblib.externals.loky.process_executor import BrokenProcessPool

    try:
        # With one job joblib would work in this process.
        ((_, result),) = _answers(work, {0: task}, [], 2)
    except BrokenProcessPool:
        return Died("the process that ran it ended: it crashed, or was killed for its memory")
    except Exception as error:
        return Died(f"the process that ran it ended: {first_line(error)}")
    if isinstance(result, _Raised):
        raise result.error from result.error.__cause__
    return result


# -- where -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster(backend: Backend, scheduler: str | None) -> Iterator[None]:
    from joblib import parallel_config

    options: dict[str, Any] = {}
    if backend == "loky":
        # joblib replaces a process that has grown by 300 MB, and warns in the thread by which all answers come: where
        # warnings are errors, that thread would end, and no answer would come any more.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
        options["initializer"] = _begin
    with (
        _dask(scheduler) if backend == "dask" else contextlib.nullcontext(),
        parallel_config(backend=backend, **options),
    ):
        yield


def _dask(scheduler: str | None) -> AbstractContextManager[Any]:
    try:
        from distributed import Client
    except ImportError:
        raise InputError("the backend dask needs its package: pip install distributed") from None
    try:
        client: AbstractContextManager[Any] = Client(scheduler, timeout=_PATIENCE)
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler}: {first_line(error)}") from None
    return client


# -- in a process that works -------------------------------------------------------------------------------------------


def _begin() -> None:
    """End this process when its parent is gone, killed perhaps: it would wait for minutes. Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class TimeLimitError(BaseException):
    """Work that took too long. No `Exception`, which the user's code may catch."""


def is_late(error: BaseException | None) -> bool:
    """Whether the time ended: a forward that was interrupted says that it failed, and keeps the cause."""
    return error is not None and (isinstance(error, TimeLimitError) or is_late(error.__cause__))


@contextlib.contextmanager
def time_limited(seconds: float | None) -> Iterator[Callable[[], None]]:
    """While open, work that takes longer raises `TimeLimitError`; what it gives begins the time anew.

    Only a process's main thread can be interrupted, and not on Windows: elsewhere there is no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: None
        return

    def stop(*_: object) -> None:
        raise TimeLimitError

    def restart() -> None:
        # And again after that: what is raised may be lost in a destructor.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        restart()
        yield restart
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
