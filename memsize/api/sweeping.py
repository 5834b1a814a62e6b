"""A sweep: what each cell of a grid needs, in processes side by side, and kept so that it can go on after a crash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memsize.api.opened import Loaded, model_of, with_inputs
from memsize.device.cards import card
from memsize.device.config import AllocatorConfig
from memsize.errors import InputError, MemsizeError, first_line, in_one_line
from memsize.internals.spread import BACKENDS, Backend, Died, TimeLimitError, is_late, spread, time_limited
from memsize.interrupt import Interrupted
from memsize.loading.patterns import targets_of
from memsize.loading.target import parse_target
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.records.results_file import ResultsFile, results_file
from memsize.records.sweep import Sweep, SweepRow, phrase_of, varying
from memsize.spec.sweep import Cell, Grid, grid_of, read_grid
from memsize.version import VERSION

if TYPE_CHECKING:
    from memsize.analysis.runner import Runner
    from memsize.records.trace import Trace

_MOST_TRACES: Final = 8
"""Traces of one task: its model is built once for them, and they are lost together when the machine goes down."""
_SHARE: Final = 4
"""Tasks for each process at least, so that none waits long for the last."""
_DISTRIBUTIONS: Final = {"hf": "transformers"}


def sweep(
    grid: str | os.PathLike[str] | Mapping[str, Any],
    *,
    results: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    backend: Backend = "loky",
    scheduler: str | None = None,
    timeout: float | None = None,
    retry: bool = False,
    fresh: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """What each cell of a grid of models, scenarios, batch sizes, GPUs … needs, and whether it fits.

    `grid` is a TOML file, or a mapping with its keys: those of a ``[[tool.memsize.target]]``, where ``target``,
    ``train``, ``scenario``, ``mode``, ``stack``, ``allocator``, ``seq_len``, ``batch_size`` and ``gpu`` may be lists,
    ``train`` may be ``"none"`` for inference, and a target may be a pattern such as ``"timm:resnet*"``. ``parallel``
    and ``gpus``, which may be lists too, spread trainings over several GPUs, as those of `memsize.fit` do. Files are
    looked for beside the TOML file, or in the working folder.

    `results` is a file to which each cell is added when it is done, and from which a sweep goes on: cells are taken
    from there if they were made by this memsize and torch from the same file of code; with `retry` those that failed
    are run again, with `fresh` all. `jobs` processes run (None: one per core; 1: this process alone). `backend` is
    joblib's: ``"loky"`` for this machine, ``"dask"`` or ``"ray"`` for the cluster at `scheduler`. A cell that takes
    longer than `timeout` seconds fails. One that fails says so in its row. `progress` is called with what is being
    done.

    Raises `InputError` for a grid that cannot be meant, `TargetError` for a pattern that matches nothing, and
    `OutputError` where the results cannot be kept.
    """
    if backend not in BACKENDS:
        raise InputError(f"no backend {backend!r}: choose from {', '.join(BACKENDS)}")
    if scheduler is not None and backend == "loky":
        raise InputError("a scheduler is that of a cluster: choose the backend dask or ray")
    if timeout is not None and backend == "dask":
        raise InputError("timeout: Dask runs cells in threads, which cannot be interrupted; choose loky or ray")
    asked, say = _grid(grid), progress or (lambda _: None)
    with contextlib.chdir(asked.folder):
        say("looking up targets")
        cells = asked.cells(targets_of, lambda name: card(name).name)
        _check_allocators(asked, cells)
        made = {cell.settings["target"]: _made_with(cell) for cell in cells}
    kept: contextlib.AbstractContextManager[ResultsFile | None] = contextlib.nullcontext()
    if results is not None:
        kept = results_file(Path(results), fresh=fresh)
    found: dict[int, SweepRow] = {}
    with kept as file:
        for place, cell in enumerate(cells):
            row = file.find(cell.settings, made[cell.settings["target"]]) if file else None
            if row is not None and not (retry and row.outcome == "failed"):
                found[place] = row
        reused = len(found)
        left, failed = len(cells) - reused, 0
        say(f"running {left} cells")
        tasks = _tasks(asked.folder, {n: cell for n, cell in enumerate(cells) if n not in found}, jobs, timeout)
        try:
            for task, rows in _outcomes(tasks, jobs, backend, scheduler):
                found |= zip(task.places, rows, strict=True)
                if file:
                    file.add((row, made[row.settings["target"]]) for row in rows)
                failed += sum(row.outcome == "failed" for row in rows)
                say(f"{len(found) - reused} of {left} cells" + (f", {failed} failed" if failed else ""))
        except KeyboardInterrupt:
            if not found:
                raise
            hint = " The same command goes on with what is missing." if file else ""
            raise Interrupted(_answer(asked.name, cells, found, reused, hint)) from None
    return _answer(asked.name, cells, found, reused)


def _answer(name: str, cells: Sequence[Cell], found: Mapping[int, SweepRow], reused: int, hint: str = "") -> Sweep:
    """The rows that were found, in the order of the cells; `hint` says how to get those that were not."""
    from memsize.analysis.findings.interruption import interrupted
    from memsize.analysis.findings.sweep import RULES

    rows = tuple(found[place] for place in range(len(cells)) if place in found)
    settings = [cell.settings for cell in cells]
    varied = varying(settings)
    missing = tuple(phrase_of(each, varied) for place, each in enumerate(settings) if place not in found)
    return Sweep(name, rows, (*interrupted(missing, hint), *RULES.findings(rows)), reused, missing)


def _grid(grid: str | os.PathLike[str] | Mapping[str, Any]) -> Grid:
    return grid_of(grid) if isinstance(grid, Mapping) else read_grid(Path(grid))


def _check_allocators(grid: Grid, cells: Sequence[Cell]) -> None:
    for settings, stack in {(cell.settings.get("allocator"), cell.stack) for cell in cells}:
        try:
            AllocatorConfig.of(settings, stack.release)
        except InputError as error:
            raise InputError(f"{grid.name}: allocator: {error}") from None


def _made_with(cell: Cell) -> dict[str, str]:
    """What a cell's figures come from: they are those of another cell when it has changed."""
    return {"memsize": VERSION, "torch": version("torch"), "model": _code(cell.settings["target"])} | (
        {"inputs": _code(cell.settings["inputs"])} if "inputs" in cell.settings else {}
    )


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _code(target: str) -> str:
    """The state of a target's own file, or the release of its library; what a file imports is not followed."""
    parsed = parse_target(target)
    if parsed.library is None:
        file = parsed.file
    else:
        named = Path(str(parsed.name))
        file = named / "config.json" if named.is_dir() else named
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file and file.is_file() else ""
    library = _version(_DISTRIBUTIONS.get(parsed.library, parsed.library)) if parsed.library else ""
    return " ".join(filter(None, (library, digest)))


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """Cells of one model, with their places in the sweep."""

    folder: Path
    cells: tuple[Cell, ...]
    places: tuple[int, ...]
    timeout: float | None

    def each(self) -> Iterator[_Task]:
        """A task for each of its cells."""
        for cell, place in zip(self.cells, self.places, strict=True):
            yield _Task(self.folder, (cell,), (place,), self.timeout)


