"""Answer a fit: find the largest size that fits for each scenario and GPU, then remedies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

from memsize.analysis.findings.fit import RULES, FitEvidence, answer_in_words
from memsize.analysis.findings.unfinished_runs import interrupted
from memsize.analysis.fit.remedy_trials import RemedyWork
from memsize.analysis.fit.results import likely_size, row_of_search, row_of_size, with_peak
from memsize.analysis.fit.run_cache import MOST_SEQUENCES, NewRuns, RunCache, RunVariant
from memsize.analysis.fit.search import Search
from memsize.analysis.model_setups import is_float32
from memsize.device.allocator_config import AllocatorConfig
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.processes.ctrl_c import found_kept
from memsize.processes.patches import collector_paused
from memsize.processes.workers import Workers
from memsize.records.finding import Finding, join_names
from memsize.records.fit import Budget, Fit, FitRow, FitRun, Remedied, SmallerSize
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.trace import Trace
from memsize.spec.generation import Generation
from memsize.spec.parallel import parse_parallel
from memsize.spec.scenario import COMPILED, Scenario
from memsize.spec.training import Training
from memsize.tracing.run import stored_only
from memsize.units import format_bytes

_RUNS_BELOW: Final = 5
"""Runs that the search for a size may take below one that does not fit."""

RowKey = tuple[str, str]
"""A scenario and a GPU, by their names."""


@dataclass(frozen=True)
class FitRequest:
    """The question of a fit: scenarios, budgets, a training or a generation, and a size (None: find the largest).

    `remedies` says whether to look for remedies (None: if the size does not fit). `default`: the scenarios are the
    usual ones, without `as-given` where it equals fp32. `smallest`: for each scenario, only the smallest budget on
    which the size fits is in question. `cells` are the scenarios and budgets in question, by name (None: all).
    """

    scenarios: Sequence[Scenario]
    budgets: Sequence[Budget]
    training: Training | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    size: int | None = None
    remedies: bool | None = None
    default: bool = False
    smallest: bool = False
    generation: Generation | None = None
    cells: frozenset[RowKey] | None = None

    def pairs(self, scenarios: Iterable[Scenario] | None = None) -> Iterator[tuple[Scenario, Budget]]:
        """Yield the scenarios in question with their budgets; of some `scenarios` only."""
        for scenario, budget in product(self.scenarios if scenarios is None else scenarios, self.budgets):
            if self.cells is None or (scenario.name, budget.name) in self.cells:
                yield scenario, budget

    def variants(self) -> Iterator[tuple[str, RunVariant]]:
        """Yield every variant in question, with the name of its GPU."""
        for scenario, budget in self.pairs():
            yield budget.name, self.variant(scenario, budget)

    def variant(self, scenario: Scenario, budget: Budget) -> RunVariant:
        """Return the variant of a scenario on a budget, without remedies."""
        parallel = parse_parallel(budget.parallel) if budget.parallel else None
        return RunVariant(
            scenario,
            budget.card,
            training=self.training,
            config=self.config,
            parallel=parallel,
            generation=self.generation,
            capacity=budget.allocator,
        )


def _without_equal_scenarios(runs: RunCache, request: FitRequest) -> FitRequest:
    """Leave `as-given` out of the usual scenarios where it equals fp32."""
    if not (request.default and is_float32(runs.model, stored_only(runs.name, runs.model))):
        return request
    return replace(request, scenarios=[scenario for scenario in request.scenarios if scenario.name != "as-given"])


def find_fit(
    runs: RunCache, request: FitRequest, notes: Sequence[str] = (), tell: Callable[[Finding], None] = lambda _: None
) -> Fit:
    """Answer `request`. A scenario that fails is reported in its own row.

    `tell` is called with a finding for each row as soon as the row is complete, in any order.

    Raises `ForwardError`, `ScenarioError` or `InputError` where no scenario can be run.
    """
    request = _without_equal_scenarios(runs, request)
    if request.smallest:
        request = _on_smallest(runs, request)
    partial_rows = _PartialRows(request, runs, tell)

    def so_far() -> Fit | None:
        rows = tuple(partial_rows)
        if all(row.status == "unavailable" for row in rows):
            return None
        return _fit(runs, request, rows, notes=notes, missing=tuple(partial_rows.missing()))

    with (
        found_kept(so_far),
        collector_paused(),
        Workers(work := FitWork(runs, request), partial_rows.counted(runs.progress), partial_rows.add) as workers,
    ):
        runs.progress, work.hand_over = workers.announce, workers.deliver
        rows = _rows(runs, request, workers)
        remedied = _remedied(work, rows, workers)
        return _fit(runs, request, rows, notes=notes, remedied=remedied)


def _fit(
    runs: RunCache,
    request: FitRequest,
    rows: Sequence[FitRow],
    *,
    notes: Sequence[str],
    remedied: Remedied | None = None,
    missing: tuple[str, ...] = (),
) -> Fit:
    budgets, vary, traces = tuple(request.budgets), runs.vary.text, runs.traces(request.variants())
    first_batch = tuple(row for row in rows if row.batch == rows[0].batch)
    fit = Fit(
        model=runs.name,
        inputs=runs.inputs,
        vary=vary,
        budgets=budgets,
        fit_rows=tuple(rows),
        asked=request.size,
        optimizer=request.training.optimizer_name if request.training else "",
        findings=(
            *interrupted(missing),
            *RULES.findings(FitEvidence(first_batch, budgets, vary, remedied, tuple(rows), request.cells is not None)),
        ),
        remedied=remedied,
        notes=tuple(dict.fromkeys((*notes, *_notes(runs, traces, budgets, rows)))),
        traces=traces,
        runs=runs.count,
        generation=request.generation.record if request.generation else {},
        missing=missing,
    )
    return with_peak(fit, request.config)


class _PartialRows:
    """The rows that are available so far. `tell` is called with a finding for each row of a key that is complete."""

    def __init__(self, request: FitRequest, runs: RunCache, tell: Callable[[Finding], None]) -> None:
        self.rows_of: dict[RowKey, Sequence[FitRow]] = {}
        self.complete: set[RowKey] = set()
        self.keys = [(scenario.name, budget.name) for scenario, budget in request.pairs()]
        self._request, self._vary, self._tell = request, runs.vary.text, tell
        self._several = len(request.budgets) > 1

    def add(self, part: tuple[Sequence[FitRow], bool]) -> None:
        """Add the rows of a key so far, and whether they are all. They come again if another process repeats the work
        of one that ended.
        """
        rows, complete = part
        key = rows[0].scenario, rows[0].gpu
        if key in self.complete:
            return
        self.rows_of[key] = rows
        if complete:
            self.complete.add(key)
            for row in rows:
                if row.status != "unavailable":
                    self._tell(answer_in_words(row, self._vary, several=self._several))

    def counted(self, progress: Callable[[str], None]) -> Callable[[str], None]:
        """Wrap `progress` to add the number of the current answer, where there are several."""

        def with_number(text: str) -> None:
            number = 1 + len(self.complete)
            progress(f"{text}; answer {number} of {len(self.keys)}" if 1 < len(self.keys) >= number else text)

        return with_number

    def missing(self) -> Iterator[str]:
        """Yield what the answer lacks."""
        for key in self.keys:
            if key not in self.complete:
                name = " on ".join(key) if self._several else key[0]
                yield f"the rest of {name}" if key in self.rows_of else name
        wanted = self._request.remedies
        if wanted or (wanted is None and _too_large(tuple(self))):
            yield "remedies"

    def __iter__(self) -> Iterator[FitRow]:
        return (row for key in self.keys for row in self.rows_of.get(key, ()))


def _rows(runs: RunCache, request: FitRequest, workers: Workers) -> tuple[FitRow, ...]:
    rows_of: dict[RowKey, list[FitRow]] = {}
    for rows, new_runs in workers.answers([("rows", group) for group in _similar(request.scenarios)]):
        for row in rows:
            rows_of.setdefault((row.scenario, row.gpu), []).append(row)
        runs.adopt(new_runs)
    in_order = tuple(row for scenario, budget in request.pairs() for row in rows_of[scenario.name, budget.name])
    if all(row.status == "unavailable" for row in in_order):
        work = FitWork(runs, request)
        work.rows(request.scenarios)
        if work.failures:
            raise work.failures[0]
    return in_order


def _similar(scenarios: Sequence[Scenario]) -> list[list[Scenario]]:
    """Group scenarios that need about as much memory: the answer of one is a good start for the search of the next.

    The width of a model as given, or once it is quantized, is not known beforehand. Compiling takes long, so that the
    answer without it is always looked for first.
    """
    groups: dict[object, list[Scenario]] = {}
    for scenario in scenarios:
        key: object = scenario.name.partition(COMPILED)[0]
        if scenario.recipe not in ("as-given", "quantized"):
            is_half = (scenario.autocast or scenario.dtype) in ("float16", "bfloat16")
            key = scenario.autocast is not None, is_half, scenario.master_weights
        groups.setdefault(key, []).append(scenario)
    return list(groups.values())


@dataclass(eq=False)
class FitWork(RemedyWork):
    """The pieces of work of a fit, which several processes share.

    `hand_over` is called with the rows of a scenario on a budget as soon as they are known, and whether they are all;
    `failures` are the errors of scenarios.
    """

    request: FitRequest
    hand_over: Callable[[tuple[Sequence[FitRow], bool]], None] = lambda _: None
    failures: list[Exception] = field(default_factory=list)

    def rows(self, scenarios: Sequence[Scenario]) -> tuple[list[FitRow], NewRuns]:
        """Compute the rows of some scenarios, one for each budget; return them with the runs that this took."""
        rows: list[FitRow] = []
        before = self.runs.new_runs()
        for scenario, budget in self.request.pairs(scenarios):
            if self.runs.vary.frontier:
                new_rows = self._frontier(scenario, budget)
            else:
                start = likely_size(rows, scenario.name, budget, budgets=self.request.budgets)
                new_rows = [self._row(self.request.variant(scenario, budget), budget, start)]
            self.hand_over((new_rows, True))
            rows += new_rows
        return rows, self.runs.new_runs(before)

    def _frontier(self, scenario: Scenario, budget: Budget) -> list[FitRow]:
        rows: list[FitRow] = []
        batch, variant = self.runs.model_inputs.batch_size, self.request.variant(scenario, budget)
        while batch <= MOST_SEQUENCES:
            of_batch, size_before = replace(variant, sequences=batch), rows[-1].size if rows else None
            row = replace(self._row(of_batch, budget, size_before and size_before // 2), batch=batch)
            self.runs.drop(of_batch, but=None if rows else row.size)
            if row.size is not None or not rows:
                rows.append(row)
                self.hand_over((tuple(rows), False))
            if row.size is None:
                break
            batch *= 2
        return rows

    def _row(self, variant: RunVariant, budget: Budget, start: int | None) -> FitRow:
        runs, scenario = self.runs, variant.scenario
        row = FitRow(scenario.name, scenario.title, gpu=budget.name, budget=budget.allocator, status="unavailable")
        try:
            if self.request.size is not None or not runs.resizable:
                return row_of_size(runs, variant, row, size=self.request.size or runs.input_size)
            return self._search(variant, row, start)
        except (ScenarioError, ForwardError, InputError) as error:
            self.failures.append(error)
            return replace(row, reason=str(error))

    def _search(self, variant: RunVariant, row: FitRow, start: int | None) -> FitRow:
        runs, linear = self.runs, self.runs.vary.batch
        search = _search_of(runs, variant, runs.most)
        try:
            search.run(start or (runs.input_size if runs.input_size > 1 else None), runs.most_runs)
        except KeyboardInterrupt:
            if search.runs and search.size and variant.sequences is None:
                self.hand_over(([row_of_search(search, row, linear=linear)], False))
            raise
        if search.largest_run is None and variant.sequences is not None and start is not None:
            return replace(row, status="none")  # the end of a frontier, which is not shown
        # Only answers of a single batch are drawn as a curve.
        return row_of_search(search, row, linear=linear, points=variant.sequences is None)


def _remedied(work: FitWork, rows: Sequence[FitRow], workers: Workers) -> Remedied | None:
    """Try remedies for the first row that does not fit, or of several strategies for the one that needs least; without
    such a row for the first, if the user asks for remedies. None if another strategy or number of GPUs is enough.
    """
    runs, request = work.runs, work.request
    short = _too_large(rows)
    if short and request.budgets[0].parallel:
        alike = [row for row in rows if row.scenario == short[0].scenario]
        if not request.remedies and any(row.status == "fits" for row in alike):
            return None
        short = [min((row for row in alike if row in short), key=lambda row: row.peak or row.next_peak or 0)]
    if request.remedies and not short:
        short = [row for row in rows if row.status != "unavailable"]
    if request.remedies is False or not short:
        return None
    row = short[0]
    scenario = next(scenario for scenario in request.scenarios if scenario.name == row.scenario)
    budget = next(budget for budget in request.budgets if budget.name == row.gpu)
    size = request.size or (2 * row.size if row.size else row.next_size or runs.input_size)
    variant = request.variant(scenario, budget)
    remedied = work.remedied(workers, variant, size, budget=budget, splits=runs.vary.batch)
    smaller = _smaller(runs, variant, size) if row.status == "exceeds" and runs.resizable else None
    return replace(remedied, smaller=smaller)


def _too_large(rows: Sequence[FitRow]) -> list[FitRow]:
    """The rows whose size does not fit, or where no size fits under any of them, all that ran."""
    ran = [row for row in rows if row.status != "unavailable"]
    return [row for row in ran if row.status == "exceeds" or all(other.status == "none" for other in ran)]


def _smaller(runs: RunCache, variant: RunVariant, size: int) -> SmallerSize | None:
    """Search for the largest size that fits below one that does not."""
    search = _search_of(runs, variant, size - 1)
    try:
        search.run(None, _RUNS_BELOW)
    except (ForwardError, InputError):
        return None
    return SmallerSize(search.size, search.closed) if search.size else None


def _search_of(runs: RunCache, variant: RunVariant, most: int) -> Search:
    """The search for the largest size of a variant, up to `most`, which begins with the runs that there are."""
    return Search(
        lambda size: runs.run(variant, size),
        variant.capacity,
        runs=runs.runs_of(variant),
        refused=runs.refusals_of(variant),
        most=most,
        powers=not runs.vary.batch,
        least=runs.least,
    )


def _notes(
    runs: RunCache, traces: Mapping[FitRun, Trace], budgets: Sequence[Budget], rows: Sequence[FitRow]
) -> Iterator[str]:
    yield from (note for budget in budgets for note in budget.notes)
    yield from runs.notes
    if not runs.resizable:
        yield (
            "the inputs have no common batch dimension, so only their own batch was tried: to vary it, give --inputs a "
            "function with a parameter batch_size"
        )
    searched = [row for row in rows if row.status not in ("unavailable", "fits", "exceeds")]
    if searched:
        most = max(len(row.looked) for row in searched)
        done = "put together from traced steps" if runs.generates else "run"
        next_size = all(row.status in ("found", "none") for row in searched)
        answers = "each answer and the next size were" if next_size else "each answer was"
        yield f"{answers} {done}: {runs.count} runs in all, at most {most} per answer"
    # The workspace of a convolution is of the order of the largest tensor that one makes, in the first answer.
    answer = next(((row.scenario, row.size) for row in rows if row.size), None)
    if first := next((trace for run, trace in traces.items() if run[:2] == answer), None):
        outputs = (storage.bytes for storage in first.storages if "convolution" in storage.op)
        if workspace := max(outputs, default=0):
            yield (
                f"cuDNN's workspaces are not counted: a convolution may temporarily take up to "
                f"{format_bytes(workspace)} more; --margin leaves room"
            )
    if uneven := tuple(f"{row.name} on {row.gpu}" for row in rows if not row.monotone):
        yield (
            f"memory does not always grow with the size under {join_names(uneven)}: a smaller size than the answer "
            "does not fit; --allocator expandable_segments:True tells whether fragmentation is the cause"
        )
    yield from (note for trace in traces.values() for note in trace.notes)


# -- the smallest of all cards -----------------------------------------------------------------------------------------


def _on_smallest(runs: RunCache, request: FitRequest) -> FitRequest:
    """Return `request` about the smallest of its budgets for each scenario, and for each number of GPUs.

    Without a budget that is large enough it is about the largest.
    """
    ways: dict[str, list[Budget]] = {}
    for budget in sorted(request.budgets, key=lambda budget: budget.allocator):
        ways.setdefault(budget.parallel, []).append(budget)
    cells: set[RowKey] = set()
    starts = {way: next((n for n, b in enumerate(of) if b.card.name == DEFAULT_GPU), 0) for way, of in ways.items()}
    for scenario in request.scenarios:
        for way, budgets in ways.items():
            with suppress(ScenarioError, ForwardError, InputError):  # its row says why
                starts[way] = _smallest(runs, request, scenario, budgets, starts[way])
            cells.add((scenario.name, budgets[starts[way]].name))
    names = {name for _, name in cells}
    chosen = tuple(budget for of in ways.values() for budget in of if budget.name in names)
    return replace(request, budgets=chosen, cells=frozenset(cells))


def _smallest(runs: RunCache, request: FitRequest, scenario: Scenario, budgets: Sequence[Budget], start: int) -> int:
    """Return the position of the smallest budget that is enough; the last one where none is.

    What a run needs hardly depends on the card. So a run on one card says on which it would fit; if that one runs other
    kernels, it is run there too, until the answer stays.
    """
    assert request.size is not None
    allocators = [budget.allocator for budget in budgets]
    position, least = start, 0
    while True:
        needed = runs.run(request.variant(scenario, budgets[position]), request.size).needs()
        # Never back to a card that its own run found too small: two kinds of kernels could go on forever.
        least = least if needed <= allocators[position] else position + 1
        enough = min(max(bisect_left(allocators, needed), least), len(budgets) - 1)
        if enough == position or budgets[enough].runs_as(budgets[position]):
            return enough
        position = enough
