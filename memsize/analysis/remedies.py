"""Find the remedies that make a run fit: measure each alone, then the fewest that fit together.

A remedy turns a variant, one way to run a model, into another that may need less memory. Every variant is measured, no
saving is estimated. Callers supply the table of remedies and the function that measures: steps, generations, servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Remedied, RemedyRow
from memsize.units import format_bytes

Variant = TypeVar("Variant")

Changes = Literal["nothing", "speed", "numbers", "training", "hardware"]
"""What a remedy changes besides memory: nothing that matters, the speed, the rounding, what is learnt, or the GPUs."""

_LAST: Final = ("training", "hardware")
"""Changes that nobody has to make where a remedy without them is enough."""
_NOTICEABLE: Final = 1000
"""A remedy helps if it saves at least such a fraction of what is needed without it."""
_MOST_PAIRS: Final = 4
"""How many pairs are measured where more than two remedies would be needed otherwise."""


class NotApplicable(Exception):  # noqa: N818
    """The reason why a remedy does not apply to a variant. Never leaves the search for remedies."""


_REFUSALS: Final = (NotApplicable, ForwardError, ScenarioError, InputError)


@dataclass(frozen=True, slots=True)
class Remedy(Generic[Variant]):
    """One way to need less memory.

    `apply` returns the variant with the remedy; it raises `NotApplicable` with the reason where that is meaningless.
    `cost` tells users what they pay. Of remedies that share a group, one is taken at most.
    """

    name: str
    title: str
    cost: str
    changes: Changes
    apply: Callable[[Variant], Variant]
    groups: frozenset[str] = frozenset()


class Need(NamedTuple):
    """The bytes that a variant needs, the bytes that it may take, and those of the `host` that it offloads to.

    `recomputed` is the share of the forward's products that its backward computes again; None if it is not known.
    """

    bytes: int
    capacity: int
    host: int = 0
    recomputed: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.bytes <= self.capacity


class Ladder(NamedTuple, Generic[Variant]):
    """Remedies of one kind, cheapest first (2 GPUs, 4 GPUs, …). The first that is enough is shown.

    `until` says which one is shown where none is. ``"last"``: the last. ``"refusal"``: the first that does not apply,
    else the last. ``"no gain"``: the one before the first that does not save more, if any. ``"enough"``: none, and
    ``"searched"`` too, of remedies that save more and more, most of which are not measured.
    """

    remedies: Iterable[Remedy[Variant]]
    until: Literal["last", "refusal", "no gain", "enough", "searched"]


Trial = tuple[Remedy[Variant], RemedyRow]
"""A remedy, and its effect alone."""


@dataclass
class RemedySearch(Generic[Variant]):
    """The search for remedies of the variant `base`. A remedy helps if it saves at least `least_saving` bytes."""

    base: Variant
    measure: Callable[[Variant], Need]
    least_saving: int = 1

    @cached_property
    def need(self) -> Need:
        return self.measure(self.base)

    def alone(self, remedy: Remedy[Variant]) -> RemedyRow:
        columns = (remedy.name, remedy.title, remedy.cost, remedy.changes)
        without = self.need
        try:
            need = self._need_with([remedy])
        except _REFUSALS as error:
            return RemedyRow(*columns, "not here", reason=str(error))
        saved = without.bytes - need.bytes
        if need.host:
            columns = (*columns[:2], f"{remedy.cost}; {format_bytes(need.host)} of the host's memory", remedy.changes)
        helps = saved + need.capacity - without.capacity >= max(self.least_saving, without.bytes // _NOTICEABLE)
        outcome: Literal["fits", "saves", "no help"] = "saves" if helps else "no help"
        outcome = "fits" if need.fits and not without.fits else outcome
        return RemedyRow(*columns, outcome, need.bytes, saved, recomputed=need.recomputed)

    def climb(self, ladder: Ladder[Variant]) -> Trial[Variant] | None:
        """Try the remedies of a ladder until one is enough."""
        if ladder.until == "searched":
            return self._searched(list(ladder.remedies))
        last: Trial[Variant] | None = None
        for remedy in ladder.remedies:
            row = self.alone(remedy)
            gains = row.peak is not None and (not last or row.peak <= (last[1].peak or 0) - self.least_saving)
            if ladder.until == "no gain" and not gains:
                break
            last = remedy, row
            if row.outcome == "fits" or (row.outcome == "not here" and ladder.until == "refusal"):
                return last
            if self.need.fits:  # the first remedy shows what the kind does
                break
        return None if ladder.until == "enough" else last

    def _searched(self, remedies: Sequence[Remedy[Variant]]) -> Trial[Variant] | None:
        """The first remedy that is enough: guessed as if savings grew evenly, then narrowed down to one."""
        if self.need.fits:
            return None
        rows = cache(lambda index: self.alone(remedies[index]))
        below, above = -1, len(remedies) - 1
        least, most = self.need.bytes, rows(above).peak
        if rows(above).outcome != "fits" or most is None:
            return None
        while above - below > 1:
            evenly = -(-(least - self.need.capacity) * (above - below) // max(least - most, 1))
            index = min(max(below + evenly, below + 1), above - 1)
            row = rows(index)
            if row.outcome == "fits":
                above, most = index, row.peak or most
            else:
                below, least = index, row.peak or least
        return remedies[above], rows(above)

    def together(self, trials: Sequence[Trial[Variant]]) -> tuple[tuple[str, ...], int | None]:
        """Find a few remedies that fit together, and the bytes needed with them; ``(), None`` if there are none.

        Remedies are added in the order of their savings, those that change the training last, and removed if not needed
        after all. If more than two remain, pairs whose savings add up to enough are tried. One that changes the
        training and is enough alone needs no others.
        """
        chosen: list[Remedy[Variant]] = []
        needed, capacity = self.need.bytes, self.need.capacity
        for remedy, row in sorted(trials, key=lambda trial: trial[0].changes == "training"):
            if needed <= capacity:
                break
            if row.outcome == "fits":
                return (remedy.name,), row.peak
            if not any(remedy.groups & other.groups for other in chosen):
                with_it = self._bytes_below([*chosen, remedy], limit=needed)
                if with_it is not None:
                    chosen, needed = [*chosen, remedy], with_it
        if needed > capacity:
            return (), None
        for remedy in tuple(chosen[:-1]):
            fewer = [other for other in chosen if other is not remedy]
            if (with_fewer := self._bytes_below(fewer, limit=capacity + 1)) is not None:
                chosen, needed = fewer, with_fewer
        if len(chosen) > 2:
            chosen, needed = self._pair(trials, chosen) or (chosen, needed)
        return tuple(remedy.name for remedy in chosen), needed

    def _pair(
        self, trials: Sequence[Trial[Variant]], chosen: Sequence[Remedy[Variant]]
    ) -> tuple[list[Remedy[Variant]], int] | None:
        """Find two remedies that fit together. They change the training only if one of `chosen` does."""
        trains = any(remedy.changes == "training" for remedy in chosen)
        savings = [(remedy, row.saved or 0) for remedy, row in trials if trains or remedy.changes != "training"]
        pairs = [(one, two) for one, two in combinations(savings, 2) if not one[0].groups & two[0].groups]
        excess = self.need.bytes - self.need.capacity
        promising = [pair for pair in pairs if sum(saved for _, saved in pair) >= excess]
        for pair in sorted(promising, key=lambda pair: -sum(saved for _, saved in pair))[:_MOST_PAIRS]:
            remedies = [remedy for remedy, _ in pair]
            needed = self._bytes_below(remedies, limit=self.need.capacity + 1)
            if needed is not None:
                return remedies, needed
        return None

    def _need_with(self, remedies: Sequence[Remedy[Variant]]) -> Need:
        variant = self.base
        for remedy in remedies:
            variant = remedy.apply(variant)
        return self.measure(variant)

    def _bytes_below(self, remedies: Sequence[Remedy[Variant]], limit: int) -> int | None:
        """The bytes needed with some remedies together; None if `limit` or more, or if they do not go together."""
        try:
            needed = self._need_with(remedies).bytes
        except _REFUSALS:
            return None
        return needed if needed < limit else None


def try_remedies(
    search: RemedySearch[Variant],
    remedies: Sequence[Remedy[Variant]],
    ladders: Iterable[Ladder[Variant]] = (),
    *,
    scenario: str,
    gpu: str,
    size: int,
    rows: Iterable[RemedyRow] | None = None,
    combine: bool = True,
) -> Remedied:
    """Try each remedy and each ladder, and with `combine` several together where no acceptable one is enough.

    `rows` are the rows of `remedies` if they have been measured already; `scenario`, `gpu` and `size` label the result,
    whose rows are sorted by the bytes saved, most first.
    """
    measured = [search.alone(remedy) for remedy in remedies] if rows is None else rows
    trials = list(zip(remedies, measured, strict=True))
    names = {remedy.name for remedy in remedies}
    trials += [trial for ladder in ladders if (trial := search.climb(ladder)) and trial[0].name not in names]
    trials.sort(key=lambda trial: -(trial[1].saved or 0))
    combination: tuple[tuple[str, ...], int | None] = (), None
    enough = any(row.outcome == "fits" and row.changes not in _LAST for _, row in trials)
    if combine and not search.need.fits and not enough:
        helpful = [trial for trial in trials if trial[1].outcome in ("fits", "saves")]
        combination = search.together([trial for trial in helpful if trial[0].changes != "hardware"])
    table = tuple(row for _, row in trials)
    return Remedied(scenario, gpu, size, search.need.capacity, search.need.bytes, table, *combination)
