"""What fits: the runs that are needed, what they showed, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import NamedTuple

from memsize.analysis.findings.fit import RULES, FitEvidence, answer_in_words
from memsize.analysis.findings.interruption import interrupted
from memsize.analysis.fit.crossovers import crossings
from memsize.analysis.fit.generations import MOST_SEQUENCES
from memsize.analysis.fit.remedies import Tries
from memsize.analysis.fit.rows import asked_row, growing_row, likely_size
from memsize.analysis.fit.run_cache import NewRuns, RunCache, RunVariant
from memsize.analysis.fit.search import Search
from memsize.analysis.runner import is_float32
from memsize.device.allocator_config import AllocatorConfig
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.processes.ctrl_c import found_kept
from memsize.processes.workers import Workers
from memsize.records.finding import Finding, join_names
from memsize.records.fit import Budget, Crossing, Fit, FitRow, FitRun, Remedied
from memsize.records.trace import Trace
from memsize.spec.generation import Generation
from memsize.spec.parallel import parse_parallel
from memsize.spec.scenario import Scenario
from memsize.spec.training import Training
from memsize.torch_internals.isolation import collector_paused
from memsize.tracing.run import stored_only
from memsize.units import format_bytes


@dataclass(frozen=True)
class FitRequest:
    """What is asked: scenarios, budgets, how the model is trained or what it generates, and a size (None: find the
    largest).

    `remedies` says whether to look for optimizations (None: where the size that was asked about does not fit),
    `crossovers` whether to look for the sizes from which on something changes. `default` says that the scenarios are
    the usual ones: `as-given` is then left out where it is the same as fp32.
    """

    scenarios: Sequence[Scenario]
    budgets: Sequence[Budget]
    training: Training | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    asked: int | None = None
    remedies: bool | None = None
    crossovers: bool = False
    default: bool = False
    generation: Generation | None = None

    def variants(self) -> Iterator[tuple[str, RunVariant]]:
        """Every variant that is asked about, with the name of its GPU."""
        for scenario, budget in product(self.scenarios, self.budgets):
            yield budget.name, self.variant(scenario, budget)

    def variant(self, scenario: Scenario, budget: Budget) -> RunVariant:
        """A scenario on a card, without optimizations."""
        parallel = parse_parallel(budget.parallel) if budget.parallel else None
        return RunVariant(
            scenario, budget.card, self.training, self.config, parallel=parallel, generation=self.generation
        )


def find_fit(
    trials: RunCache, request: FitRequest, notes: Sequence[str] = (), found: Callable[[Finding], None] = lambda _: None
) -> Fit:
    """The answer to `request`. A scenario that fails is reported in its own row.

    `found` is called with what a row says as soon as it is complete, in whichever order that is.

    Raises `ForwardError`, `ScenarioError` or `InputError` where no scenario can be run.
    """
    if request.default and is_float32(trials.model, stored_only(trials.name, trials.model)):
        request = replace(request, scenarios=[each for each in request.scenarios if each.name != "as-given"])
    rows_of = _RowsSoFar(request, trials, found)
    with (
        found_kept(lambda: _so_far(trials, request, rows_of, notes)),
        collector_paused(),
        Workers(work := _Work(trials, request), rows_of.counted(trials.say), rows_of.add) as workers,
    ):
        trials.say, work.found = workers.say, workers.found
        rows = _rows(trials, request, workers)
        remedied = _optimized(work, rows, workers)
        crossed: tuple[Crossing, ...] = ()
        if request.crossovers:
            base = request.variant(request.scenarios[0], request.budgets[0])
            crossed = tuple(crossings(trials, request.scenarios, base))
        return _fit(trials, request, rows, notes, remedied, crossed)


class _Answered(NamedTuple):
    """The rows of a scenario on a GPU; as far as they are known where it is not `complete`."""

    of: tuple[str, str]
    rows: tuple[FitRow, ...]
    complete: bool


class _RowsSoFar:
    """The rows that there are by now, by scenario and GPU; `found` is told of each that is complete."""

    def __init__(self, request: FitRequest, trials: RunCache, found: Callable[[Finding], None]) -> None:
        self.of: dict[tuple[str, str], _Answered] = {}
        self.asked = [(each.name, budget.name) for each, budget in product(request.scenarios, request.budgets)]
        self._several, self._vary, self._found = len(request.budgets) > 1, trials.vary.text, found

    def add(self, part: _Answered) -> None:
        """What a process found; again, where another does the work of one that ended."""
        before = self.of.get(part.of)
        self.of[part.of] = part
        if part.complete and not (before and before.complete):
            for row in part.rows:
                if row.status != "unavailable":
                    self._found(answer_in_words(row, self._vary, several=self._several))

    def counted(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say`, with which of the rows is looked for where there are several: how much is left follows from it."""

        def said(text: str) -> None:
            place = 1 + sum(part.complete for part in self.of.values())
            say(f"{text}; answer {place} of {len(self.asked)}" if 1 < len(self.asked) >= place else text)

        return said

    def __iter__(self) -> Iterator[FitRow]:
        return (row for key in self.asked if key in self.of for row in self.of[key].rows)


