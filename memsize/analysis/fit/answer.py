"""One question about what fits: which runs are needed, what they showed, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memsize.analysis.fit.case import Case
from memsize.analysis.fit.crossings import (
    Crossing,
    first_size,
    foretold_most,
    foretold_phase,
    most_beside,
    most_of,
    peak_phase,
)
from memsize.analysis.fit.explain import findings
from memsize.analysis.fit.footprint import Footprint, bind
from memsize.analysis.fit.forecast import FIXED, Forecast, forecast
from memsize.analysis.fit.optimizing import try_remedies
from memsize.analysis.fit.search import Answer, largest
from memsize.analysis.fit.trials import Trials
from memsize.analysis.runner import is_float32
from memsize.device.config import AllocatorConfig
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.internals.isolation import collector_paused
from memsize.records.fit import Budget, Fit, FitRow, Remedied, Status
from memsize.records.roles import Role
from memsize.records.trace import Trace
from memsize.spec.scenario import SCENARIOS, Scenario
from memsize.spec.training import Training
from memsize.tracing.run import stored_only
from memsize.units import format_bytes


@dataclass(frozen=True)
class Question:
    """What is asked: which scenarios on which budgets, how trained, and about which size (None: the largest).

    `remedies` asks for them or not (None: where the size that was asked about does not fit), `crossovers` for those.
    """

    scenarios: Sequence[Scenario]
    budgets: Sequence[Budget]
    training: Training | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    asked: int | None = None
    remedies: bool | None = None
    crossovers: bool = False
    default: bool = False
    """Whether the scenarios are the usual ones: `as-given` is left out where it is what fp32 is."""

    def case(self, scenario: Scenario, budget: Budget) -> Case:
        """A scenario on a card, without remedies."""
        return Case(scenario, budget.card, self.training, self.config)


def answer(trials: Trials, question: Question, notes: Sequence[str] = ()) -> Fit:
    """The fit that answers a question. What fails under one scenario is told in its row.

    Raises `ForwardError`, `ScenarioError` or `InputError` where no scenario can be run.
    """
    with collector_paused():
        return _answer(trials, _without_twins(trials, question), notes)


def _without_twins(trials: Trials, question: Question) -> Question:
    if not question.default or not is_float32(stored_only(trials.name, trials.model)):
        return question
    return replace(question, scenarios=[s for s in question.scenarios if s.name != "as-given"])


def _answer(trials: Trials, question: Question, notes: Sequence[str]) -> Fit:
    failures: list[Exception] = []
    rows: list[FitRow] = []
    for scenario in question.scenarios:
        for budget in question.budgets:
            rows.append(_row(trials, question, scenario, budget, _likely(rows, scenario, budget), failures))
    if failures and all(row.status == "unavailable" for row in rows):
        raise failures[0]
    remedied = _remedied(trials, question, rows)
    crossings = tuple(_crossings(trials, question)) if question.crossovers else ()
    traces = trials.traces()
    return Fit(
        model=trials.name,
        inputs=trials.inputs,
        vary=trials.vary.text,
        budgets=tuple(question.budgets),
        fit_rows=tuple(rows),
        asked=question.asked,
        optimizer=_optimizer(question.training),
        findings=findings(rows, question.budgets, trials.vary.text, remedied, crossings),
        remedied=remedied,
        notes=tuple(dict.fromkeys((*notes, *_notes(trials, question, rows)))),
        traces=traces,
        runs=trials.count,
    )


def _optimizer(training: Training | None) -> str:
    if training is None:
        return ""
    kind = training.optimizer
    return kind if isinstance(kind, str) else getattr(kind, "__name__", "the given optimizer")


# -- rows -------------------------------------------------------------------------------------------------------------


def _likely(rows: Sequence[FitRow], scenario: Scenario, budget: Budget) -> int | None:
    """The answer of a scenario before that computes in numbers of the same width: the search may begin there."""
    alike = (row for row in reversed(rows) if row.gpu == budget.name and row.size and row.status == "found")
    return next((row.size for row in alike if _width(SCENARIOS.get(row.scenario)) == _width(scenario)), None)


def _width(scenario: Scenario | None) -> tuple[bool, bool]:
    """Whether a scenario casts during its forward, and whether to 16 bits."""
    computed = scenario and (scenario.autocast or scenario.dtype)
    return bool(scenario and scenario.autocast), computed in ("float16", "bfloat16")


def _row(
    trials: Trials,
    question: Question,
    scenario: Scenario,
    budget: Budget,
    likely: int | None,
    failures: list[Exception],
) -> FitRow:
    row = FitRow(scenario.name, scenario.title, budget.name, budget.allocator, "unavailable")
    if scenario.is_modelled:
        return replace(row, reason="what its modules pass on is modelled and cannot be run")
    case = question.case(scenario, budget)
    try:
        if question.asked is not None or not trials.resizable:
            return _asked_row(trials, case, row, question.asked or trials.asked)
        return _searched_row(trials, case, row, likely)
    except (ScenarioError, ForwardError, InputError) as error:
        failures.append(error)
        return replace(row, reason=str(error))


def _asked_row(trials: Trials, case: Case, row: FitRow, size: int) -> FitRow:
    """Whether one size fits."""
    run = trials.run(case, size)
    return replace(
        row,
        status="fits" if run.fits(row.budget) else "exceeds",
        size=size,
        peak=run.needs(row.budget),
        fixed=sum(_standing(run).values()),
        standing=_standing(run),
        bind=bind(run, None),
        looked=(size,),
    )


def _searched_row(trials: Trials, case: Case, row: FitRow, likely: int | None) -> FitRow:
    """The largest size that fits."""

    def measure(size: int) -> Footprint:
        return trials.run(case, size)

    start = likely or (trials.asked if trials.asked > 1 else None)
    found = largest(
        measure,
        row.budget,
        start=start,
        known=trials.known(case),
        refused=trials.refused(case),
        powers=not trials.vary.batch,
    )
    low, high = found.largest, found.above
    per_step = _per_step(found)
    return replace(
        row,
        status=_status(found),
        reason=found.ceiling,
        size=low.size if low else None,
        peak=low.needs(row.budget) if low else None,
        next_size=found.bound,
        next_peak=high.needs(row.budget) if high else None,
        per_step=per_step,
        fixed=_fixed(found, per_step, trials.vary.batch),
        bind=bind(high, row.budget if low else None) if high else None,
        standing=_standing(run) if (run := low or high) else {},
        looked=found.looked,
        step=found.step,
        refused=found.refused,
        monotone=found.monotone,
    )


def _status(found: Answer) -> Status:
    if found.largest is None:
        return "none"
    if found.endless:
        return "constant" if _constant(found) else "endless"
    if not found.closed:
        return "open"
    return "found" if found.above else "refused"


def _constant(found: Answer) -> bool:
    """Whether all runs need the same beside their input."""
    return len(found.runs) > 1 and len({most_beside(run, "input") for run in found.runs.values()}) == 1


def _per_step(found: Answer) -> int | None:
    """What one more adds to the tensors' peak: between the answer and the next size, or the two least that ran."""
    pair = [run for run in (found.largest, found.above) if run]
    if len(pair) < 2:
        pair = [found.runs[size] for size in sorted(found.runs)[:2]]
    if len(pair) < 2:
        return None
    return (pair[1].requested - pair[0].requested) // (pair[1].size - pair[0].size)


