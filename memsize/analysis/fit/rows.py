"""What a row says of its runs: whether one size fits, or the largest that does and how memory grows there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memsize.analysis.fit.crossovers import most_alive
from memsize.analysis.fit.footprint import Footprint, bind, phase_name
from memsize.analysis.fit.run_cache import RunCache, RunVariant
from memsize.analysis.fit.search import Search
from memsize.records.fit import Budget, FitRow, Status
from memsize.records.roles import FIXED, Role


def asked_row(trials: RunCache, variant: RunVariant, row: FitRow, size: int) -> FitRow:
    """Whether one size fits."""
    run = trials.run(variant, size)
    return replace(
        row,
        status="fits" if run.fits(row.budget) else "exceeds",
        size=size,
        peak=run.needs(row.budget),
        fixed=_fixed(run),
        standing=_standing(run),
        bind=bind(run, None),
        looked=(size,),
    )


def growing_row(found: Search, row: FitRow, *, linear: bool) -> FitRow:
    """`row` with what a search found; `linear` where memory grows by as much with each size."""
    low, high = found.largest, found.above
    growth = _growth(found, linear)
    return replace(
        row,
        status=_status(found),
        reason=found.ceiling,
        size=low.size if low else None,
        peak=low.needs(row.budget) if low else None,
        next_size=found.bound,
        next_peak=high.needs(row.budget) if high else None,
        per_step=growth.per_step if growth else None,
        fixed=growth.fixed if growth else None,
        grows_in=growth.phase if growth else "",
        bind=bind(high, row.budget if low else None) if high else None,
        standing=_standing(run) if (run := high or low) else {},
        looked=found.looked,
        step=found.step,
        refused=found.refused,
        monotone=found.monotone,
    )


def likely_size(rows: Sequence[FitRow], scenario: str, budget: Budget, budgets: Sequence[Budget]) -> int | None:
    """About what the row of a scenario on `budget` will say, from those of scenarios like it before; else from those of
    fewer GPUs, on which it holds more. None where neither is known.
    """
    before = [row for row in rows if row.status in ("found", "none")]
    if same := next((row for row in reversed(before) if row.gpu == budget.name), None):
        return same.size or 1
    numbers = {each.name: each.gpus for each in budgets if (each.strategy, each.one) == (budget.strategy, budget.one)}
    fewer = [row for row in before if row.scenario == scenario and numbers.get(row.gpu, budget.gpus) < budget.gpus]
    if not fewer:
        return None
    last = fewer[-1]
    if last.size is None or not last.per_step:
        return last.size or 1
    freed = _freed(fewer[-2], last, numbers, budget.gpus) if len(fewer) > 1 else 0
    return last.size + max((last.headroom or 0) + freed, 0) // last.per_step


def _freed(before: FitRow, last: FitRow, numbers: Mapping[str, int], gpus: int) -> int:
    """How much less than in the `last` row is held on so many `gpus`, by the line through it and the one `before`: what
    is sharded shrinks as the share of each GPU does, and the rest stays.
    """
    held, holds = sum(before.standing.values()), sum(last.standing.values())
    shares = 1 / numbers[before.gpu], 1 / numbers[last.gpu]
    return round((held - holds) / (shares[0] - shares[1]) * (shares[1] - 1 / gpus))


def _status(found: Search) -> Status:
    if found.largest is None:
        return "none"
    if found.endless:
        return "constant" if _constant(found) else "endless"
    if not found.closed:
        return "open"
    return "found" if found.above else "refused"


def _constant(found: Search) -> bool:
    """Whether all runs need the same memory apart from their input."""
    beside = {_beside_input(run) for run in found.runs.values()}
    return len(found.runs) > 1 and len(beside) == 1


def _beside_input(run: Footprint) -> int:
    trace = run.trace
    return most_alive(trace, run.pairs, {storage.role for storage in trace.storages} - {"input"})


class _Growth(NamedTuple):
    """What one more sample or position adds at the moment of the peak, what it does not depend on, and the phase."""

    per_step: int | None
    fixed: int
    phase: str


def _growth(found: Search, linear: bool) -> _Growth | None:
    """How memory grows at the peak of the next size, or of the answer where there is none.

    Another run is compared at that very moment, not at its own peak: as a batch grows the peak leaves the optimizer,
    and a line through both would be of neither.
    """
    run = found.above or found.largest
    if run is None:
        return None
    event, least = run.unbounded.requested.event, _fixed(run)
    trace = run.trace
    label = trace.phases[trace.events[event].phase]
    beside = _beside(run, found.runs.values(), event, label)
    per_step = None if beside is None else (run.requested - beside[1]) // (run.size - beside[0])
    if per_step is None or per_step < 0:
        return _Growth(None, least, phase_name(label))
    fixed = max(run.requested - run.size * per_step, least) if linear else least
    return _Growth(per_step, fixed, phase_name(label))


def _beside(run: Footprint, others: Iterable[Footprint], event: int, label: str) -> tuple[int, int] | None:
    """The size of the nearest other run, and what it holds at the moment of `event`.

    That is the same event of a run that made the same events; where there is none, the highest moment of its phase.
    """
    apart = sorted((other for other in others if other.size != run.size), key=lambda o: abs(o.size - run.size))
    alike = next((other for other in apart if other.shape == run.shape), None)
    if alike:
        return alike.size, alike.live(event)
    return next(((other.size, most) for other in apart if (most := other.most(label)) is not None), None)


def _standing(run: Footprint) -> dict[Role, int]:
    """What the model and its training hold at the peak, by role."""
    return {role: size for role, size in bind(run, None).roles.items() if role in FIXED}


def _fixed(run: Footprint) -> int:
    """What certainly does not depend on the size at the peak: what stands, and what the optimizer itself made."""
    trace, flow = run.trace, run.flow
    event = run.unbounded.requested.event
    phase = trace.events[event].phase
    of_optimizer = phase_name(trace.phases[phase]) == "optimizer"

    def stays(storage: int) -> bool:
        made_here = of_optimizer and trace.events[flow.born(storage)].phase == phase
        return made_here or trace.storages[storage].role in FIXED

    return sum(size for storage, size in flow.alive(event).items() if stays(storage))
