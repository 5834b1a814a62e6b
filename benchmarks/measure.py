"""Timing things in turn, processes and calls, and one line of the table.

`python -m benchmarks.measure ARGUMENT …` runs this Python with the arguments and prints what that took, as JSON. The
measuring process is a small one of its own because a new process begins with the peak memory of the one that starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Spent(NamedTuple):
    """What one process took: seconds of wall time, its peak resident memory in bytes, and seconds of CPU time, those of
    its own processes included.
    """

    seconds: float
    memory: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison. `target` is the most that `ratio` should be; None where there is only something to look at."""

    what: str
    ours: str
    peer: str
    theirs: str
    ratio: float | None = None
    target: float | None = None

    @property
    def verdict(self) -> str:
        if self.ratio is None or self.target is None:
            return ""
        return "yes" if self.ratio <= self.target else "no"


def compared(what: str, ours: float, peer: str, theirs: float, target: float | None = None) -> Line:
    """Two times in seconds as a line; the ratio is ours ÷ theirs."""
    return Line(what, seconds(ours), peer, seconds(theirs), ours / theirs, target)


def seconds(amount: float) -> str:
    return f"{amount:.2f} s" if amount >= 1 else f"{amount * 1000:.0f} ms"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def in_turn(
    calls: Sequence[Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The median seconds of each of `calls`, called in turn `rounds` times, so that all see the same weather."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            start = clock()
            call()
            taken.append(clock() - start)
    return [median(taken) for taken in times]


def processes_in_turn(commands: Sequence[Sequence[str]], rounds: int, folder: Path = ROOT) -> list[Spent]:
    """The medians of each of `commands` (arguments of this Python), run in turn as processes of their own."""
    spent: list[list[Spent]] = [[] for _ in commands]
    for _ in range(rounds):
        for command, runs in zip(commands, spent, strict=True):
            runs.append(_measured_elsewhere(command, folder))
    medians = (map(median, zip(*runs, strict=True)) for runs in spent)
    return [Spent(wall, round(memory), cpu) for wall, memory, cpu in medians]


def _measured_elsewhere(arguments: Sequence[str], folder: Path) -> Spent:
    command = [sys.executable, "-m", __name__, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled once, not in each process
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return Spent(*json.loads(done.stdout))


_ADOPT = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl (include/uapi/linux/prctl.h)."""


def process(arguments: Sequence[str]) -> Spent:
    """What this Python took with `arguments`, its output thrown away; exits with its errors and status if it fails.

    A sweep's worker processes outlive it, and nobody waits for them there: on Linux they are adopted and waited for
    here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT, 1)
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        taken = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            errors.seek(0)
            sys.stderr.write(errors.read())
            sys.exit(child.returncode)
    memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:
            os.wait()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(taken, memory, usage.ru_utime + usage.ru_stime)


if __name__ == "__main__":
    print(json.dumps(process(sys.argv[1:])))
