"""A program as workload: a script or module that was written for a GPU, run unchanged on a virtual one."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from memsize.device.allocator_config import AllocatorConfig, settings_in
from memsize.device.cuda_context import cuda_context
from memsize.device.cuda_libraries import nccl_notes
from memsize.errors import with_type
from memsize.loading.scope import ImportScope
from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import Patch, assigned, merged, wrapping
from memsize.processes.user_code import Lines, running_lines, shown
from memsize.records.program import Assumed, Refused
from memsize.records.trace import Failure, Layer, Trace
from memsize.records.world import World
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.ledger import Workspaces
from memsize.tracing.module_calls import ModuleRecord
from memsize.tracing.run import layer_rows
from memsize.virtual import hub_uploads, saved_weights
from memsize.virtual.checkpoint_stand_in import StandInLoading
from memsize.virtual.driver.caching_allocator import DeviceMemory
from memsize.virtual.driver.functions import Driver
from memsize.virtual.guards.child_processes import ChildProcesses, Settings
from memsize.virtual.guards.file_guard import NetworkGuard
from memsize.virtual.hub_weights import HubWeights
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.packages.finder import SimulatedPackages
from memsize.virtual.program_code import Held, Waits, holders
from memsize.virtual.program_modules import CheckpointingCalls, ProgramCalls, switched_on
from memsize.virtual.region import virtual_gpu
from memsize.virtual.saved_weights import Files, trackers_off
from memsize.virtual.torchscript import ScriptFiles
from memsize.workloads.after_steps import AfterSteps
from memsize.workloads.optimizers import steps_watched
from memsize.workloads.program_steps import ProgramSteps, in_step

_LINE_FROM = 64 * 1024
"""The user's line is looked up for storages of this many bytes and more."""

_PROGRESS_EVERY = 1.0
_LONG = 60.0
"""Seconds between two looks at where a program is, and those after which its reader is told how to end it."""
_SET = "the caching allocator's settings are those that the environment has for it: {}"


class StopProgram(SystemExit):
    """Ends the program, or a thread of it, once it has done its steps; its ``finally`` blocks run."""


