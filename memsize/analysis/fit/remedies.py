"""Which optimizations help at one size: each is really run, alone and together with others; none is taken on trust."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Final

from memsize.analysis.fit.footprint import Footprint
from memsize.analysis.fit.optimizations import Optimization, in_parts, on
from memsize.analysis.fit.parallel_strategies import more_gpus, optimizations_of
from memsize.analysis.fit.run_cache import NewRuns, NotApplicable, RunCache, RunVariant
from memsize.device.budget import larger_budgets
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.processes.workers import Workers
from memsize.records.fit import Budget, Remedied, RemedyRow

Run = Callable[[RunVariant], Footprint]
"""Runs a variant at the size that was asked about."""
Tried = tuple[Optimization, RemedyRow]
"""An optimization, and what it did alone."""

_LAST: Final = ("training", "hardware")
"""What is not changed where anything else is enough."""
_MOST_PARTS: Final = 64
_PAIRS: Final = 4
"""How many pairs are run where more than two optimizations would be needed otherwise."""
_GRAIN: Final = 2 << 20
"""An optimization that saves less than one segment saves nothing that shows on the GPU."""


class Tries:
    """Optimizations of the variants of `trials`, each tried in whichever process has time for it."""

    def __init__(self, trials: RunCache) -> None:
        self.trials = trials

    def alone(self, base: RunVariant, size: int, capacity: int, name: str) -> tuple[RemedyRow, NewRuns]:
        """What the optimization `name` does to a size of `base`, and the runs that it took."""
        before = self.trials.made()
        optimization = next(each for each in optimizations_of(base) if each.name == name)
        attempts = Attempts(lambda variant: self.trials.run(variant, size), base, capacity)
        return attempts.alone(optimization), self.trials.made(before)

    def remedied(self, workers: Workers, base: RunVariant, size: int, budget: Budget, *, parts: bool) -> Remedied:
        """What each does to a size of `base`, found by `workers` of these tries; `parts` is as for
        `try_optimizations`.
        """
        trials, alone = self.trials, []
        names = [each.name for each in optimizations_of(base)]
        for remedy, made in workers.each([("alone", base, size, budget.allocator, each) for each in names]):
            alone.append(remedy)
            trials.adopt(made)
        larger = larger_budgets(budget, trials.stack) if trials.generates else ()
        attempts = Attempts(lambda variant: trials.run(variant, size), base, budget.allocator, larger)
        return try_optimizations(attempts, size, budget.name, parts=parts, alone=alone)


def try_optimizations(
    attempts: Attempts, size: int, gpu: str, *, parts: bool, alone: Iterable[RemedyRow] | None = None
) -> Remedied:
    """Every optimization at one size, most bytes saved first, and what fits together where none does alone.

    `parts` is whether the size is a batch that can be split, `alone` what each optimization was found to do.
    """
    base, capacity = attempts.base, attempts.capacity
    optimizations = optimizations_of(base)
    rows = map(attempts.alone, optimizations) if alone is None else alone
    tried = list(zip(optimizations, rows, strict=True))
    if parts and (base.training or base.generation) and size > 1:
        tried.append(attempts.split(size))
    if attempts.larger and attempts.peak > capacity:
        tried += filter(None, [attempts.moved()])
    tried += filter(None, [attempts.on_more_gpus()])
    tried.sort(key=lambda pair: -(pair[1].saved or 0))
    together: tuple[tuple[str, ...], int | None] = (), None
    enough = any(row.outcome == "fits" and row.changes not in _LAST for _, row in tried)
    if attempts.peak > capacity and not enough:
        helpful = [(each, row) for each, row in tried if row.outcome in ("fits", "saves")]
        together = attempts.combined([(each, row) for each, row in helpful if each.changes != "hardware"])
    return Remedied(base.scenario.name, gpu, size, capacity, attempts.peak, tuple(row for _, row in tried), *together)


@dataclass
class Attempts:
    """Optimizations of one variant at one size, with `capacity` bytes for the allocator; `larger` are what other cards
    have, ascending.
    """

    run: Run
    base: RunVariant
    capacity: int
    larger: Sequence[Budget] = ()

    @cached_property
    def peak(self) -> int:
        """What is needed without any."""
        return self.run(self.base).needs(self.capacity)

    def needs(self, optimizations: Sequence[Optimization]) -> int:
        """What is needed with some together; raises `NotApplicable` or the model's own error where they don't go."""
        variant = self.base
        for each in optimizations:
            variant = replace(each.apply(variant), applied=(*variant.applied, each.name))
        return self.run(variant).needs(self.capacity)

    def alone(self, optimization: Optimization) -> RemedyRow:
        """What an optimization does without others."""
        said = (optimization.name, optimization.title, optimization.cost, optimization.changes)
        peak = self.peak
        try:
            needs = self.needs([optimization])
        except (NotApplicable, ForwardError, ScenarioError, InputError) as error:
            return RemedyRow(*said, "not here", reason=str(error))
        fits = needs <= self.capacity < peak
        outcome = "fits" if fits else "saves" if peak - needs >= _GRAIN else "no help"
        return RemedyRow(*said, outcome, needs, peak - needs)  # type: ignore[arg-type]

    def split(self, size: int) -> Tried:
        """The fewest parts, in powers of two, with which the batch fits; the last that were tried where it doesn't."""
        parts = 2
        while True:
            split = in_parts(parts, self.base)
            tried = self.alone(split)
            if tried.outcome == "fits" or self.peak <= self.capacity or 2 * parts > min(size, _MOST_PARTS):
                return split, tried
            parts *= 2

    def on_more_gpus(self) -> Tried | None:
        """The fewest GPUs, in powers of two times as many, on which it fits; the last that helped where it doesn't."""
        last: Tried | None = None
        for each in more_gpus(self.base):
            tried = self.alone(each)
            if tried.peak is None or (last and tried.peak > (last[1].peak or 0) - _GRAIN):
                break
            last = each, tried
            if tried.outcome == "fits" or self.peak <= self.capacity:
                break
        return last

    def moved(self) -> Tried | None:
        """The smallest larger card on which it fits; None where none is large enough."""
        for budget in self.larger:
            if budget.allocator >= self.peak:
                card = on(budget.card)
                needs = self.run(card.apply(self.base)).needs(budget.allocator)
                if needs <= budget.allocator:
                    return card, RemedyRow(
                        card.name, card.title, card.cost, card.changes, "fits", needs, self.peak - needs
                    )
        return None

    def combined(self, helpful: Sequence[Tried]) -> tuple[tuple[str, ...], int | None]:
        """A few optimizations that fit together, and what is needed with them.

        They are added in the order of what each saves alone, those that change what is learnt last; then those that
        turn out not to be needed are left out again. Where that leaves more than two, pairs whose savings add up are
        tried.
        """
        chosen: list[Optimization] = []
        needs = self.peak
        for each, _ in sorted(helpful, key=lambda pair: pair[0].changes == "training"):
            if any(each.groups & other.groups for other in chosen):
                continue
            with_it = self._needs_less([*chosen, each], than=needs)
            if with_it is not None:
                chosen, needs = [*chosen, each], with_it
            if needs <= self.capacity:
                break
        if needs > self.capacity:
            return (), None
        for each in tuple(chosen[:-1]):
            without = [other for other in chosen if other is not each]
            fewer = self._needs_less(without, than=self.capacity + 1)
            if fewer is not None:
                chosen, needs = without, fewer
        if len(chosen) > 2:
            chosen, needs = self._pair(helpful, chosen) or (chosen, needs)
        return tuple(each.name for each in chosen), needs

    def _pair(self, helpful: Sequence[Tried], chosen: Sequence[Optimization]) -> tuple[list[Optimization], int] | None:
        """Two that fit together, of those whose savings add up to enough; None where none of the first few do.

        What is learnt stays as it is where `chosen` leaves it so.
        """
        learns = any(each.changes == "training" for each in chosen)
        allowed = [(each, row.saved or 0) for each, row in helpful if learns or each.changes != "training"]
        pairs = [(one, two) for one, two in combinations(allowed, 2) if not one[0].groups & two[0].groups]
        enough = [pair for pair in pairs if self.peak - sum(saved for _, saved in pair) <= self.capacity]
        for pair in sorted(enough, key=lambda pair: -sum(saved for _, saved in pair))[:_PAIRS]:
            both = [each for each, _ in pair]
            needs = self._needs_less(both, than=self.capacity + 1)
            if needs is not None:
                return both, needs
        return None

    def _needs_less(self, optimizations: Sequence[Optimization], than: int) -> int | None:
        """What is needed with some together; None where that isn't less, or they don't go together."""
        try:
            needs = self.needs(optimizations)
        except (NotApplicable, ForwardError, ScenarioError, InputError):
            return None
        return needs if needs < than else None