def _fixed(found: Answer, per_step: int | None, linear: bool) -> int | None:
    """What does not depend on the size: the line's value at 0, or what the model and its training hold at the peak."""
    run = found.largest or found.above
    if run is None:
        return None
    at_zero = run.requested - run.size * per_step if linear and per_step is not None else -1
    return at_zero if at_zero >= 0 else sum(_standing(run).values())


def _standing(run: Footprint) -> dict[Role, int]:
    """What the model and its training hold at the peak, by role."""
    return {role: size for role, size in bind(run, None).roles.items() if role in FIXED}


# -- remedies and crossovers ------------------------------------------------------------------------------------------


def _remedied(trials: Trials, question: Question, rows: Sequence[FitRow]) -> Remedied | None:
    """Remedies for the first row that does not fit what was asked, or for the first where they were asked for."""
    if question.remedies is False:
        return None
    short = next((row for row in rows if row.status == "exceeds"), None)
    row = short or next((row for row in rows if question.remedies and row.status != "unavailable"), None)
    if row is None:
        return None
    scenario = next(scenario for scenario in question.scenarios if scenario.name == row.scenario)
    budget = next(budget for budget in question.budgets if budget.name == row.gpu)
    size = question.asked or (2 * row.size if row.size else row.next_size or trials.asked)

    def run(case: Case) -> Footprint:
        return trials.run(case, size)

    base = question.case(scenario, budget)
    return try_remedies(run, base, size, budget.allocator, row.gpu, parts=trials.vary.batch)


