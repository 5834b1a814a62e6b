"""A program on a virtual GPU, from its command line to a `ProgramRun`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from memsize.analysis.findings.program import RULES
from memsize.analysis.runner import plans_of, workspaces
from memsize.device.config import AllocatorConfig
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import InputError
from memsize.internals.isolation import isolated
from memsize.records.aggregates import alive, live_bytes, split_phase
from memsize.records.gpu import Card
from memsize.records.program import LiveTensor, ProgramRun, Survivors
from memsize.records.trace import Trace
from memsize.virtual.files import Files
from memsize.workloads.program import Program, StopProgram

LARGEST: Final = 15
"""How many of the storages alive at the peak are listed."""
_OWN: Final = ("parameter", "buffer", "optimizer state", "gradient", "workspace", "input")
"""Roles of what may stay from step to step."""


def run_program(
    path: str,
    arguments: Sequence[str],
    card: Card,
    config: AllocatorConfig,
    *,
    steps: int,
    module: bool,
    allow_writes: bool = False,
) -> tuple[ProgramRun, BaseException | None]:
    """Run a script (or a module) with its own arguments; the error that it ended with, if any, comes with the run."""
    program = Program(path, card, workspaces(card, plans_of(card)), config, steps, Files(allow_writes))
    if not module and not Path(path).is_file():
        raise InputError(f"no such script: {path}")
    with isolated():
        error = program.run(path, arguments, module)
    return program_run(program, " ".join((path, *arguments)), error), error


class VirtualGpu:
    """A region with a virtual GPU, for as long as it is open, and what it showed once it is over."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._run: ProgramRun | None = None

    @property
    def run(self) -> ProgramRun:
        """What ran in the region; raises `InputError` while it is open."""
        if self._run is None:
            raise InputError("the virtual GPU is still in use: ask after the with block")
        return self._run

    @property
    def trace(self) -> Trace:
        """Every storage of the region."""
        return self.run.trace


@contextmanager
def virtual_gpu(card: Card, config: AllocatorConfig, *, steps: int, allow_writes: bool) -> Iterator[VirtualGpu]:
    """Let the block have a virtual GPU; it ends after `steps` optimizer steps (0: at its own end)."""
    program = Program("this program", card, workspaces(card, plans_of(card)), config, steps, Files(allow_writes))
    region = VirtualGpu(program)
    error: BaseException | None = None
    try:
        with program.open():
            yield region
    except StopProgram:
        pass
    except BaseException as failed:
        error = failed
        raise
    finally:
        region._run = program_run(program, program.name, error)


def program_run(program: Program, command: str, error: BaseException | None) -> ProgramRun:
    """The record of what `program` showed."""
    trace = program.trace(error)
    peak = estimate_gpu(trace, program.card, config=program.config)
    found = ProgramRun(
        program=command,
        trace=trace,
        card=program.card,
        capacity=program.memory.total - program.memory.outside,
        peak=peak,
        steps=program.done,
        stopped=program.stopped,
        tensors=_largest(trace, program.lines),
        refused=tuple(program.refused),
        assumed=tuple(program.assumed),
        survivors=_survivors(trace, program.lines),
        kept_gradients=_kept_gradients(trace),
        unwritten=program.files.remarks,
        failure=None if trace.failure is None else trace.failure.reason,
    )
    return replace(found, findings=RULES.findings(found))


def _largest(trace: Trace, lines: dict[int, str]) -> tuple[LiveTensor, ...]:
    """What is alive at the peak of requested bytes, the largest first."""
    levels = live_bytes(trace.events)
    if not levels:
        return ()
    live = alive(trace, max(range(len(levels)), key=levels.__getitem__))
    born = {event.storage: event.phase for event in trace.events if event.delta > 0}
    largest = sorted(live, key=lambda index: (-live[index], index))[:LARGEST]
    return tuple(_tensor(trace, index, live[index], trace.phases[born[index]], lines.get(index)) for index in largest)


def _tensor(trace: Trace, index: int, size: int, phase: str, line: str | None) -> LiveTensor:
    storage = trace.storages[index]
    layer = trace.layers[storage.layer].path if storage.layer >= 0 else None
    return LiveTensor(size, storage.role, storage.dtype, storage.shape, layer, storage.op, phase, line or None)


def _survivors(trace: Trace, lines: dict[int, str]) -> tuple[Survivors, ...]:
    """Of each step, what is alive at the end and has no reason to be."""
    left = alive(trace, len(trace.events) - 1) if trace.events else {}
    born = {event.storage: split_phase(trace.phases[event.phase])[1] for event in trace.events if event.delta > 0}
    by_step: dict[int, Counter[str]] = defaultdict(Counter)
    for index, size in left.items():
        if trace.storages[index].role not in _OWN and born[index]:
            by_step[born[index]][lines.get(index, "")] += size
    return tuple(
        Survivors(step, sum(made.values()), made.most_common(1)[0][0] or None) for step, made in sorted(by_step.items())
    )


def _kept_gradients(trace: Trace) -> int:
    """Bytes of gradients that are alive at the first event of a forward after the first step."""
    for place, event in enumerate(trace.events):
        name, step = split_phase(trace.phases[event.phase])
        if name == "forward" and step > 1:
            live = alive(trace, place)
            return sum(size for index, size in live.items() if trace.storages[index].role == "gradient")
    return 0
