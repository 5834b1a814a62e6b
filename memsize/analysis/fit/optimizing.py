"""Which remedies help at one size, and the smallest set of them that fits: each run, none taken on trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from memsize.analysis.fit.case import Case, NotApplicable
from memsize.analysis.fit.footprint import Footprint
from memsize.analysis.fit.optimizations import REMEDIES, Remedy, split
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Remedied, RemedyRow

Run = Callable[[Case], Footprint]
"""Runs a case at the size that was asked about."""

Tried = tuple[Remedy, RemedyRow]
"""A remedy, and what it did alone."""

_MOST_PARTS: Final = 64
_PAIRS: Final = 4
"""How many pairs are run where more than two remedies were needed otherwise."""
_GRAIN: Final = 2 << 20
"""What saves less than one segment saves nothing that the GPU would notice."""


def try_remedies(run: Run, base: Case, size: int, capacity: int, gpu: str, *, parts: bool) -> Remedied:
    """Every remedy at one size of `base`, most bytes saved first, and what fits together where none does alone.

    `parts` is whether the size is a batch that can be split.
    """
    peak = run(base).needs(capacity)
    tried = [_tried(run, base, remedy, peak, capacity) for remedy in REMEDIES]
    if parts and base.training is not None and size > 1:
        tried.append(_split(run, base, size, peak, capacity))
    tried.sort(key=lambda pair: -(pair[1].saved or 0))
    rows = tuple(row for _, row in tried)
    helpful = [(remedy, row) for remedy, row in tried if row.outcome in ("fits", "saves")]
    combination: tuple[str, ...] = ()
    combined: int | None = None
    if peak > capacity and not any(row.outcome == "fits" and row.changes != "training" for row in rows):
        combination, combined = _combined(run, base, helpful, peak, capacity)
    return Remedied(base.scenario.name, gpu, size, capacity, peak, rows, combination, combined)


def _tried(run: Run, base: Case, remedy: Remedy, peak: int, capacity: int) -> Tried:
    said = (remedy.name, remedy.title, remedy.cost, remedy.changes)
    try:
        found = run(_with(base, remedy))
    except (NotApplicable, ForwardError, ScenarioError, InputError) as error:
        return remedy, RemedyRow(*said, "not here", reason=str(error))
    needs = found.needs(capacity)
    saved = peak - needs
    fits = needs <= capacity < peak
    outcome = "fits" if fits else "saves" if saved >= _GRAIN else "no help"
    return remedy, RemedyRow(*said, outcome, needs, saved)  # type: ignore[arg-type]


def _with(case: Case, remedy: Remedy) -> Case:
    return replace(remedy.apply(case), applied=(*case.applied, remedy.name))


def _split(run: Run, base: Case, size: int, peak: int, capacity: int) -> Tried:
    """The fewest parts, in powers of two, with which the batch fits; the last that were tried where it never does."""
    parts = 2
    while True:
        tried = _tried(run, base, split(parts), peak, capacity)
        if tried[1].outcome == "fits" or peak <= capacity or 2 * parts > min(size, _MOST_PARTS):
            return tried
        parts *= 2


def _combined(
    run: Run, base: Case, helpful: Sequence[Tried], peak: int, capacity: int
) -> tuple[tuple[str, ...], int | None]:
    """A few remedies that fit together, and what is needed with them.

    They are added in the order of what each saves alone, those that change what is learnt last; then those that turn
    out not to be needed are left out again. Where that leaves more than two, pairs whose savings add up are tried.
    """
    chosen: list[Remedy] = []
    needs = peak
    for remedy, _ in sorted(helpful, key=lambda pair: pair[0].changes == "training"):
        if any(remedy.groups & other.groups for other in chosen):
            continue
        with_it = _needs(run, base, [*chosen, remedy], capacity)
        if with_it is not None and with_it < needs:
            chosen, needs = [*chosen, remedy], with_it
        if needs <= capacity:
            break
    if needs > capacity:
        return (), None
    for remedy in tuple(chosen[:-1]):
        without = [other for other in chosen if other is not remedy]
        fewer = _needs(run, base, without, capacity)
        if fewer is not None and fewer <= capacity:
            chosen, needs = without, fewer
    if len(chosen) > 2:
        chosen, needs = _pair(run, base, helpful, peak, capacity, chosen) or (chosen, needs)
    return tuple(remedy.name for remedy in chosen), needs


def _pair(
    run: Run, base: Case, helpful: Sequence[Tried], peak: int, capacity: int, chosen: Sequence[Remedy]
) -> tuple[list[Remedy], int] | None:
    """Two remedies that fit together, of those whose savings add up to enough; None where none of the first few do.

    What is learnt stays as it is where `chosen` leaves it so.
    """
    learns = any(remedy.changes == "training" for remedy in chosen)
    allowed = [(remedy, row.saved or 0) for remedy, row in helpful if learns or remedy.changes != "training"]
    pairs = [(one, two) for one, two in combinations(allowed, 2) if not one[0].groups & two[0].groups]
    enough = [pair for pair in pairs if peak - sum(saved for _, saved in pair) <= capacity]
    for pair in sorted(enough, key=lambda pair: -sum(saved for _, saved in pair))[:_PAIRS]:
        remedies = [remedy for remedy, _ in pair]
        needs = _needs(run, base, remedies, capacity)
        if needs is not None and needs <= capacity:
            return remedies, needs
    return None


def _needs(run: Run, base: Case, remedies: Sequence[Remedy], capacity: int) -> int | None:
    """What a set of remedies needs together; None where they don't go together."""
    case = base
    try:
        for remedy in remedies:
            case = _with(case, remedy)
        return run(case).needs(capacity)
    except (NotApplicable, ForwardError, ScenarioError, InputError):
        return None