def _crossings(trials: Trials, question: Question) -> Iterator[Crossing]:
    """The crossovers of the first scenario that runs, on the first card."""
    plain = [scenario for scenario in question.scenarios if scenario.recipe != "autocast" and not scenario.is_modelled]
    if not plain or not trials.resizable:
        return
    case = question.case(plain[0], question.budgets[0])
    base = _foreseen(trials, case)
    if base is None:
        return
    if plain[0].name in ("as-given", "fp32"):
        yield from _autocast_crossing(trials, question, case, base)
    if question.training is not None:
        yield _crossing(trials, case, "activations", lambda size: _outweighs(base, size), _activations_outweigh)
        yield _crossing(
            trials,
            case,
            "peak",
            lambda size: foretold_phase(base, size) != "optimizer",
            lambda run: peak_phase(run) != "optimizer",
        )


def _outweighs(base: Forecast, size: int) -> bool:
    return foretold_most(base, "activation", size) > foretold_most(base, "parameter", size)


def _activations_outweigh(run: Footprint) -> bool:
    return most_of(run, "activation") > most_of(run, "parameter")


def _crossing(
    trials: Trials,
    case: Case,
    kind: str,
    foretold: Callable[[int], bool],
    measured: Callable[[Footprint], bool],
) -> Crossing:
    size = first_size(foretold, lambda size: measured(trials.run(case, size)))
    return Crossing(kind, size, case.scenario.name)  # type: ignore[arg-type]


def _autocast_crossing(trials: Trials, question: Question, case: Case, base: Forecast) -> Iterator[Crossing]:
    name = "amp-bf16" if case.card.capability >= (8, 0) else "amp-fp16"
    lower = question.case(SCENARIOS[name], question.budgets[0])
    with_it = _foreseen(trials, lower)
    if with_it is not None:
        size = first_size(
            lambda size: with_it.requested(size) < base.requested(size),
            lambda size: trials.run(lower, size).requested < trials.run(case, size).requested,
        )
        yield Crossing("autocast", size, name, case.scenario.name)


def _foreseen(trials: Trials, case: Case) -> Forecast | None:
    """A forecast for small sizes, from the runs at hand and up to two more; None where the model refuses those."""
    for size in (trials.asked, 8, 13):
        if len(trials.known(case)) > 1:
            break
        try:
            trials.run(case, size)
        except (ForwardError, ScenarioError, InputError):
            continue
    return forecast(trials.known(case), 0)


def _answered(trials: Trials, rows: Sequence[FitRow]) -> Iterator[Trace]:
    """The runs of the sizes that the rows name."""
    traces = trials.traces()
    return (trace for row in rows if row.size and (trace := traces.get((row.scenario, row.size))))


def _largest_operand(trace: Trace) -> int:
    """The bytes of the largest tensor that a convolution makes, which its workspace is of the order of."""
    return max((storage.bytes for storage in trace.storages if "convolution" in storage.op), default=0)


def _notes(trials: Trials, question: Question, rows: Sequence[FitRow]) -> Iterator[str]:
    """What a reader must know about how the answers were found."""
    yield from (note for budget in question.budgets for note in budget.notes)
    if not trials.resizable:
        yield "the inputs do not agree on a batch dimension, so that only the batch they have was looked at"
    looked = [row for row in rows if row.status not in ("unavailable", "fits", "exceeds")]
    if looked:
        most = max(len(row.looked) for row in looked)
        following = ", and so was the next size" if all(row.status in ("found", "none") for row in looked) else ""
        yield f"each answer was run{following}: {trials.count} runs in all, at most {most} per answer"
    workspace = next((_largest_operand(trace) for trace in _answered(trials, rows)), 0)
    if workspace:
        yield (
            f"cuDNN's workspaces are not counted: a convolution may take up to {format_bytes(workspace)} more for a "
            "moment; --margin leaves room"
        )
    if any(not row.monotone for row in rows):
        yield "memory does not only grow here: a size below an answer needs more than there is"
    yield from (note for trace in trials.traces().values() for note in trace.notes)