def _tasks(folder: Path, cells: Mapping[int, Cell], jobs: int | None, timeout: float | None) -> list[_Task]:
    """Cells that share a trace together, and with them others of the same model, as it is built for its own step."""
    models: dict[str, dict[str, list[int]]] = {}
    for place, cell in cells.items():
        traces = models.setdefault(repr(_model_of(cell)), {})
        traces.setdefault(repr(_trace_of(cell)), []).append(place)
    processes = jobs or os.cpu_count() or 1
    fair = sum(map(len, models.values())) // (_SHARE * processes)
    most = _MOST_TRACES if processes == 1 else min(_MOST_TRACES, max(1, fair))
    tasks = []
    for traces in models.values():
        groups = list(traces.values())
        for start in range(0, len(groups), most):
            places = tuple(place for group in groups[start : start + most] for place in group)
            tasks.append(_Task(folder, tuple(cells[place] for place in places), places, timeout))
    return tasks


def _model_of(cell: Cell) -> tuple[object, ...]:
    own = cell.training is not None and cell.training.is_own
    return cell.settings["target"], cell.settings.get("arguments"), own


def _trace_of(cell: Cell) -> dict[str, object]:
    """What decides a run: the card itself and the allocator's settings come after it."""
    after = ("gpu", "allocator")
    return {key: value for key, value in cell.settings.items() if key not in after} | {"on": _card(cell).kernels}


def _card(cell: Cell) -> Card:
    return card(cell.settings.get("gpu", DEFAULT_GPU))


