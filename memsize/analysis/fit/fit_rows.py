"""Build the rows of a fit from runs: whether one size fits, or the largest that does and how memory grows there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    last = fewer[-1]
    if last.size is None or not last.per_step:
        return last.size or 1
    freed = _freed(fewer[-2], last, gpus_of=gpus, gpus=budget.gpus) if len(fewer) > 1 else 0
    return last.size + max((last.headroom or 0) + freed, 0) // last.per_step


def _freed(before: FitRow, last: FitRow, *, gpus_of: Mapping[str, int], gpus: int) -> int:
    """Extrapolate how many bytes fewer a GPU stores on `gpus` GPUs than in the `last` row, from a row on fewer GPUs
    `before` it: sharded tensors shrink with the share of each GPU, others stay.
    """
    fixed_before, fixed_last = sum(before.standing.values()), sum(last.standing.values())
    shares = 1 / gpus_of[before.gpu], 1 / gpus_of[last.gpu]
    return round((fixed_before - fixed_last) / (shares[0] - shares[1]) * (shares[1] - 1 / gpus))


def _status(search: Search) -> Status:
    if search.largest_run is None:
        return "none"
    if search.endless:
        return "constant" if _is_constant(search) else "endless"
    if not search.closed:
        return "open"
    return "found" if search.next_run else "refused"


def _is_constant(search: Search) -> bool:
    """Whether all runs need the same memory apart from their input."""
    sizes = {_without_input(run) for run in search.runs.values()}
    return len(search.runs) > 1 and len(sizes) == 1


def _without_input(run: Footprint) -> int:
    trace = run.trace
    return most_alive(trace, run.pairs, {storage.role for storage in trace.storages} - {"input"})


class _Growth(NamedTuple):
    """The bytes that each further size adds at the peak, the bytes that do not grow, and the phase of the peak."""

    per_step: int | None
    fixed: int
    phase: str


def _growth(search: Search, linear: bool) -> _Growth | None:
    """Compare the peak of the next size (or of the answer, if there is none) with another run.

    The other run is compared at the same moment, not at its own peak: as a batch grows the peak moves out of the
    optimizer, and a line through both peaks would describe neither phase.
    """
    run = search.next_run or search.largest_run
    if run is None:
        return None
    event, least = run.unbounded.requested.event, _fixed(run)
    trace = run.trace
    label = trace.phases[trace.events[event].phase]
    beside = _at_same_moment(run, search.runs.values(), event=event, label=label)
    per_step = None if beside is None else (run.requested - beside[1]) // (run.size - beside[0])
    if per_step is None or per_step < 0:
        return _Growth(None, least, phase_name(label))
    fixed = max(run.requested - run.size * per_step, least) if linear else least
    return _Growth(per_step, fixed, phase_name(label))


def _at_same_moment(run: Footprint, others: Iterable[Footprint], *, event: int, label: str) -> tuple[int, int] | None:
    """Return the size of the nearest other run, and its live bytes at the moment of `event`.

    In a run that made the same events this is the same event; in others, the highest moment of the phase `label`.
    """
    apart = sorted((other for other in others if other.size != run.size), key=lambda o: abs(o.size - run.size))
    alike = next((other for other in apart if other.shape == run.shape), None)
    if alike:
        return alike.size, alike.live(event)
    return next(((other.size, most) for other in apart if (most := other.most(label)) is not None), None)


def _fixed_roles(run: Footprint) -> dict[Role, int]:
    """Return the bytes of the model and its training at the peak, by role."""
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
