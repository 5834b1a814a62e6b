"""Build the rows of a fit from runs: whether one size fits, or the largest that does and how memory grows there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from memsize.analysis.fit.crossovers import most_alive
from memsize.analysis.fit.footprint import Footprint, limit_of, phase_name
from memsize.analysis.fit.run_cache import RunCache, RunVariant
from memsize.analysis.fit.search import Search
from memsize.records.columns import rows_at
from memsize.records.fit import Budget, FitRow, Status
from memsize.records.roles import FIXED, Role


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
    growth = _growth(search, linear)
    return replace(
        row,
        status=_status(search),
        reason=search.ceiling,
        size=low.size if low else None,
        peak=low.needs(row.budget) if low else None,
        next_size=search.next_size,
        next_peak=high.needs(row.budget) if high else None,
        per_step=growth.per_step if growth else None,
        fixed=growth.fixed if growth else None,
        grows_in=growth.phase if growth else "",
        bind=limit_of(high, row.budget if low else None) if high else None,
        standing=_fixed_roles(run) if (run := high or low) else {},
        looked=search.measured,
        step=search.step,
        refused=search.refused,
        monotone=search.monotone,
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
        without_input = set()
        for run in search.runs.values():
            trace = run.trace
            roles = {storage.role for storage in trace.storages} - {"input"}
            without_input.add(most_alive(trace, run.pairs, roles))
        return "constant" if len(search.runs) > 1 and len(without_input) == 1 else "endless"
    if not search.closed:
        return "open"
    return "found" if search.next_run else "refused"


class _Growth(NamedTuple):
    """The bytes that each further size adds at the peak, the bytes that do not grow, and the phase of the peak."""

    per_step: int | None
    fixed: int
    phase: str


def _growth(search: Search, linear: bool) -> _Growth | None:
    """Compare the peak of the next size (or of the answer, if there is none) with another run, at the same moment.

    Its own peak may be in another phase: as a batch grows the peak moves out of the optimizer, and a line through both
    peaks would describe neither phase.
    """
    run = search.next_run or search.largest_run
    if run is None:
        return None
    event, least = run.unbounded.requested.event, _fixed(run)
    trace = run.trace
    label = trace.phases[trace.events[event].phase]
    apart = sorted((other for other in search.runs.values() if other is not run), key=lambda o: abs(o.size - run.size))
    alike = next((other for other in apart if other.shape == run.shape), None)
    if alike:
        beside: tuple[int, int] | None = alike.size, alike.live(event)
    else:
        highest = ((other.size, other.most(label)) for other in apart)
        beside = next(((size, most) for size, most in highest if most is not None), None)
    per_step = None if beside is None else (run.requested - beside[1]) // (run.size - beside[0])
    if per_step is None or per_step < 0:
        return _Growth(None, least, phase_name(label))
    fixed = max(run.requested - run.size * per_step, least) if linear else least
    return _Growth(per_step, fixed, phase_name(label))


def _fixed_roles(run: Footprint) -> dict[Role, int]:
    return {role: size for role, size in limit_of(run, None).roles.items() if role in FIXED}


def _fixed(run: Footprint) -> int:
    """Return the bytes at the peak that certainly do not depend on the size: the model and its training, and tensors of
    the optimizer's own step.
    """
    trace, flow = run.trace, run.flow
    event = run.unbounded.requested.event
    phase = trace.events[event].phase
    of_optimizer = phase_name(trace.phases[phase]) == "optimizer"

    def from_optimizer(storage: int) -> bool:
        return of_optimizer and trace.events[flow.born(storage)].phase == phase

    alive = flow.alive(event)
    storages = zip(alive.items(), rows_at(trace.storages, alive), strict=True)
    return sum(size for (index, size), storage in storages if storage.role in FIXED or from_optimizer(index))
