"""Find the sizes from which on something changes: autocast pays, activations outweigh parameters, the peak leaves the
optimizer.

A line or a forecast says where to look; runs of that size and of the one before decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

from memsize.analysis.findings.evidence import Crossover
from memsize.analysis.fit.footprint import Forecast, forecast, phase_name
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Crossing
from memsize.records.roles import Role
from memsize.records.trace import Trace
from memsize.spec.scenario import SCENARIOS, Scenario

if TYPE_CHECKING:
    from memsize.analysis.fit.run_cache import RunCache, RunVariant

FARTHEST: Final = 2**16
"""The largest size at which a crossing is looked for."""
_FARTHEST_BATCH: Final = 2**24
"""The same where a line says where to look."""
_LOOKS: Final = 6
"""How many sizes are measured around a predicted one: each takes a run or two of the model."""

Deltas = Sequence[tuple[int, int]]
"""The events of a run or of a forecast: a storage of the trace, and the bytes that it gains or loses."""


def find_crossover(measure: Callable[[int], tuple[int, int]], start: int) -> Crossover:
    """The smallest batch from which the second of `measure(batch)`'s figures is below the first.

    `measure` gives the bytes that both keep at a batch size; it is called a handful of times, once per batch size.
    """
    measured = cache(measure)

    def gap(batch: int) -> int:
        first, second = measured(batch)
        return second - first

    here, slope = gap(start), gap(start + 1) - gap(start)

    def foretold(batch: int) -> bool:
        return slope <= 0 and here + slope * (batch - start) < 0

    batch = first_size(foretold, lambda batch: gap(batch) < 0, _FARTHEST_BATCH)
    (first, second), following = measured(start), measured(start + 1)
    return Crossover(
        batch=batch,
        start=start,
        first=first,
        second=second,
        first_per_sample=following[0] - first,
        second_per_sample=following[1] - second,
    )


def first_size(foretold: Callable[[int], bool], measured: Callable[[int], bool], most: int) -> int | None:
    """The smallest size for which `measured` holds while it doesn't for the one before; None where none was found.

    `foretold` says where to look, up to `most`, and costs next to nothing.
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
            seen[size] = measured(size)
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
            size = _first_size(
                lambda size: with_it.requested(size) < ahead.requested(size),
                lambda size: runs.run(lower, size).requested < runs.run(variant, size).requested,
            )
            yield Crossing("autocast", size, name, plain.name)

    def crossing(kind: Literal["activations", "peak"], holds: Callable[[Trace, Deltas], bool]) -> Crossing:
        def measured(size: int) -> bool:
            run = runs.run(variant, size)
            return holds(run.trace, run.pairs)

        trace = ahead.runs[0].trace
        return Crossing(kind, _first_size(lambda size: holds(trace, ahead.pairs(size)), measured), plain.name)

    if variant.training is not None:
        yield crossing("activations", activations_outweigh)
        yield crossing("peak", peak_has_left_the_optimizer)


def _first_size(foretold: Callable[[int], bool], measured: Callable[[int], bool]) -> int | None:
    """Call `first_size`; at a size that the model refuses the condition does not hold yet."""

    def holds(size: int) -> bool:
        try:
            return measured(size)
        except ForwardError:
            return False

    return first_size(foretold, holds, FARTHEST)


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


def most_alive(trace: Trace, deltas: Deltas, roles: Collection[Role]) -> int:
    """Return the most bytes of some roles that are alive at one moment."""
    counted = [storage.role in roles for storage in trace.storages]
    return max(accumulate((delta for storage, delta in deltas if counted[storage]), initial=0))


def activations_outweigh(trace: Trace, deltas: Deltas) -> bool:
    """Whether more bytes of activations are alive at one moment than of parameters at any."""
    return most_alive(trace, deltas, {"activation"}) > most_alive(trace, deltas, {"parameter"})


def peak_has_left_the_optimizer(trace: Trace, deltas: Deltas) -> bool:
    """Whether the peak falls in another phase than the optimizer's step."""
    live = list(accumulate(delta for _, delta in deltas))
    event = trace.events[live.index(max(live))]
    return phase_name(trace.phases[event.phase]) != "optimizer"
