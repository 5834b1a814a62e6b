"""The history of a snapshot for its picture: the blocks, and the segments that they lie in, event by event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from memsize.analysis.explain.history import EARLIER, Category, History, Stage, own_calls
from memsize.analysis.explain.snapshot_file import Entry, Stack
from memsize.records.explanation import BlockHistory, BlockLife, MakingStack
from memsize.records.timeline import Phase, Segment

_PHASES: Final[Mapping[Stage, str]] = {
    "model": "model",
    "data": "data",
    "forward": "forward",
    "recomputation": "backward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""The phase of each stage; the others happen in any phase."""
_BEFORE: Final = "before the history"
_MAPS: Final = ("segment_alloc", "segment_map")
_UNMAPS: Final = ("segment_free", "segment_unmap")


class _Event(NamedTuple):
    entry: int
    life: int
    is_birth: bool


def block_history(history: History, categories: Sequence[Category], moment: int) -> BlockHistory | None:
    """The blocks of `history` by event, about the `moment` after an entry; None where nothing was recorded."""
    events = sorted(_events(history))
    if not history.entries or not events:
        return None
    entries = [event.entry for event in events]
    at = {(event.life, event.is_birth): number for number, event in enumerate(events)}
    stacks: dict[Stack, int] = {}
    blocks = [
        BlockLife(
            life.bytes,
            address=life.address,
            born=at[number, True],
            died=at.get((number, False)),
            category=categories[number].name,
            stack=stacks.setdefault(life.stack, len(stacks)),
        )
        for number, life in enumerate(history.lives)
    ]
    return BlockHistory(
        moment=max(bisect_left(entries, moment + 1) - 1, 0),
        blocks=tuple(blocks),
        segments=tuple(_segments(history, entries)),
        phases=tuple(_phases(history, events)),
        stacks=tuple(_making_stack(history, stack) for stack in stacks),
    )


def _events(history: History) -> Iterator[_Event]:
    for number, life in enumerate(history.lives):
        yield _Event(life.born, number, True)
        if life.died is not None:
            yield _Event(life.died, number, False)


def _making_stack(history: History, stack: Stack) -> MakingStack:
    summary = history.summary(stack)
    return MakingStack(summary.line or "", summary.function, own_calls(stack))


def _phases(history: History, events: Iterable[_Event]) -> Iterator[Phase]:
    """Stretches of events of one phase; what is given up belongs to the phase before it."""
    name, names = "run", []
    for event in events:
        if event.is_birth:
            stage = _PHASES.get(history.stage(history.lives[event.life].stack))
            name = _BEFORE if event.entry == EARLIER else stage or (name if name != _BEFORE else "run")
        names.append(name)
    start = 0
    for name, members in groupby(names):
        stop = start + sum(1 for _ in members)
        yield Phase(name, 0, start, stop)
        start = stop


def _segments(history: History, entries: Sequence[int]) -> Iterator[Segment]:
    """The memory that the allocator had before the history, and what it took and returned since."""
    changes = [(index, entry) for index, entry in enumerate(history.entries) if entry.action in (*_MAPS, *_UNMAPS)]
    stretches = [(segment.address, segment.address + segment.size) for segment in history.segments]
    for _, entry in reversed(changes):
        stretches = _before(entry, stretches)
    yield from (Segment(0, start, stop - start) for start, stop in sorted(stretches))
    for index, entry in changes:
        event = min(bisect_left(entries, index), len(entries) - 1)
        yield Segment(event, entry.address, entry.size if entry.action in _MAPS else -entry.size)


def _before(entry: Entry, stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches of memory before `entry`, of those after it."""
    first, last = entry.address, entry.address + entry.size
    if entry.action in _UNMAPS:
        return [*stretches, (first, last)]
    around = [part for start, stop in stretches for part in ((start, min(stop, first)), (max(start, last), stop))]
    return [(start, stop) for start, stop in around if start < stop]
