"""A sweep: what each cell of a grid needs, in processes side by side, and kept so that it can go on after a crash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memsize.api.keywords import takes
from memsize.api.opened import Loaded, model_of, with_inputs
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import InputError, MemsizeError, first_line, in_one_line
from memsize.interrupt import Interrupted
from memsize.loading import parse_target, targets_of
from memsize.processes.spread import Died, TimeLimitError, is_late, spread, time_limited
from memsize.records.gpu import DEFAULT_GPU, Card, GpuEstimate
from memsize.records.sweep import ResultsFile, Sweep, SweepRow, phrase_of, results_file, varying
from memsize.spec.file_requests import SweepRequest
from memsize.spec.sweep import Cell, grid_of, read_grid
from memsize.version import VERSION

if TYPE_CHECKING:
    from memsize.analysis.runner import Runner
    from memsize.device.gpu_estimate import Replays
    from memsize.records.trace import Trace


_MOST_TRACES: Final = 18
"""Traces of one task: its model is built once for them, which layers repeat is found once, and they are lost together
when the machine goes down.
"""
_SHARE: Final = 4
"""Tasks for each process at least, so that none waits long for the last."""
_HEAD_START: Final = 5.0
"""Seconds of CPU time in which a process imports PyTorch and transformers, as each beside the first has to."""
_DISTRIBUTIONS: Final = {"hf": "transformers"}


@takes(SweepRequest)
def sweep(request: SweepRequest, *, progress: Callable[[str], None] | None = None) -> Sweep:
    """Report what each cell of a grid of models, scenarios, batch sizes, GPUs … needs, and whether it fits.

    `grid` is a TOML file, or a mapping with its keys: those of a ``[[tool.memsize.target]]``, where ``target``,
    ``train``, ``scenario``, ``mode``, ``stack``, ``allocator``, ``seq_len``, ``batch_size`` and ``gpu`` may be lists,
    ``train`` may be ``"none"`` for inference, and a target may be a pattern such as ``"timm:resnet*"``. ``parallel``
    and ``gpus``, which may be lists too, spread trainings over several GPUs, as those of `memsize.fit` do. Files are
    looked for beside the TOML file, or in the working folder. Results are taken from a file if this memsize and torch
    made them from the same file of code. A cell that fails says so in its row.

    Raises `InputError` for a grid that cannot be meant, `TargetError` for a pattern that matches nothing, and
    `OutputError` where the results cannot be kept.
    """
    if request.scheduler is not None and request.backend == "loky":
        raise InputError("a scheduler belongs to a cluster: choose the backend dask")
    if (request.retry or request.fresh) and request.results is None:
        raise InputError("retry and fresh need a file of results: name it (results)")
    if request.timeout is not None and request.backend == "dask":
        raise InputError("timeout: Dask runs cells in threads, which cannot be interrupted")
    grid = grid_of(request.grid) if isinstance(request.grid, Mapping) else read_grid(Path(request.grid))
    report_progress = progress or (lambda _: None)
    with contextlib.chdir(grid.folder):
        report_progress("looking up targets")
        cells = grid.cells(targets_of, lambda name: card(name).name)
        for settings, stack in {(cell.settings.get("allocator"), cell.stack) for cell in cells}:
            try:
                AllocatorConfig.of(settings, stack.release)
            except InputError as error:
                raise InputError(f"{grid.name}: allocator: {error}") from None
        made_with = {cell.settings["target"]: _made_with(cell) for cell in cells}
    with (
        contextlib.nullcontext()
        if request.results is None
        else results_file(Path(request.results), fresh=request.fresh)
    ) as file:
        rows = _Rows(grid.name, cells, made_with, file=file, retry=request.retry)
        report_progress(f"running {len(rows.missing)} cells")
        try:
            for task, answers in _answers(grid.folder, rows, request):
                rows.add(task, answers)
                report_progress(rows.progress)
        except KeyboardInterrupt:
            raise Interrupted(rows.answer()) from None
    return rows.answer()


class _Rows:
    """The rows of a sweep's cells by the cells' numbers: those that `file` has already, then those that come in.

    `made_with` has, for each target, the versions that the figures depend on.
    """

    def __init__(
        self,
        name: str,
        cells: Sequence[Cell],
        made_with: Mapping[str, Mapping[str, str]],
        file: ResultsFile | None,
        retry: bool,
    ) -> None:
        self._name, self._cells, self._made_with, self._file = name, cells, made_with, file
        self.rows: dict[int, SweepRow] = {}
        for number, cell in enumerate(cells):
            row = file.find(cell.settings, made_with[cell.settings["target"]]) if file else None
            if row is not None and not (retry and row.outcome == "failed"):
                self.rows[number] = row
        self._reused, self._failed = len(self.rows), 0

    @property
    def missing(self) -> dict[int, Cell]:
        return {number: cell for number, cell in enumerate(self._cells) if number not in self.rows}

    @property
    def progress(self) -> str:
        done, most = len(self.rows) - self._reused, len(self._cells) - self._reused
        return f"{done} of {most} cells" + (f", {self._failed} failed" if self._failed else "")

    def add(self, task: _Task, rows: Sequence[SweepRow]) -> None:
        self.rows |= zip(task.numbers[: len(rows)], rows, strict=True)
        if self._file:
            made_with = (self._made_with[cell.settings["target"]] for cell in task.cells[: len(rows)])
            self._file.add(zip(rows, made_with, strict=True))
        self._failed += sum(row.outcome == "failed" for row in rows)

    def answer(self) -> Sweep:
        """The rows in the order of the cells; where some are missing, with a word on how to get them."""
        from memsize.analysis.findings.sweep import RULES
        from memsize.analysis.findings.unfinished_runs import sweep_interrupted

        rows = tuple(self.rows[number] for number in sorted(self.rows))
        varied = varying([cell.settings for cell in self._cells])
        missing = tuple(phrase_of(cell.settings, varied) for cell in self.missing.values())
        ended = sweep_interrupted(missing, len(self._cells), saved=self._file is not None)
        return Sweep(self._name, rows, (*ended, *RULES.findings(rows)), reused=self._reused, missing=missing)


def _made_with(cell: Cell) -> dict[str, str]:
    """Return what a cell's figures come from: when it changes, the figures are those of another cell."""
    return {"memsize": VERSION, "torch": version("torch"), "model": _code(cell.settings["target"])} | (
        {"inputs": _code(cell.settings["inputs"])} if "inputs" in cell.settings else {}
    )


