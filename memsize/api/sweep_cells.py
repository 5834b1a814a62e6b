"""The cells of a sweep that one process runs: of one model, which is built once, as is each trace that they share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memsize.api.opened import Loaded, model_of, with_inputs
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import MemsizeError, first_line, in_one_line
from memsize.processes.spread import TimeLimitError, is_late, time_limited
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.records.sweep import SweepRow
from memsize.spec.sweep import Cell

if TYPE_CHECKING:
    from memsize.analysis.runner import Runner
    from memsize.records.trace import Trace


@dataclass(frozen=True, slots=True)
class Task:
    """Cells of one model, with their numbers in the sweep."""

    folder: Path
    cells: tuple[Cell, ...]
    numbers: tuple[int, ...]
    timeout: float | None

    def split(self) -> Iterator[Task]:
        """A task for each of its cells."""
        for cell, number in zip(self.cells, self.numbers, strict=True):
            yield Task(self.folder, (cell,), (number,), self.timeout)


def trace_of(cell: Cell) -> dict[str, object]:
    """The settings that decide a run: the card itself and the allocator's settings come after it."""
    after = ("gpu", "allocator")
    return {key: value for key, value in cell.settings.items() if key not in after} | {"on": card_of(cell).kernels}


def card_of(cell: Cell) -> Card:
    """The GPU that a cell asks about."""
    return card(cell.settings.get("gpu", DEFAULT_GPU))


def run_cells(task: Task) -> list[SweepRow]:
    """The rows of a task's cells, in their order: its model is built once, and each trace is run once."""
    import memsize.analysis.runner  # noqa: F401 - PyTorch is imported before the time counts

    rows: list[SweepRow] = []
    first, reason = task.cells[0], ""
    own = first.training is not None and first.training.is_own
    try:
        with (
            contextlib.chdir(task.folder),
            time_limited(task.timeout) as restart,
            model_of(first.subject, gpu=card_of(first).name, own=own) as loaded,
        ):
            shared = _Shared(loaded)
            for cell in task.cells:
                restart()
                rows.append(shared.row(cell, task.timeout))
    except (Exception, TimeLimitError) as error:
        reason = _reason(error, task.timeout)
    return rows + [failed(cell, reason) for cell in task.cells[len(rows) :]]


_Traced = tuple["Trace", tuple[str, ...]]
"""A trace, and what is to be said of it."""


class _Shared:
    """A model that is built, with the inputs and the traces that its cells share."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._runners: dict[str, tuple[Runner, tuple[str, ...]]] = {}
        self._last: tuple[str, _Traced | MemsizeError] | None = None

    def row(self, cell: Cell, timeout: float | None) -> SweepRow:
        """The row of a cell, whatever comes of it."""
        begun = time.perf_counter()
        try:
            trace, notes = self._trace(cell)
            return _row(cell, trace, notes, time.perf_counter() - begun)
        except (Exception, TimeLimitError) as error:
            return failed(cell, _reason(error, timeout), time.perf_counter() - begun)

    def _trace(self, cell: Cell) -> _Traced:
        """The trace of a cell, which the one before may have had; raises again what it raised."""
        key = repr(trace_of(cell))
        if self._last is None or self._last[0] != key:
            try:
                self._last = key, self._run(cell)
            except MemsizeError as error:
                self._last = key, error
        outcome = self._last[1]
        if isinstance(outcome, MemsizeError):
            raise outcome
        return outcome

    def _run(self, cell: Cell) -> _Traced:
        from memsize.spec.scenario import scenario_named
        from memsize.workloads.parallel import steps_on

        runner, notes = self._runner(cell)
        trace = runner.run(steps_on(cell.training, cell.parallel, card_of(cell)), scenario_named(cell.scenario))
        return trace, tuple(dict.fromkeys((*notes, *trace.notes, *trace.assumptions)))

    def _runner(self, cell: Cell) -> tuple[Runner, tuple[str, ...]]:
        """Return what runs a cell's input on its kind of card, under any scenario."""
        from memsize.analysis.runner import Runner, plans_of

        where, subject, execute = card_of(cell), cell.subject, cell.settings.get("execute", False)
        key = repr((subject.specs, subject.source, subject.batch_size, subject.seq_len, subject.mode))
        key += repr((where.kernels, cell.stack, execute))
        if key not in self._runners:
            model = with_inputs(subject, self._loaded)
            runner = Runner(*model.run, gpu=where, execute=execute, plans=plans_of(where), stack=cell.stack)
            self._runners = {key: (runner, model.notes)}
        return self._runners[key]


def _row(cell: Cell, trace: Trace, notes: tuple[str, ...], seconds: float) -> SweepRow:
    from memsize.device.gpu_estimate import estimate_gpu
    from memsize.records.aggregates import totals

    where = card_of(cell)
    config = AllocatorConfig.of(cell.settings.get("allocator"), cell.stack.release)
    peak, stored = estimate_gpu(trace, where, config=config), totals(trace)
    short = peak.shortage
    return SweepRow(
        settings=cell.settings,
        outcome="fits" if short is None else "exceeds" if short.certain else "unsure",
        parameters=stored.parameters,
        stored=stored.stored,
        requested=peak.requested,
        allocated=peak.allocated,
        reserved=peak.reserved,
        device=peak.device,
        gpu_bytes=where.bytes,
        phase=peak.peak_phase,
        layer=peak.peak_layer,
        roles=peak.roles,
        notes=notes,
        seconds=round(seconds, 2),
        gpus=_gpus(cell),
    )


def failed(cell: Cell, reason: str, seconds: float = 0.0) -> SweepRow:
    """The row of a cell that has no figures."""
    of_gpu, spent = card_of(cell).bytes, round(seconds, 2)
    return SweepRow(cell.settings, "failed", first_line(reason), gpu_bytes=of_gpu, seconds=spent, gpus=_gpus(cell))


def _gpus(cell: Cell) -> int:
    return cell.parallel.size if cell.parallel else 1


def _reason(error: BaseException, timeout: float | None) -> str:
    if is_late(error):
        return f"it took more than {timeout:g} s"
    return str(error) if isinstance(error, MemsizeError) else f"this is a bug in memsize: {in_one_line(error)}"
