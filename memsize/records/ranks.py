"""`RankRuns`: several ranks of one distributed program beside one another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar, Literal

from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.program import ProgramRun
from memsize.records.roles import in_order

Which = Literal["all", "distinct"]
"""Which ranks are run: all, or those by which it shows that the others are the same."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold the same: `ran` were run, of which `run` is the first; `between` are ranks between such."""

    ran: tuple[int, ...]
    run: ProgramRun
    between: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them in order."""
        return tuple(sorted((*self.ran, *self.between)))


@dataclass(frozen=True, repr=False)
class RankRuns(Answer):
    """The ranks of a program on `size` GPUs of `nodes` machines: one group for each kind, by its first rank."""

    kind: ClassVar = "ranks"

    size: int
    nodes: int
    groups: tuple[RankGroup, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def worst(self) -> RankGroup:
        """The ranks that run out of memory, or else those that need most."""
        return max(self.groups, key=_need)

    @property
    def neediest(self) -> tuple[int, ...]:
        """The ranks that need as much as the worst: their figures are the same, though not all they hold is."""
        worst = _need(self.worst)
        return tuple(sorted(rank for group in self.groups if _need(group) == worst for rank in group.ranks))

    @property
    def least(self) -> RankGroup:
        """The ranks that need least."""
        return min(self.groups, key=_need)

    @property
    def noun(self) -> str:
        """What is counted: the ranks of a job, or the GPUs of one process."""
        return "GPU" if self.groups[0].run.trace.world.one_process else "rank"

    def named(self, group: RankGroup) -> str:
        """The ranks of a group inside a sentence."""
        return self.counted(group.ranks)

    def counted(self, ranks: Collection[int]) -> str:
        """Ranks inside a sentence: ``rank 3``, ``GPUs 1–3``."""
        return f"{self.noun}{'' if len(ranks) == 1 else 's'} {spans(ranks)}"

    @property
    def program(self) -> str:
        """The program's command line."""
        return self.groups[0].run.program

    def tables(self) -> dict[str, FlatTable]:
        """`ranks`: one row for each rank; `tensors`: the largest alive at the peak of the worst."""
        roles = in_order(role for group in self.groups for role in group.run.peak.roles)
        sizes = ("requested", "allocated", "reserved", "device_low", "device_high", *roles)
        rows = sorted(self._row(group, rank, roles) for group in self.groups for rank in group.ranks)
        return {"ranks": FlatTable(("rank", "node", "ran", *sizes), rows, sizes), **self.worst.run.tables()}

    def _row(self, group: RankGroup, rank: int, roles: Iterable[str]) -> tuple[object, ...]:
        peak = group.run.peak
        node = rank // (self.size // self.nodes)
        sizes = (peak.roles.get(role, 0) for role in roles)
        totals = (peak.requested, peak.allocated, peak.reserved, *peak.device)
        return (rank, node, rank in group.ran, *totals, *sizes)


def _need(group: RankGroup) -> tuple[bool, int, int]:
    run = group.run
    return bool(run.refused), run.peak.device.high, run.peak.requested


def spans(ranks: Iterable[int]) -> str:
    """Ranks in as few words as they have: ``0``, ``1–6``, ``0, 2 and 5–7``."""
    found = sorted(ranks)
    starts = [found[0], *(after for before, after in pairwise(found) if after != before + 1)]
    ends = [*(before for before, after in pairwise(found) if after != before + 1), found[-1]]
    runs = zip(starts, ends, strict=True)
    *first, last = chain.from_iterable([f"{a}–{b}"] if b > a + 1 else map(str, range(a, b + 1)) for a, b in runs)
    return f"{', '.join(first)} and {last}" if first else last
