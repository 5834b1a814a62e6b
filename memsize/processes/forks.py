"""Processes forked from this one: how they start, stay silent, compute with PyTorch, and end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl (include/uapi/linux/prctl.h)."""


def can_fork() -> bool:
    """Whether this platform forks, and a forked process can go on."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def forked(work: Callable[[], None]) -> int:
    """Do `work` in a process that is forked from this one, and ends when that is done, whatever comes of it.

    Ctrl-C, which reaches every process of the group, is for its parent to answer. Returns its number.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # It must not come before the process has learnt to ignore it.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of PyTorch are not needed
            process = os.fork()
        if not process:
            try:
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


# -- silence ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send what is printed in this process to the null device, for good where it is written by C."""
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
        yield
