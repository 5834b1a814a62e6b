"""The processes of one run: predictions side by side, then one measurement after the other on the GPU.

Children are forked from a server that has torch loaded and has never touched CUDA, so that a process costs a CUDA
context and no more; where that server cannot be had, they start from nothing. Every wait has an end: what takes too
long is stopped and recorded, and so is what fails.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.truth import worker
from memsize.errors import MemsizeError

_PRELOADED: Final = ("torch._dynamo", "torch.distributed._tools.mem_tracker", "benchmarks.truth.worker")
"""What every child needs: imported once. Neither initialises CUDA."""
CUDA: Final = "memsize.analysis.verify.cuda_memory:CudaMemory"
_POLL: Final = 0.02


class LaneError(Exception):
    """A child that failed or took too long: why, in one line."""


@dataclass
class Lanes:
    """Starts children and waits for them. `folder` is where they leave their results."""

    folder: Path
    memory: str = CUDA
    method: str = "forkserver"
    _numbers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # The server must not load the driver only to learn whether there is one: its children could not use it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._context: Any = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            self._context.set_forkserver_preload(list(_PRELOADED))

    def stack(self, limit: float) -> tuple[Lanes, Path]:
        """The file of the GPU and its software, and the lanes that reached it: these, or slower ones."""
        try:
            return self, self.run(worker.write_stack, (self.memory,), limit)
        except LaneError as error:
            if self.method == "spawn" or "no GPU" in str(error):
                raise
            return Lanes(self.folder, self.memory, "spawn").stack(limit)

    def predictions(self, names: Sequence[str], stack: Path, limit: float, lanes: int) -> Iterator[tuple[str, Any]]:
        """The file of each workload's predictions or the `LaneError` that it ended in, as they come, several at a
        time. After `limit` seconds whatever is left is an error too.
        """
        end = time.monotonic() + limit
        waiting = list(names)
        running: dict[str, _Child] = {}
        while waiting or running:
            while waiting and len(running) < lanes:
                name = waiting.pop(0)
                running[name] = self._started(worker.write_predictions, (name, stack))
            for name, child in list(running.items()):
                if not child.process.is_alive() or time.monotonic() > end:
                    del running[name]
                    yield name, _settled(child)
            if time.monotonic() > end:
                yield from ((name, LaneError("there was no time to predict it")) for name in waiting)
                waiting = []
            time.sleep(_POLL)

    def run(self, function: Callable[..., None], arguments: tuple[Any, ...], limit: float) -> Path:
        """The file that `function` wrote in a process of its own, within `limit` seconds; raises `LaneError`."""
        child = self._started(function, arguments)
        child.process.join(limit)
        settled = _settled(child)
        if isinstance(settled, LaneError):
            raise settled
        return settled

    def _started(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> _Child:
        self._numbers += 1
        out, errors = (self.folder / f"{self.method}-{self._numbers}.{kind}" for kind in ("result", "errors"))
        process = self._context.Process(target=_child, args=(function, arguments, out, errors), daemon=True)
        process.start()
        return _Child(process, out, errors)


@dataclass(frozen=True)
class _Child:
    process: Any
    out: Path
    errors: Path


def _child(function: Callable[..., None], arguments: tuple[Any, ...], out: Path, errors: Path) -> None:
    """What runs in a child: its own stderr goes to a file, an exception's last line to the end of that file."""
    with errors.open("w", encoding="utf-8") as file, redirect_stderr(file):
        try:
            function(*arguments, out)
        except BaseException as error:
            traceback.print_exc(file=file)
            kind = "" if isinstance(error, MemsizeError) else f"{type(error).__name__}: "
            file.write(f"{kind}{(str(error).strip().splitlines() or [''])[0]}\n")
            file.flush()
            sys.exit(1)


def _settled(child: _Child) -> Path | LaneError:
    """The child's file once it has ended; one that still runs is stopped first."""
    if child.process.is_alive():
        _stop(child.process)
        return LaneError("it took too long and was stopped")
    child.process.join()
    if child.out.exists():
        return child.out
    lines = child.errors.read_text(encoding="utf-8").strip().splitlines() if child.errors.exists() else []
    return LaneError(lines[-1] if lines else f"it ended with status {child.process.exitcode}")


def _stop(process: Any) -> None:
    process.terminate()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join(5)