def _outcomes(
    tasks: list[_Task], jobs: int | None, backend: Backend, scheduler: str | None
) -> Iterator[tuple[_Task, list[SweepRow]]]:
    """The rows of each task as they come. Where a process died of one with several cells, each is run by itself."""
    while tasks:
        again: list[_Task] = []
        for task, rows in spread(run_cells, tasks, jobs, backend, scheduler):
            if not isinstance(rows, Died):
                yield task, rows
            elif len(task.cells) > 1:
                again += task.each()
            else:
                yield task, [_failed(task.cells[0], rows.reason)]
        tasks = again


# -- in a process that works -------------------------------------------------------------------------------------------


def run_cells(task: _Task) -> list[SweepRow]:
    """The rows of a task's cells, in their order: its model is built once, and each trace is run once."""
    import memsize.analysis.runner  # noqa: F401 - PyTorch is imported before the time counts

    rows: list[SweepRow] = []
    first, reason = task.cells[0], ""
    own = first.training is not None and first.training.is_own
    try:
        with (
            contextlib.chdir(task.folder),
            time_limited(task.timeout) as restart,
            model_of(first.subject, gpu=_card(first).name, own=own) as loaded,
        ):
            shared = _Shared(loaded)
            for cell in task.cells:
                restart()
                rows.append(shared.row(cell, task.timeout))
    except (Exception, TimeLimitError) as error:
        reason = _reason(error, task.timeout)
    return rows + [_failed(cell, reason) for cell in task.cells[len(rows) :]]


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
            return _failed(cell, _reason(error, timeout), time.perf_counter() - begun)

    def _trace(self, cell: Cell) -> _Traced:
        """The trace of a cell, which the one before may have had; raises again what it raised."""
        key = repr(_trace_of(cell))
        if self._last is None or self._last[0] != key:
            try:
                self._last = key, self._run(cell)
            except MemsizeError as error:
                self._last = key, error
        found = self._last[1]
        if isinstance(found, MemsizeError):
            raise found
        return found

    def _run(self, cell: Cell) -> _Traced:
        from memsize.spec.scenario import scenario_named
        from memsize.workloads.ranks import steps_on

        runner, notes = self._runner(cell)
        trace = runner.run(steps_on(cell.training, cell.parallel, _card(cell)), scenario_named(cell.scenario))
        return trace, tuple(dict.fromkeys((*notes, *trace.notes, *trace.assumptions)))

    def _runner(self, cell: Cell) -> tuple[Runner, tuple[str, ...]]:
        """What runs a cell's input on its kind of card, under any scenario."""
        from memsize.analysis.runner import Runner, plans_of

        where, subject, execute = _card(cell), cell.subject, cell.settings.get("execute", False)
        key = repr((subject.specs, subject.source, subject.batch_size, subject.seq_len, subject.mode))
        key += repr((where.kernels, cell.stack, execute))
        if key not in self._runners:
            found = with_inputs(subject, self._loaded)
            runner = Runner(*found.run, gpu=where, execute=execute, plans=plans_of(where), stack=cell.stack)
            self._runners = {key: (runner, found.notes)}
        return self._runners[key]


def _row(cell: Cell, trace: Trace, notes: tuple[str, ...], seconds: float) -> SweepRow:
    from memsize.device.gpu_estimate import estimate_gpu
    from memsize.records.aggregates import totals

    where = _card(cell)
    config = AllocatorConfig.of(cell.settings.get("allocator"), cell.stack.release)
    peak, held = estimate_gpu(trace, where, config=config), totals(trace)
    short = peak.shortage
    return SweepRow(
        settings=cell.settings,
        outcome="fits" if short is None else "exceeds" if short.certain else "unsure",
        parameters=held.parameters,
        stored=held.stored,
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


def _failed(cell: Cell, reason: str, seconds: float = 0.0) -> SweepRow:
    of_gpu, spent = _card(cell).bytes, round(seconds, 2)
    return SweepRow(cell.settings, "failed", first_line(reason), gpu_bytes=of_gpu, seconds=spent, gpus=_gpus(cell))


def _gpus(cell: Cell) -> int:
    return cell.parallel.size if cell.parallel else 1


def _reason(error: BaseException, timeout: float | None) -> str:
    if is_late(error):
        return f"it took more than {timeout:g} s"
    return str(error) if isinstance(error, MemsizeError) else f"this is a bug in memsize: {in_one_line(error)}"
