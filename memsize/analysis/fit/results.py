"""Results of a fit from its runs. Rows: whether one size fits, or the largest that does and how memory grows there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memsize.analysis.fit.footprint import Footprint, limit_of
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.gpu_estimate import estimate_gpu
from memsize.records.aggregates import split_phase
from memsize.records.columns import rows_at
from memsize.records.fit import Budget, Fit, FitRow, Status
from memsize.records.roles import FIXED, Role

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


def row_of_search(search: Search, row: FitRow, *, linear: bool, points: bool = True) -> FitRow:
    """Complete `row` with the result of a search. `linear`: each further size adds as much memory as the one before.

    Without `points`, the needs of sizes beside the answer, which take a replay or more each, are left out.
    """
    low, high = search.largest_run, search.next_run
    runs = sorted(search.runs.items()) if points else ()
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
        points=tuple((size, run.needs(row.budget)) for size, run in runs),
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
        without_input = {_most_alive(run, roles) for run in runs}
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
    event, fixed, trace = run.peak, _fixed(run), run.trace
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
    phase = trace.events[run.peak].phase
    of_optimizer = split_phase(trace.phases[phase])[0] == "optimizer"
    alive = flow.alive(run.peak)
    storages = zip(alive.items(), rows_at(trace.storages, alive), strict=True)
    return sum(
        size
        for (index, size), storage in storages
        if storage.role in FIXED or (of_optimizer and trace.events[flow.born(index)].phase == phase)
    )


def _most_alive(run: Footprint, roles: Collection[Role]) -> int:
    """Return the most bytes of some roles that are alive at one moment of a run."""
    import numpy as np

    counted = np.fromiter((storage.role in roles for storage in run.trace.storages), dtype=bool)
    return int(run.flow.deltas[counted[run.flow.storages]].cumsum().max(initial=0))