def _so_far(trials: RunCache, request: FitRequest, found: _RowsSoFar, notes: Sequence[str]) -> Fit | None:
    """The answer from what was found; None where that says nothing."""
    rows = tuple(found)
    if all(row.status == "unavailable" for row in rows):
        return None
    return _fit(trials, request, rows, notes, missing=tuple(_missing(request, found)))


def _missing(request: FitRequest, found: _RowsSoFar) -> Iterator[str]:
    for key in found.asked:
        if key not in found.of or not found.of[key].complete:
            name = " on ".join(key) if len(request.budgets) > 1 else key[0]
            yield f"the rest of {name}" if key in found.of else name
    if request.remedies or (request.remedies is None and any(row.status == "exceeds" for row in found)):
        yield "remedies"
    if request.crossovers:
        yield "crossovers"


def _fit(
    trials: RunCache,
    request: FitRequest,
    rows: Sequence[FitRow],
    notes: Sequence[str],
    remedied: Remedied | None = None,
    crossed: tuple[Crossing, ...] = (),
    missing: tuple[str, ...] = (),
) -> Fit:
    budgets, vary, traces = tuple(request.budgets), trials.vary.text, trials.traces(request.variants())
    evidence = FitEvidence(_first(rows), budgets, vary, remedied, crossed, tuple(rows))
    return Fit(
        model=trials.name,
        inputs=trials.inputs,
        vary=vary,
        budgets=budgets,
        fit_rows=tuple(rows),
        asked=request.asked,
        optimizer=_optimizer(request.training),
        findings=(*interrupted(missing), *RULES.findings(evidence)),
        remedied=remedied,
        notes=tuple(dict.fromkeys((*notes, *_notes(trials, traces, budgets, rows)))),
        traces=traces,
        runs=trials.count,
        generation=asdict(request.generation) if request.generation else {},
        missing=missing,
    )


def _first(rows: Sequence[FitRow]) -> tuple[FitRow, ...]:
    """The rows of the first batch, where there are several."""
    return tuple(row for row in rows if row.batch == rows[0].batch)


def _optimizer(training: Training | None) -> str:
    if training is None:
        return ""
    kind = training.optimizer
    return kind if isinstance(kind, str) else getattr(kind, "__name__", "the given optimizer")


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(trials: RunCache, request: FitRequest, workers: Workers) -> tuple[FitRow, ...]:
    found: dict[tuple[str, str], list[FitRow]] = {}
    for some, made in workers.each([("rows", each) for each in _alike(request.scenarios)]):
        for row in some:
            found.setdefault((row.scenario, row.gpu), []).append(row)
        trials.adopt(made)
    asked = product(request.scenarios, request.budgets)
    rows = tuple(row for scenario, budget in asked for row in found[scenario.name, budget.name])
    if all(row.status == "unavailable" for row in rows):
        _fail(trials, request)
    return rows


