"""Runs cases in worker processes: one that crashes, hangs or takes too much memory ends its worker, not the run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import ROOT
from benchmarks.zoo.case import Attempt, Case, Outcome

RENEWED = 100
"""Cases after which a worker makes place for a new one: imports are paid once, and nothing grows for ever."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one case may take: seconds of time, and bytes of memory (0: no limit)."""

    seconds: float = 120
    memory: int = 4 * 2**30


def outcomes(cases: Iterable[Case], workers: int, limits: Limits) -> Iterator[Outcome]:
    """The outcome of each case as it comes, in no particular order."""
    waiting: queue.SimpleQueue[Case | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    for case in (*cases, *[None] * workers):
        waiting.put(case)

    def work() -> None:
        worker = _Worker(limits)
        try:
            while (case := waiting.get()) is not None:
                done.put(worker.outcome(case))
        finally:
            worker.end()
            done.put(None)

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(workers):
        yield from iter(done.get, None)


class _Worker:
    """A worker process, started when it is first needed and again after it died or became old."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.process: subprocess.Popen[str] | None = None
        self.served = 0

    def outcome(self, case: Case) -> Outcome:
        """What the process said of `case`; for parts that it did not live to tell, how it ended."""
        process = self._running()
        parts, reason = self._answers(process, case)
        if reason:
            self.end()
        return Outcome(
            case,
            inference=_attempt(parts, "inference", reason),
            training=_attempt(parts, "training", reason),
            ours=parts.get("ours"),
            theirs=parts.get("theirs"),
            uncounted=parts.get("uncounted", reason),
            refused=parts.get("refused", ""),
        )

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None or self.served >= RENEWED:
            self.end()
            command = [sys.executable, "-m", "benchmarks.zoo.worker", str(self.limits.memory)]
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
            )
            self.served = 0
        self.served += 1
        return self.process

    def _answers(self, process: subprocess.Popen[str], case: Case) -> tuple[dict[str, Any], str]:
        """The parts that came back, and why not all did."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.limits.seconds, kill)
        timer.start()
        parts: dict[str, Any] = {}
        try:
            print(json.dumps(asdict(case)), file=process.stdin, flush=True)
            for line in process.stdout:
                part = json.loads(line)
                if part is None:
                    return parts, ""
                parts[part[0]] = part[1]
        except BrokenPipeError:
            pass  # it has died, and the status says how
        finally:
            timer.cancel()
        if late.is_set():
            return parts, f"took more than {self.limits.seconds:g} s"
        return parts, f"the process ended with status {process.wait()}"

    def end(self) -> None:
        """Let the process go."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _attempt(parts: Mapping[str, Any], way: str, reason: str) -> Attempt:
    return Attempt(**parts[way]) if way in parts else Attempt(reason=reason)
