"""Results of a fit from its runs. Rows: whether one size fits, or the largest that does and how memory grows there.
Crossovers: the sizes from which on autocast pays, activations outweigh parameters, the peak leaves the optimizer.

For a crossover a line or a forecast says where to look; runs of that size and of the one before decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from memsize.analysis.findings.evidence import Crossover
from memsize.analysis.fit.footprint import Footprint, Forecast, forecast, limit_of
from memsize.device.allocation_events import AllocationEvents
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.aggregates import split_phase
from memsize.records.columns import rows_at
from memsize.records.fit import Budget, Crossing, Fit, FitRow, Status
from memsize.records.roles import FIXED, Role
from memsize.records.trace import Trace
from memsize.spec.scenario import SCENARIOS, Scenario

if TYPE_CHECKING:
    from memsize.analysis.fit.run_cache import RunCache, RunVariant
    from memsize.analysis.fit.search import Search


def with_peak(fit: Fit, config: AllocatorConfig) -> Fit:
    """Add the peak of the first answer on its GPU, if any size fits.

    Where the allocator has to give back what it cached, it reserves all there is: the row says what is needed.
    """
    row = fit.first_answer
    if row is None or (trace := fit.trace_of(row)) is None:
        return fit
    budget = next(budget for budget in fit.budgets if budget.name == row.gpu)
    peak = estimate_gpu(trace, replace(budget.card, bytes=budget.device), config=config)
    return replace(fit, peak=peak) if peak.reserved <= budget.allocator else fit


def row_of_size(runs: RunCache, variant: RunVariant, row: FitRow, size: int) -> FitRow:
    """Complete `row` for one size: does it fit?"""
    run = runs.run(variant, size)
    return replace(
        row,
        status="fits" if run.fits(row.budget) else "exceeds",
        size=size,
        peak=run.needs(row.budget),
        fixed=_fixed(run),
        standing=_fixed_roles(run),
        bind=limit_of(run, None),
        looked=(size,),
    )


def row_of_search(search: Search, row: FitRow, *, linear: bool) -> FitRow:
    """Complete `row` with the result of a search. `linear`: each further size adds as much memory as the one before."""
    low, high = search.largest_run, search.next_run
    run = high or low
    return replace(
        row,
        status=_status(search),
        reason=search.ceiling,
        size=low.size if low else None,
        peak=low.needs(row.budget) if low else None,
        next_size=search.next_size,
        next_peak=high.needs(row.budget) if high else None,
        bind=limit_of(high, row.budget if low else None) if high else None,
        standing=_fixed_roles(run) if run else {},
        looked=search.measured,
        points=tuple((size, run.needs(row.budget)) for size, run in sorted(search.runs.items())),
        step=search.step,
        refused=search.refused,
        monotone=search.monotone,
        **(_growth(run, search.runs.values(), linear) if run else {}),
    )


def likely_size(rows: Sequence[FitRow], scenario: str, budget: Budget, budgets: Sequence[Budget]) -> int | None:
    """Guess the largest size for `scenario` on `budget`: the size in the row of an earlier, similar scenario, or else
    one from rows of the same scenario on fewer GPUs, each of which stores more. None if there is neither.
    """
    before = [row for row in rows if row.status in ("found", "none")]
    if same := next((row for row in reversed(before) if row.gpu == budget.name), None):
        return same.size or 1
    gpus = {other.name: other.gpus for other in budgets if (other.strategy, other.one) == (budget.strategy, budget.one)}
    fewer = [row for row in before if row.scenario == scenario and gpus.get(row.gpu, budget.gpus) < budget.gpus]
    if not fewer:
        return None
    last, freed = fewer[-1], 0
    if last.size is None or not last.per_step:
        return last.size or 1
    if len(fewer) > 1:
        # Sharded tensors shrink with the share of each GPU, others stay.
        earlier = fewer[-2]
        shrunk = sum(earlier.standing.values()) - sum(last.standing.values())
        shares = 1 / gpus[earlier.gpu], 1 / gpus[last.gpu]
        freed = round(shrunk / (shares[0] - shares[1]) * (shares[1] - 1 / budget.gpus))
    return last.size + max((last.headroom or 0) + freed, 0) // last.per_step


def _status(search: Search) -> Status:
    if search.largest_run is None:
        return "none"
    if search.endless:
        runs = search.runs.values()
        roles = {storage.role for run in runs for storage in run.trace.storages} - {"input"}
        without_input = {most_alive(run.trace, run.flow, roles) for run in runs}
        return "constant" if len(runs) > 1 and len(without_input) == 1 else "endless"
    if not search.closed:
        return "open"
    return "found" if search.next_run else "refused"


def _growth(run: Footprint, runs: Collection[Footprint], linear: bool) -> dict[str, Any]:
    """Compare the peak of a run with another run at the same moment: the bytes that each further size adds to it, the
    bytes that do not grow, and its phase.

    The other's own peak may be in another phase: as a batch grows the peak moves out of the optimizer, and a line
    through both peaks would describe neither phase.
    """
    event, fixed, trace = run.unbounded.requested.event, _fixed(run), run.trace
    label = trace.phases[trace.events[event].phase]
    apart = sorted((other for other in runs if other is not run), key=lambda other: abs(other.size - run.size))
    beside = next(((other.size, other.live(event)) for other in apart if other.shape == run.shape), None)
    if beside is None:
        highest = ((other.size, other.most(label)) for other in apart)
        beside = next(((size, most) for size, most in highest if most is not None), None)
    per_step = None if beside is None else (run.requested - beside[1]) // (run.size - beside[0])
    if per_step is not None and per_step < 0:
        per_step = None
    if linear and per_step is not None:
        fixed = max(run.requested - run.size * per_step, fixed)
    return {"per_step": per_step, "fixed": fixed, "grows_in": split_phase(label)[0]}


def _fixed_roles(run: Footprint) -> dict[Role, int]:
    return {role: size for role, size in limit_of(run, None).roles.items() if role in FIXED}


def _fixed(run: Footprint) -> int:
    """Return the bytes at the peak that certainly do not depend on the size: the model and its training, and tensors of
    the optimizer's own step.
    """
    trace, flow = run.trace, run.flow
    event = run.unbounded.requested.event
    phase = trace.events[event].phase
    of_optimizer = split_phase(trace.phases[phase])[0] == "optimizer"
    alive = flow.alive(event)
    storages = zip(alive.items(), rows_at(trace.storages, alive), strict=True)
    return sum(
        size
        for (index, size), storage in storages
        if storage.role in FIXED or (of_optimizer and trace.events[flow.born(index)].phase == phase)
    )


# -- crossovers --------------------------------------------------------------------------------------------------------

FARTHEST: Final = 2**16
"""The largest size at which a crossing is looked for."""
_FARTHEST_BATCH: Final = 2**24
"""The same where a line says where to look."""
_LOOKS: Final = 6
"""How many sizes are measured around a predicted one: each takes a run or two of the model."""


def find_crossover(measure: Callable[[int], tuple[int, int]], start: int) -> Crossover:
    """Find the smallest batch from which the second of `measure(batch)`'s figures is below the first.

    `measure` gives the bytes that both keep at a batch size; it is called a handful of times, once per batch size.
    """
    measure = cache(measure)
    (first, second), following = measure(start), measure(start + 1)
    first_per_sample, second_per_sample = following[0] - first, following[1] - second
    slope = second_per_sample - first_per_sample

    def foretold(batch: int) -> bool:
        return slope <= 0 and second - first + slope * (batch - start) < 0

    def measured(batch: int) -> bool:
        first, second = measure(batch)
        return second < first

    batch = first_size(foretold, measured, _FARTHEST_BATCH)
    return Crossover(
        batch,
        start=start,
        first=first,
        second=second,
        first_per_sample=first_per_sample,
        second_per_sample=second_per_sample,
    )


def first_size(
    foretold: Callable[[int], bool], measured: Callable[[int], bool], most: int, *refused: type[Exception]
) -> int | None:
    """Find the smallest size for which `measured` holds while it doesn't for the one before; None if there is none.

    `foretold` says where to look, up to `most`, and costs next to nothing. Where `measured` raises one of `refused`, it
    does not hold yet.
    """
    if not foretold(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if foretold(middle) else (middle, high)
    seen = {0: False}

    def holds(size: int) -> bool:
        if size not in seen:
            try:
                seen[size] = measured(size)
            except refused:
                seen[size] = False
        return seen[size]

    while len(seen) <= _LOOKS:
        if not holds(high):
            high += 1
        elif holds(high - 1):
            high -= 1
        else:
            return high
    return None


def crossings(runs: RunCache, scenarios: Sequence[Scenario], base: RunVariant) -> Iterator[Crossing]:
    """Yield the crossovers of `base` under the first of `scenarios` that can be run without autocast."""
    plain = next((one for one in scenarios if one.recipe != "autocast" and not one.is_modelled), None)
    if plain is None or not runs.resizable:
        return
    variant = replace(base, scenario=plain)
    ahead = _forecast_of(runs, variant)
    if ahead is None:
        return
    if plain.name in ("as-given", "fp32"):
        name = "amp-bf16" if variant.card.capability >= (8, 0) else "amp-fp16"
        lower = replace(variant, scenario=SCENARIOS[name])
        with_it = _forecast_of(runs, lower)
        if with_it is not None:
            size = first_size(
                lambda size: with_it.requested(size) < ahead.requested(size),
                lambda size: runs.run(lower, size).requested < runs.run(variant, size).requested,
                FARTHEST,
                ForwardError,
            )
            yield Crossing("autocast", size, name, plain.name)

    def crossing(kind: Literal["activations", "peak"], holds: Callable[[Trace, AllocationEvents], bool]) -> Crossing:
        def measured(size: int) -> bool:
            run = runs.run(variant, size)
            return holds(run.trace, run.flow)

        trace = ahead.runs[0].trace
        return Crossing(
            kind, first_size(lambda size: holds(trace, ahead.flow(size)), measured, FARTHEST, ForwardError), plain.name
        )

    if variant.training is not None:
        yield crossing("activations", activations_outweigh)
        yield crossing("peak", peak_has_left_the_optimizer)


def _forecast_of(runs: RunCache, variant: RunVariant) -> Forecast | None:
    """Forecast small sizes from the runs made so far and up to two more; None where the model refuses these."""
    for size in (runs.input_size, 8, 13):
        if len(runs.runs_of(variant)) > 1:
            break
        try:
            runs.run(variant, size)
        except (ForwardError, ScenarioError, InputError):
            continue
    return forecast(runs.runs_of(variant), 0)


def most_alive(trace: Trace, flow: AllocationEvents, roles: Collection[Role]) -> int:
    """Return the most bytes of some roles that are alive at one moment."""
    import numpy as np

    counted = np.fromiter((storage.role in roles for storage in trace.storages), dtype=bool)
    return int(flow.deltas[counted[flow.storages]].cumsum().max(initial=0))


def activations_outweigh(trace: Trace, flow: AllocationEvents) -> bool:
    """Whether more bytes of activations are alive at one moment than of parameters at any."""
    return most_alive(trace, flow, {"activation"}) > most_alive(trace, flow, {"parameter"})


def peak_has_left_the_optimizer(trace: Trace, flow: AllocationEvents) -> bool:
    """Whether the peak falls in another phase than the optimizer's step."""
    event = trace.events[int(flow.deltas.cumsum().argmax())]
    return split_phase(trace.phases[event.phase])[0] != "optimizer"