def _fail(trials: RunCache, request: FitRequest) -> None:
    """Raise what the first scenario that could have been run failed with."""
    own = _Work(trials, request)
    own.rows(request.scenarios)
    if own.failures:
        raise own.failures[0]


def _alike(scenarios: Sequence[Scenario]) -> list[tuple[Scenario, ...]]:
    """The scenarios in groups, of which each member's answer is a good start for the search of the next."""
    groups: dict[object, list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault(_width(scenario), []).append(scenario)
    return list(map(tuple, groups.values()))


class _Work(Tries):
    """What a fit consists of, piece by piece; `failures` are what scenarios failed with."""

    def __init__(self, trials: RunCache, request: FitRequest) -> None:
        super().__init__(trials)
        self.request = request
        self.found: Callable[[_Answered], None] = lambda _: None
        self.failures: list[Exception] = []

    def rows(self, scenarios: Sequence[Scenario]) -> tuple[list[FitRow], NewRuns]:
        """The rows of some scenarios, one for each budget, and the runs that they took."""
        rows: list[FitRow] = []
        before = self.trials.made()
        for scenario in scenarios:
            for budget in self.request.budgets:
                if self.trials.vary.frontier:
                    own = self._frontier(scenario, budget)
                else:
                    likely = likely_size(rows, scenario.name, budget, self.request.budgets)
                    own = [self._row(self.request.variant(scenario, budget), budget, likely)]
                self._tell(own)
                rows += own
        return rows, self.trials.made(before)

    def _tell(self, rows: Sequence[FitRow], complete: bool = True) -> None:
        self.found(_Answered((rows[0].scenario, rows[0].gpu), tuple(rows), complete))

    def _frontier(self, scenario: Scenario, budget: Budget) -> list[FitRow]:
        """The longest context of one batch after another, each twice the last, until nothing fits."""
        rows: list[FitRow] = []
        batch, variant = self.trials.model_inputs.batch_size, self.request.variant(scenario, budget)
        while batch <= MOST_SEQUENCES:
            of_batch, likely = replace(variant, sequences=batch), rows[-1].size if rows else None
            row = replace(self._row(of_batch, budget, likely and likely // 2), batch=batch)
            self.trials.forget(of_batch, but=None if rows else row.size)
            if row.size is not None or not rows:
                rows.append(row)
                self._tell(rows, complete=False)
            if row.size is None:
                break
            batch *= 2
        return rows

    def _row(self, variant: RunVariant, budget: Budget, likely: int | None) -> FitRow:
        trials, request, scenario = self.trials, self.request, variant.scenario
        row = FitRow(scenario.name, scenario.title, budget.name, budget.allocator, "unavailable")
        try:
            if scenario.is_modelled:
                return replace(row, reason="what its modules pass on is modelled and cannot be run")
            if request.asked is not None or not trials.resizable:
                return asked_row(trials, variant, row, request.asked or trials.asked)
            return self._searched_row(variant, row, likely)
        except (ScenarioError, ForwardError, InputError) as error:
            self.failures.append(error)
            return replace(row, reason=str(error))

    def _searched_row(self, variant: RunVariant, row: FitRow, likely: int | None) -> FitRow:
        """The largest size that fits."""
        trials = self.trials
        search = Search(
            lambda size: trials.run(variant, size),
            row.budget,
            trials.known(variant),
            trials.refused(variant),
            trials.most,
            powers=not trials.vary.batch,
            least=trials.least,
        )
        linear = trials.vary.batch
        try:
            search.run(likely or (trials.asked if trials.asked > 1 else None), trials.most_runs)
        except KeyboardInterrupt:
            if search.runs and search.size and variant.sequences is None:
                self._tell([growing_row(search, row, linear=linear)], complete=False)
            raise
        if search.largest is None and variant.sequences is not None and likely is not None:
            return replace(row, status="none")  # a frontier ends here, and tells nothing of it
        return growing_row(search, row, linear=linear)


def _width(scenario: Scenario) -> object:
    """What a scenario shares with those that take about as much memory: how it casts, and to how many bits.

    How wide a model is as it is, or once it is quantized, is not known beforehand.
    """
    if scenario.recipe in ("as-given", "quantized"):
        return scenario.name
    computed = scenario.autocast or scenario.dtype
    return scenario.autocast is not None, computed in ("float16", "bfloat16"), scenario.master_weights


# -- optimizations and notes ------------------------------------------------------------------------------------------


def _optimized(work: _Work, rows: Sequence[FitRow], workers: Workers) -> Remedied | None:
    """Optimizations of the row that does not fit what was asked, or of the first where they were asked for."""
    trials, request = work.trials, work.request
    row = None if request.remedies is False else _short(request, rows)
    if row is None:
        return None
    scenario = next(scenario for scenario in request.scenarios if scenario.name == row.scenario)
    budget = next(budget for budget in request.budgets if budget.name == row.gpu)
    size = request.asked or (2 * row.size if row.size else row.next_size or trials.asked)
    base = request.variant(scenario, budget)
    return work.remedied(workers, base, size, budget, parts=trials.vary.batch)


def _short(request: FitRequest, rows: Sequence[FitRow]) -> FitRow | None:
    """The row that is to be helped: the first that doesn't fit, or of strategies the one that needs least. None where
    nobody asks for help, and another strategy or number of GPUs is enough.
    """
    short = [row for row in rows if row.status == "exceeds"]
    if not short:
        return next((row for row in rows if request.remedies and row.status != "unavailable"), None)
    if not request.budgets[0].parallel:
        return short[0]
    alike = [row for row in rows if row.scenario == short[0].scenario]
    if not request.remedies and any(row.status == "fits" for row in alike):
        return None
    return min((row for row in alike if row in short), key=lambda row: row.peak or 0)


def _notes(
    trials: RunCache, traces: Mapping[FitRun, Trace], budgets: Sequence[Budget], rows: Sequence[FitRow]
) -> Iterator[str]:
    """What a reader must know about how the answers were found."""
    yield from (note for budget in budgets for note in budget.notes)
    yield from trials.notes
    if not trials.resizable:
        yield "the inputs do not agree on a batch dimension, so that only the batch they have was looked at"
    looked = [row for row in rows if row.status not in ("unavailable", "fits", "exceeds")]
    if looked:
        most = max(len(row.looked) for row in looked)
        done = "put together from traced steps" if trials.generates else "run"
        following = ", and so was the next size" if all(row.status in ("found", "none") for row in looked) else ""
        yield f"each answer was {done}{following}: {trials.count} runs in all, at most {most} per answer"
    # The workspace of a convolution is of the order of the largest tensor that one makes, in the first answer.
    answer = next(((row.scenario, row.size) for row in rows if row.size), None)
    if first := next((trace for run, trace in traces.items() if run[:2] == answer), None):
        made = (storage.bytes for storage in first.storages if "convolution" in storage.op)
        if workspace := max(made, default=0):
            yield (
                f"cuDNN's workspaces are not counted: a convolution may take up to {format_bytes(workspace)} more for "
                "a moment; --margin leaves room"
            )
    if uneven := tuple(f"{row.name} on {row.gpu}" for row in rows if not row.monotone):
        yield (
            f"memory does not only grow with the size under {join_names(uneven)}: a smaller one than the answer needs "
            "more than there is; --allocator expandable_segments:True tells whether it lies free, in pieces too small"
        )
    yield from (note for trace in traces.values() for note in trace.notes)