class Program:
    """A program on a GPU that isn't there, with these `settings`. `processes` are those that it starts.

    `snapshot` makes of what has run what `torch.cuda.memory._snapshot` returns.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        workspaces: Workspaces,
        files: Files | None = None,
        processes: ChildProcesses | None = None,
        snapshot: Callable[[Trace, AllocatorConfig], dict[str, Any]] = lambda trace, config: {},
    ) -> None:
        card = settings.card
        self.name = name
        self.card = card
        self._config = settings.config
        self.world = settings.world
        self.stack = settings.stack
        self.stopped = False
        self.waits = Waits()
        self.gpu_variables: tuple[Held, ...] = ()
        """The variables that hold tensors on the GPU when the program is stopped."""
        self.files = files or Files(settings.allowed)
        self.processes = processes or ChildProcesses(self.files, settings)
        self.ledger = VirtualLedger(workspaces, self._after_op, self._allocate)
        self.ledger.evaluator.observer = self._relied
        self.memory = DeviceMemory(
            card.bytes,
            cuda_context(card, settings.stack).low,
            self._allocator_config,
            self.ledger.events,
            self.ledger.streams,
            settings.bounded,
        )
        self.steps = ProgramSteps(self.ledger, settings.steps, self._before_step, lambda: shown(self._lines()))
        rest = settings.goes_on, self._note_variables, self._stop, Program.run.__code__, self.world is None
        self.after = AfterSteps(self.ledger, self.steps, self.files, *rest)
        self.stand_ins = StandInLoading(self.ledger, self.files, settings.stands_in)
        self.files.missing, self.files.loaded = self.stand_ins.missing, self._note_loaded
        self.loaded = set[int]()
        """The storages on the GPU of states that were loaded."""
        self.steps.state_to_load = self.stand_ins.optimizer_state
        self.hub_weights = HubWeights(self.ledger, self.stand_ins)
        self.packages = SimulatedPackages(self.ledger.evaluator.notes.setdefault)
        self.checkpointing = CheckpointingCalls(lambda: shown(self._lines()))
        self._checkpointing: str | None = None
        """Where checkpointing is switched on at an optimizer step."""
        self.calls = ProgramCalls(self.ledger, self._before_forward)
        self._refused: list[tuple[int, int, Refused]] = []
        """Each with the number of events before it, and the layer as the clock numbers it."""
        self._assumed: dict[str, dict[str, None]] = {}
        self._snapshot = snapshot
        self._seen = 0
        self._end: int | None = None

    def run(self, path: str, arguments: Sequence[str], module: bool = False) -> BaseException | None:
        """Run a script (or a module) with its own command line, and return the error that it ended with."""
        with self._watched(), self.open(), _command_line(path, arguments, module):
            try:
                self.stand_ins.announce_arguments(arguments)
                if module:
                    runpy.run_module(path, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(path, run_name="__main__")
                self.processes.join(self.steps.progress)
            except StopProgram:
                pass
            except SystemExit as end:
                return end if end.code else None
            except BaseException as error:
                return self.after.settled(error)
        return None

    @contextmanager
    def open(self, more: Iterable[Patch] = ()) -> Iterator[None]:
        """The region in which this process has the GPU; `more` is replaced besides."""
        driver = Driver(
            self.card, self.memory, lambda: self._snapshot(self._trace(None), self.memory.config), self.stack
        )
        quiet = wrapping(threading, "excepthook", _unless_stopped)
        files = (*self.files.replacements(), *ScriptFiles(self.files, self.ledger).replacements())
        own = (*self.calls.replacements(), *self.steps.replacements(), quiet, *files, *self.after.replacements())
        own += (*self.stand_ins.replacements(), *self.hub_weights.replacements())
        libraries = (self.checkpointing.later(), self.hub_weights.later(), self.packages.later())
        uploads = hub_uploads.later(self.ledger.evaluator.notes.setdefault)
        later = merged(saved_weights.later(self.files), uploads, *libraries)
        with (
            virtual_gpu(driver, self.ledger, (*own, *more), self.world, later),
            steps_watched(self.ledger, everywhere=True),
            self.steps.counted(),
            self.packages.importable(),
            trackers_off(),
            self.files.guarded(),
            self.processes.open(),
            NetworkGuard().guarded() if self.processes.settings.offline else nullcontext(),
            closing(self.after),
            closing(self.hub_weights),
        ):
            self.processes.gpu = driver.gpu
            yield

    def _allocator_config(self) -> AllocatorConfig:
        self.stack = self.stack.in_environment(os.environ.get("CUDA_MODULE_LOADING"))
        if self._config is not None:
            return self._config
        text = settings_in(os.environ)
        if text:
            self.ledger.evaluator.notes[_SET.format(text)] = None
        return AllocatorConfig.of_environment(os.environ, self.stack.release)

    # -- while it runs ------------------------------------------------------------------------------------------------

    def _after_op(self) -> None:
        self._seen = len(self.ledger.events)

    def _allocate(self, storage: int, size: int) -> None:
        if size >= _LINE_FROM and (lines := self._lines()):
            self.ledger.made_at(storage, lines)
        try:
            self.memory.follow()
        except torch.OutOfMemoryError:
            self.ledger.refuse(storage)
            self.steps.mark_all()
            self._mark_unowned()
            clock, line = self.ledger.clock, shown(self._lines()) or None
            where = (self.ledger.last_op, None, clock.phases[clock.phase], line)
            refused = Refused(size, self.memory.left, self.memory.reserved, *where)
            self._refused.append((len(self.ledger.events), clock.layer, refused))
            raise

    def _mark_unowned(self) -> None:
        # By itself: the last object of the collector may be the traceback of the refusal, which a variable of its frame
        # would keep alive, with all that the failed op has made.
        for tensor in gc.get_objects():
            if issubclass(type(tensor), torch.Tensor):
                self.ledger.mark_unowned(tensor)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While open, the line that this thread is at is the progress, until the first optimizer step."""
        over, program, started = threading.Event(), threading.get_ident(), time.monotonic()

        def watch() -> None:
            while not over.wait(_PROGRESS_EVERY) and not self.steps.done:
                so_far = "no optimizer step so far" if self.ledger.events else "nothing on the GPU so far"
                end = "; Ctrl-C ends it" + " with a report of what ran" * bool(self.ledger.events)
                end *= time.monotonic() - started >= _LONG
                if line := shown(running_lines(Program.run.__code__, program)):
                    self.steps.progress(f"at {line}, {so_far}{end}")

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()

    def _relied(self, assumption: str) -> None:
        lines = self._assumed.setdefault(assumption, {})
        location = self._lines()
        if location:
            lines[shown(location)] = None
            if self.waits.seen(location[0]):
                self._stop()

    def _lines(self) -> Lines:
        """Where the program is: its own line and a package's, below what runs it."""
        return running_lines(Program.run.__code__)

    def _note_loaded(self, state: Any) -> None:
        pieces = chain.from_iterable(map(plain_tensors, tensors_in(state)))
        self.loaded |= {index for piece in pieces if (index := self.ledger.index_of(piece)) >= 0}

    def _note_variables(self) -> None:
        self.gpu_variables = holders(self.ledger.index_of)

    def _stop(self) -> None:
        if self._end is None:
            self.stopped = True
            self._end = len(self.ledger.events)
            self.gpu_variables = self.gpu_variables or holders(self.ledger.index_of)
        raise StopProgram

    def _before_step(self) -> None:
        self._checkpointing = self._checkpointing or self.checkpointing.without_match or switched_on(self.calls.seen)
        self.after.before_step()
        self.ledger.host_memory.measure()

    def _before_forward(self, training: bool = True) -> bool:
        if training:
            self.steps.end_updated()
        is_over = self.after.before_forward(training)
        if self.ledger.clock.step == 0:
            self.ledger.begin_step(1)
        return is_over

    # -- afterwards ---------------------------------------------------------------------------------------------------

    @property
    def unused_checkpointing(self) -> str | None:
        """Where checkpointing was switched on, if it recomputed nothing."""
        return None if self.ledger.clock.recomputes else self._checkpointing

    @property
    def refused(self) -> tuple[Refused, ...]:
        """The requests that the card could not serve."""
        ends, seen = self.steps.ends, self._seen_layers()
        return tuple(
            request._replace(phase=in_step(request.phase, number, ends), layer=seen[layer].path if layer >= 0 else None)
            for number, layer, request in self._refused
        )

    @property
    def last_refused(self) -> int | None:
        """The number of events before the last request that the card could not serve; None: it served all."""
        return self._refused[-1][0] if self._refused else None

    @property
    def assumed(self) -> tuple[Assumed, ...]:
        """The assumptions of the run, with the lines that rely on them."""
        return tuple(Assumed(text, tuple(lines)) for text, lines in self._assumed.items())

    def trace(self, error: BaseException | None = None) -> Trace:
        """The trace of what ran, which is over."""
        trace = self._trace(error)
        self.ledger.close()
        return trace

    def _trace(self, error: BaseException | None) -> Trace:
        ledger, calls, names = self.ledger, self.calls, self._root_names()
        ledger.mark_batches()
        storages = ledger.storages(calls.saved_storages)
        tensors = tuple(
            replace(
                tensor,
                name=_path(name, tensor.name),
                layer=_path(name, tensor.layer),
                tied_to=tensor.tied_to and _path(name, tensor.tied_to),
            )
            for name, root in zip(names, calls.roots, strict=False)
            for tensor in root.tensors
        )
        seen, failure = self._seen_layers(), None
        if error is not None:
            running = seen[ledger.clock.layer] if ledger.clock.layer >= 0 else _NOTHING
            kind = "" if running is _NOTHING else running.type
            failure = Failure(running.path, kind, ledger.last_op or None, (), with_type(error))
        layers = layer_rows(seen, tensors, storages, calls.saved_storages, ledger.multiply_adds)
        convolutions = ledger.workspaces.convolutions
        recorded = ledger.events[: self._seen if self._end is None else self._end]
        events, collectives, phases = self.steps.numbered(recorded, ledger.collectives, ledger.clock.phases)
        return Trace(
            model=self.name,
            scenario="as-given",
            training=True,
            batch_size=None,
            torch=str(torch.__version__),
            inputs=calls.roots[0].inputs if calls.roots else (),
            layers=tuple(replace(layer, root=calls.root_of[i]) for i, layer in enumerate(layers)) or (_NOTHING,),
            tensors=tensors,
            phases=phases,
            storages=storages,
            events=events,
            assumptions=tuple(ledger.evaluator.assumptions),
            notes=(
                *ledger.evaluator.notes,
                *(convolutions.notes if convolutions else ()),
                *nccl_notes(ledger.collectives),
                *filter(None, (self.stack.note(str(torch.__version__)),)),
            ),
            host=ledger.host_memory.use._replace(mapped=sum(self.files.mapped.values())),
            stack=str(self.stack),
            cudnn=convolutions.source if convolutions else None,
            failure=failure,
            roots=tuple(names),
            lines=ledger.lines,
            emptied=tuple(self.memory.emptied),
            deferred=ledger.order.deferred(len(events)),
            world=self.world or World(),
            collectives=collectives,
        )

    def _root_names(self) -> list[str]:
        """Return names that tell apart the root modules that were called; a single one needs no name."""
        return [root.name for root in self.calls.roots] if len(self.calls.roots) > 1 else [""]

    def _seen_layers(self) -> list[ModuleRecord]:
        calls, names = self.calls, self._root_names()
        return [
            replace(record, path=_path(names[calls.root_of[i]], record.path)) for i, record in enumerate(calls.seen)
        ]


_NOTHING = Layer("", "program", 0, True, 0, (), 0, 0, 0, 0, 0, 0, 0)
"""The only layer of a program that calls no module on the GPU."""


def _path(root: str, path: str) -> str:
    return ".".join(filter(None, (root, path)))


def _unless_stopped(show: Callable[[Any], object], args: Any) -> None:
    """A thread in which the program was stopped ends without a word."""
    if not issubclass(args.exc_type, StopProgram):
        show(args)


@contextmanager
def _command_line(path: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    folder = Path.cwd() if module else Path(path).resolve().parent
    with ImportScope(folder).entered(), assigned(sys, "argv", [path, *arguments]):
        yield
