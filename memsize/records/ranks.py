"""`RankRuns`: several ranks of one distributed program beside one another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Annotated, ClassVar, Final, NamedTuple

from memsize.records.answer import Answer
from memsize.records.codec import NotEmpty
from memsize.records.fields import Fields, FlatTable, Label, field, role_fields
from memsize.records.finding import Finding, moment_in_words
from memsize.records.program import ProgramRun
from memsize.records.world import World


@dataclass(frozen=True)
class RankGroup:
    """Ranks with the same memory: `ran` were run, `run` is the run of the first; `between` are ranks between those."""

    ran: Annotated[tuple[int, ...], NotEmpty()]
    run: ProgramRun
    between: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them in order."""
        return tuple(sorted((*self.ran, *self.between)))


class RankRow(NamedTuple):
    """One rank, the machine that it is on, and the group that shows what it holds."""

    rank: int
    node: int
    group: RankGroup


RANK_FIELDS: Final = Fields[RankRow](
    field("rank", kind="count"),
    field("node", kind="count"),
    field("ran", get=lambda row: row.rank in row.group.ran),
    field("requested", kind="bytes", get="group.run.peak.requested"),
    field("allocated", kind="bytes", get="group.run.peak.allocated"),
    field("reserved", kind="bytes", get="group.run.peak.reserved"),
    field("device_low", kind="bytes", get="group.run.peak.device.low"),
    field("device_high", kind="bytes", get="group.run.peak.device.high"),
)

GROUP_FIELDS: Final = Fields[RankGroup](
    field("ranks", "ranks", "name", 100, "ranks with equal memory", cell=lambda group, _: Label(spans(group.ranks))),
    field("ran", "run", "text", 60, "the ranks of the group that were run", get=lambda group: spans(group.ran)),
    field("requested", "tensors", "bytes", 98, "live bytes at the peak", get="run.peak.requested"),
    field("reserved", "reserved", "bytes", 97, "the allocator's segments at their peak", get="run.peak.reserved"),
    field("device", "GPU, at most", "bytes", 99, "upper bound of the figure in nvidia-smi at the peak"),
    field("phase", "in", "text", 96, "phase of the peak", alone="phase"),
    field("layer", "at", "path", 70, "the layer that runs then", alone="layer"),
    get={
        "device": "run.peak.device.high",
        "phase": lambda group: moment_in_words(group.run.peak.peak_phase, None, group.run.peak.peak_step),
        "layer": lambda group: group.run.peak.peak_layer or None,
    },
)


@dataclass(frozen=True, repr=False)
class RankRuns(Answer):
    """The ranks of a program on `size` GPUs of `nodes` machines: one group for each kind, by its first rank."""

    kind: ClassVar = "ranks"

    size: int
    nodes: int
    groups: Annotated[tuple[RankGroup, ...], NotEmpty()]
    findings: tuple[Finding, ...] = ()

    def validate(self) -> None:
        """Raise `InputError` unless so many ranks can be spread evenly over so many machines."""
        World(self.size, 0, self.nodes)

    @property
    def worst(self) -> RankGroup:
        """The ranks that run out of memory, or else those that need most."""
        return max(self.groups, key=_need)

    @property
    def neediest(self) -> tuple[int, ...]:
        """All ranks whose figures equal those of the worst group, although their tensors may differ."""
        worst = _need(self.worst)
        return tuple(sorted(rank for group in self.groups if _need(group) == worst for rank in group.ranks))

    @property
    def least(self) -> RankGroup:
        """The ranks that need least."""
        return min(self.groups, key=_need)

    @property
    def noun(self) -> str:
        """The noun for the members of `groups`: ``GPU`` where one process drives all GPUs, else ``rank``."""
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
        runs = [(rank, group) for group in self.groups for rank in group.ranks]
        rows = [
            RankRow(rank, rank // (self.size // self.nodes), group) for rank, group in sorted(runs, key=itemgetter(0))
        ]
        roles = role_fields([group.run.peak.roles for group in self.groups], of="group.run.peak.roles")
        return {"ranks": RANK_FIELDS.plus(*roles).flat(rows), **self.worst.run.tables()}


def _need(group: RankGroup) -> tuple[bool, int, int]:
    run = group.run
    return bool(run.refused), run.peak.device.high, run.peak.requested


def spans(ranks: Iterable[int]) -> str:
    """Ranks in as few words as they have: ``0``, ``1–6``, ``0, 2 and 5–7``."""
    numbers = sorted(ranks)
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    runs = zip(starts, ends, strict=True)
    *first, last = chain.from_iterable([f"{a}–{b}"] if b > a + 1 else map(str, range(a, b + 1)) for a, b in runs)
    return f"{', '.join(first)} and {last}" if first else last
