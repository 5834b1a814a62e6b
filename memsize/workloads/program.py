"""A program as workload: a script or module that was written for a GPU, run unchanged on a virtual one."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memsize.device.config import AllocatorConfig
from memsize.device.context import context
from memsize.errors import first_line
from memsize.internals.user_code import running_line
from memsize.records.gpu import Card
from memsize.records.program import Assumed, Refused
from memsize.records.trace import Failure, Layer, StoredTensor, Trace
from memsize.tracing.ledger import Workspaces
from memsize.tracing.run import layer_rows
from memsize.units import format_bytes
from memsize.virtual.driver import Driver
from memsize.virtual.files import Files
from memsize.virtual.ledger import VirtualLedger
from memsize.virtual.memory import DeviceMemory, OutOfDeviceMemoryError
from memsize.virtual.modules import ProgramCalls
from memsize.virtual.region import virtual_gpu
from memsize.workloads.optimizers import steps_watched

_LINE_FROM = 64 * 1024
"""The user's line is looked up for storages of this many bytes and more."""


class StopProgram(BaseException):
    """Ends the program once it has done its steps; its ``finally`` blocks run."""


class Program:
    """A program on a GPU that isn't there, until it has made `steps` optimizer steps (0: to its own end)."""

    def __init__(
        self,
        name: str,
        card: Card,
        workspaces: Workspaces,
        config: AllocatorConfig,
        steps: int = 3,
        files: Files | None = None,
    ) -> None:
        self.name = name
        self.card = card
        self.config = config
        self.steps = steps
        self.done = 0
        self.stopped = False
        self.lines: dict[int, str] = {}
        """The line of the program that made each large storage."""
        self.refused: list[Refused] = []
        self.assumed: list[Assumed] = []
        self.files = files or Files()
        self.ledger = VirtualLedger(workspaces, self._after_op)
        self.memory = DeviceMemory(card.bytes, context().low, config, self.ledger.events)
        self.calls = ProgramCalls(self.ledger, self._before_forward)
        self._seen = 0
        self._end: int | None = None
        self._leader: int | None = None

    def run(self, path: str, arguments: Sequence[str], module: bool = False) -> BaseException | None:
        """Run the script `path` (or the module of that name) with its own command line, as ``python`` would.

        Returns the error that it ended with: None where it came to its end or was stopped.
        """
        with self.open(), _command_line(path, arguments, module):
            try:
                if module:
                    runpy.run_module(path, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(path, run_name="__main__")
            except StopProgram:
                pass
            except SystemExit as end:
                return end if end.code else None
            except BaseException as error:
                return error
        return None

    @contextmanager
    def open(self) -> Iterator[None]:
        """The region in which this process has the GPU."""
        driver = Driver(self.card, self.memory)
        shown = threading, "excepthook", _unless_stopped(threading.excepthook)
        more = (self.calls.replacement(), shown, *self.files.replacements())
        with (
            virtual_gpu(driver, self.ledger, more),
            steps_watched(self.ledger, everywhere=True),
            self._steps_counted(),
            self.files.guarded(),
        ):
            yield

    # -- while it runs ------------------------------------------------------------------------------------------------

    def _after_op(self) -> None:
        events, assumptions = self.ledger.events, self.ledger.evaluator.assumptions
        for event in events[self._seen :]:
            if event.delta >= _LINE_FROM:
                self.lines[event.storage] = running_line(libraries=False)
        if len(assumptions) > len(self.assumed):
            self.assumed += [
                Assumed(text, running_line(libraries=False) or None) for text in list(assumptions)[len(self.assumed) :]
            ]
        try:
            self.memory.follow()
        except OutOfDeviceMemoryError as error:
            self.ledger.refuse(error.storage)
            raise self._out_of_memory(error.request) from None
        finally:
            self._seen = len(events)

    def _out_of_memory(self, request: int) -> Exception:
        """The error in PyTorch's words (c10/cuda/CUDACachingAllocator.cpp)."""
        memory, clock = self.memory, self.ledger.clock
        layer = self.calls.seen[clock.layer].path if clock.layer >= 0 else None
        where = (self.ledger.last_op, layer, clock.phases[clock.phase], running_line(libraries=False) or None)
        self.refused.append(Refused(request, memory.free, memory.reserved, *where))
        idle = format_bytes(memory.reserved - memory.allocated)
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(request)}. GPU 0 has a total capacity of "
            f"{format_bytes(memory.total)} of which {format_bytes(memory.free)} is free. Of the allocated memory "
            f"{format_bytes(memory.allocated)} is allocated by PyTorch, and {idle} is reserved by PyTorch but "
            "unallocated."
        )

    def _stop_after_steps(self) -> None:
        if self.steps and self.done >= self.steps:
            self.stopped = True
            self._end = self._end or len(self.ledger.events)
            raise StopProgram

    def _before_forward(self) -> None:
        self._stop_after_steps()
        if self.ledger.clock.step == 0:
            self.ledger.begin_step(1)

    @contextmanager
    def _steps_counted(self) -> Iterator[None]:
        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._stop_after_steps()
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                self.ledger.mark(parameter, "parameter")
                if parameter.grad is not None:
                    self.ledger.mark(parameter.grad, "gradient")

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self._leader is None:
                self._leader = id(optimizer)
            if self._leader == id(optimizer):
                self.done += 1
                self.ledger.begin_step(self.done + 1)

        handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def trace(self, error: BaseException | None = None) -> Trace:
        """The trace of what ran."""
        ledger, calls = self.ledger, self.calls
        storages = ledger.storages(calls.kept)
        names = [root.name for root in calls.roots] if len(calls.roots) > 1 else [""]
        tensors = tuple(
            _of_root(tensor, names[number]) for number, root in enumerate(calls.roots) for tensor in root.tensors
        )
        seen = [replace(each, path=_path(names[calls.root_of[i]], each.path)) for i, each in enumerate(calls.seen)]
        layers = layer_rows(seen, tensors, storages, calls.kept)
        convolutions = ledger.workspaces.convolutions
        trace = Trace(
            model=self.name,
            scenario="as-given",
            training=True,
            batch_size=None,
            torch=str(torch.__version__),
            inputs=calls.roots[0].inputs if calls.roots else (),
            layers=tuple(replace(layer, root=calls.root_of[i]) for i, layer in enumerate(layers)) or (_NOTHING,),
            tensors=tensors,
            phases=tuple(ledger.clock.phases),
            storages=storages,
            events=tuple(ledger.events[: self._seen if self._end is None else self._end]),
            assumptions=tuple(ledger.evaluator.assumptions),
            notes=(*ledger.evaluator.notes, *(convolutions.notes if convolutions else ())),
            cudnn=convolutions.source if convolutions else None,
            failure=_failure(error, ledger, seen),
            roots=tuple(names),
        )
        ledger.close()
        return trace


_NOTHING = Layer("", "program", 0, True, 0, (), 0, 0, 0, 0, 0, 0, 0)
"""The only layer of a program that calls no module on the GPU."""


def _path(root: str, path: str) -> str:
    return ".".join(filter(None, (root, path)))


def _of_root(tensor: StoredTensor, root: str) -> StoredTensor:
    tied = tensor.tied_to and _path(root, tensor.tied_to)
    return replace(tensor, name=_path(root, tensor.name), layer=_path(root, tensor.layer), tied_to=tied)


def _failure(error: BaseException | None, ledger: VirtualLedger, seen: Sequence[Any]) -> Failure | None:
    if error is None:
        return None
    where = seen[ledger.clock.layer] if ledger.clock.layer >= 0 else None
    path, kind = (where.path, where.type) if where else ("", "")
    return Failure(path, kind, ledger.last_op or None, (), f"{type(error).__name__}: {first_line(error)}")


def _unless_stopped(show: Callable[[Any], object]) -> Callable[[Any], None]:
    """A thread in which the program was stopped ends without a word."""

    def shown(args: Any) -> None:
        if not issubclass(args.exc_type, StopProgram):
            show(args)

    return shown


@contextmanager
def _command_line(path: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path.cwd() if module else Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search