def _code(target: str) -> str:
    """The state of a target's own file, or the release of its library; what a file imports is not followed."""
    parsed = parse_target(target)
    if parsed.library is None:
        file = parsed.file
    else:
        named = Path(str(parsed.name))
        file = named / "config.json" if named.is_dir() else named
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file and file.is_file() else ""
    library = ""
    if parsed.library:
        with contextlib.suppress(PackageNotFoundError):
            library = version(_DISTRIBUTIONS.get(parsed.library, parsed.library))
    return " ".join(filter(None, (library, digest)))


# -- tasks -------------------------------------------------------------------------------------------------------------


def _answers(folder: Path, rows: _Rows, request: SweepRequest) -> Iterator[tuple[_Task, list[SweepRow]]]:
    """The rows of the missing cells as they come. Unless the user chose a number of processes, one works alone at
    first, on the cells of one model: that may be all there is.
    """
    if request.jobs is None and request.backend == "loky":
        yield from _outcomes(_tasks(folder, rows.missing, request, head_start=_HEAD_START)[:1], request)
    yield from _outcomes(_tasks(folder, rows.missing, request), request)


def _tasks(
    folder: Path, cells: Mapping[int, Cell], request: SweepRequest, head_start: float | None = None
) -> list[_Task]:
    """Cells that share a trace together, and with them others of the same model, as it is built for its own step, on
    GPUs that run the same kernels: each kind of kernels needs a run of all layers.
    """
    models: dict[str, dict[str, list[int]]] = {}
    for number, cell in cells.items():
        own = cell.training is not None and cell.training.is_own
        model = repr((cell.settings["target"], cell.settings.get("arguments"), cell.subject.trained_parts, own))
        traces = models.setdefault(model, {})
        traces.setdefault(repr(_trace_of(cell)), []).append(number)
    processes, count = request.jobs or os.cpu_count() or 1, sum(map(len, models.values()))
    most = _MOST_TRACES if processes == 1 else min(_MOST_TRACES, max(1, count // (_SHARE * processes)))
    most = most if head_start is None else max(count, 1)
    tasks = []
    for traces in models.values():
        groups = sorted(traces.values(), key=lambda group: _card_of(cells[group[0]]).kernels)
        for start in range(0, len(groups), most):
            numbers = tuple(number for group in groups[start : start + most] for number in group)
            tasks.append(
                _Task(folder, tuple(cells[number] for number in numbers), numbers, request.timeout, head_start)
            )
    return tasks


def _outcomes(tasks: list[_Task], request: SweepRequest) -> Iterator[tuple[_Task, list[SweepRow]]]:
    """The rows of each task as they come. Where a process died of one with several cells, each is run by itself."""
    while tasks:
        again: list[_Task] = []
        for task, rows in spread(_run_cells, tasks, request.jobs, backend=request.backend, scheduler=request.scheduler):
            if not isinstance(rows, Died):
                yield task, rows
            elif len(task.cells) > 1:
                for cell, number in zip(task.cells, task.numbers, strict=True):
                    again.append(replace(task, cells=(cell,), numbers=(number,)))
            else:
                yield task, [_failed_row(task.cells[0], rows.reason)]
        tasks = again


# -- the cells of one model, which is built once, as is each trace that they share ------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """Cells of one model, by their `numbers`. After `head_start` seconds of CPU time (None: never) none is begun."""

    folder: Path
    cells: tuple[Cell, ...]
    numbers: tuple[int, ...]
    timeout: float | None
    head_start: float | None = None


def _trace_of(cell: Cell) -> dict[str, object]:
    """The settings that decide a run: the card itself and the allocator's settings come after it."""
    after = ("gpu", "allocator")
    return {key: value for key, value in cell.settings.items() if key not in after} | {"on": _card_of(cell).kernels}


def _card_of(cell: Cell) -> Card:
    return card(cell.settings.get("gpu", DEFAULT_GPU))


def _run_cells(task: _Task) -> list[SweepRow]:
    """The rows of a task's cells, in their order, at least of the first: its model is built once, and each trace is run
    once.
    """
    import memsize.analysis.runner  # noqa: F401 - PyTorch is imported before the time counts

    rows: list[SweepRow] = []
    first, reason = task.cells[0], ""
    own = first.training is not None and first.training.is_own
    try:
        with (
            contextlib.chdir(task.folder),
            time_limited(task.timeout) as restart,
            model_of(first.subject, gpu=_card_of(first).name, own=own) as loaded,
        ):
            shared, begun = _Shared(loaded), time.process_time()
            for cell in task.cells:
                if rows and task.head_start is not None and time.process_time() - begun > task.head_start:
                    return rows
                restart()
                rows.append(shared.row(cell, task.timeout))
    except (Exception, TimeLimitError) as error:
        reason = _reason(error, task.timeout)
    return rows + [_failed_row(cell, reason) for cell in task.cells[len(rows) :]]


class _Shared:
    """A model that is built, with the inputs and the traces that its cells share."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._runners: dict[str, Runner] = {}
        self._latest: tuple[str, Runner, tuple[str, ...]] | None = None
        self._last: tuple[str, tuple[Trace, tuple[str, ...]] | MemsizeError] | None = None
        self._replays: dict[AllocatorConfig, Replays] = {}
        """Those of the last trace."""

    def row(self, cell: Cell, timeout: float | None) -> SweepRow:
        begun = time.perf_counter()
        try:
            trace, notes = self._trace(cell)
            peak = self._peak(cell, trace)
            return _row(cell, trace, peak, notes=notes, seconds=time.perf_counter() - begun)
        except (Exception, TimeLimitError) as error:
            return _failed_row(cell, _reason(error, timeout), time.perf_counter() - begun)

    def _peak(self, cell: Cell, trace: Trace) -> GpuEstimate:
        from memsize.device.gpu_estimate import Replays, estimate_gpu

        config = AllocatorConfig.of(cell.settings.get("allocator"), cell.stack.release)
        replays = self._replays.setdefault(config, Replays(config))
        return estimate_gpu(trace, _card_of(cell), replays=replays)

    def _trace(self, cell: Cell) -> tuple[Trace, tuple[str, ...]]:
        from memsize.spec.scenario import scenario_named
        from memsize.workloads.parallel import steps_on

        key = repr(_trace_of(cell))
        if self._last is None or self._last[0] != key:
            self._replays.clear()
            try:
                runner, notes = self._runner(cell)
                workload = steps_on(cell.training, cell.parallel, _card_of(cell))
                trace = runner.run(workload, scenario_named(cell.scenario))
                self._last = key, (trace, tuple(dict.fromkeys((*notes, *trace.notes, *trace.assumptions))))
            except MemsizeError as error:
                self._last = key, error
        outcome = self._last[1]
        if isinstance(outcome, MemsizeError):
            raise outcome
        return outcome

    def _runner(self, cell: Cell) -> tuple[Runner, tuple[str, ...]]:
        from memsize.analysis.model_setups import plans_of
        from memsize.analysis.runner import Runner

        where, subject, execute = _card_of(cell), cell.subject, cell.settings.get("execute", False)
        kind = repr((subject.mode, subject.whole, where.kernels, cell.stack, execute))
        key = repr((kind, subject.specs, subject.source, subject.batch_size, subject.seq_len))
        if self._latest is None or self._latest[0] != key:
            model = with_inputs(subject, self._loaded)
            if kind not in self._runners:
                self._runners[kind] = Runner(
                    *model.run,
                    gpu=where,
                    execute=execute,
                    plans=plans_of(where, cell.stack),
                    stack=cell.stack,
                    whole=subject.whole,
                )
            inputs = model.run[2]  # runs with others show as well which layers repeat
            self._latest = key, self._runners[kind].with_inputs(inputs, inputs.batch_size), model.notes
        return self._latest[1:]


def _row(cell: Cell, trace: Trace, peak: GpuEstimate, *, notes: tuple[str, ...], seconds: float) -> SweepRow:
    from memsize.records.aggregates import totals

    where, stored, short = _card_of(cell), totals(trace), peak.shortage
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
        gpus=cell.parallel.size if cell.parallel else 1,
    )


def _failed_row(cell: Cell, reason: str, seconds: float = 0.0) -> SweepRow:
    of_gpu, spent, gpus = _card_of(cell).bytes, round(seconds, 2), cell.parallel.size if cell.parallel else 1
    return SweepRow(cell.settings, "failed", first_line(reason), gpu_bytes=of_gpu, seconds=spent, gpus=gpus)


def _reason(error: BaseException, timeout: float | None) -> str:
    if is_late(error):
        return f"it took more than {timeout:g} s"
    return str(error) if isinstance(error, MemsizeError) else f"this is a bug in memsize: {in_one_line(error)}"
