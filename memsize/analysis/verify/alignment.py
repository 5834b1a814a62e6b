"""Align a predicted log of allocations with a real one, to find the ops where they differ.

Allocations are matched by size and location, then by size where the locations differ, then by location where the sizes
differ. What is left over only one side has. Matched allocations that are freed at different moments differ too.

Two sequences are matched in order. What occurs once in both is an anchor (patience diff, Bram Cohen). Between anchors
the shortest edit is looked for (Myers, "An O(ND) Difference Algorithm", 1986) as long as it is cheap; beyond that the
k-th of a kind is matched with the k-th.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from memsize.records.measurement import NO_LOCATION, Allocation, AllocationLog, allocations
from memsize.records.verification import Alignment, AllocationDifference, DifferenceKind

IndexPair = tuple[int, int]
_BLOCK: Final = 512
"""Requests that the allocator rounds to the same multiple are the same allocation."""
_EFFORT: Final = 300_000
"""Steps that one search for a shortest edit may take: a few tenths of a second, and some 500 edits."""


def align(predicted: AllocationLog, real: AllocationLog) -> Alignment:
    """The differences between two logs of one step; swapping the logs swaps the two sides and changes nothing else."""
    first, second = allocations(predicted), allocations(real)
    turned = _order(second) < _order(first)  # so that ties fall the same way whichever log comes first
    pairs = [(a, b) for b, a in _pairs(second, first)] if turned else _pairs(first, second)
    in_order = sorted(_differences(first, second, pairs), key=lambda item: item[0])
    differences = tuple(difference for _, difference in in_order)
    return Alignment(len(first), real=len(second), matched=len(pairs), differences=differences)


def _blocks(allocation: Allocation) -> int:
    return -(-allocation.bytes // _BLOCK)


def _order(side: Sequence[Allocation]) -> tuple[object, ...]:
    return len(side), [(_blocks(one), one.place.phase, one.place.layer or "", one.place.op) for one in side]


_KEYS: Final[tuple[Callable[[Allocation], Hashable], ...]] = (
    lambda allocation: (_blocks(allocation), allocation.place),
    _blocks,
    lambda allocation: allocation.place if allocation.place != NO_LOCATION else id(allocation),
)
"""By what allocations are matched, in turn. Where no location was noted, only the size counts."""


def _pairs(first: Sequence[Allocation], second: Sequence[Allocation]) -> list[IndexPair]:
    pairs: list[IndexPair] = []
    for key in _KEYS:
        mine, theirs = list(map(key, first)), list(map(key, second))
        for window in list(gaps(pairs, Window.of(first, second))):
            if not window.one_sided:
                low, high, other_low, other_high = window
                matches = matched(mine[low:high], theirs[other_low:other_high])
                pairs += [(low + a, other_low + b) for a, b in matches]
        pairs.sort()
    return pairs


def _differences(
    first: Sequence[Allocation], second: Sequence[Allocation], pairs: Sequence[IndexPair]
) -> Iterator[tuple[tuple[int, int], AllocationDifference]]:
    """Each difference with where it stands: after how many matches, and how far after the last of them."""
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    for window in gaps(pairs, Window.of(first, second)):
        after = bisect_left(mine, window.low)
        for index, (size, location, _, at_peak) in enumerate(first[window.low : window.high]):
            yield (after, index), AllocationDifference("predicted only", location, size, None, at_peak)
        for index, (size, location, _, at_peak) in enumerate(second[window.other_low : window.other_high]):
            yield (after, index), AllocationDifference("real only", location, None, size, at_peak)

    def end(allocation: Allocation, matches: Sequence[int]) -> int:
        """Count the matched allocations before the end of this one; more than all where it has none."""
        return len(matches) + 1 if allocation.freed is None else bisect_left(matches, allocation.freed)

    for rank, (a, b) in enumerate(pairs):
        expected, observed = first[a], second[b]
        later = end(observed, theirs) - end(expected, mine)
        if later or expected.bytes != observed.bytes:
            kind: DifferenceKind = "freed later" if later > 0 else "freed earlier"
            kind = kind if expected.bytes == observed.bytes else "other size"
            at_peak = expected.at_peak or observed.at_peak
            yield (rank, -1), AllocationDifference(kind, expected.place, expected.bytes, observed.bytes, at_peak)


def levels_beside(
    real: Sequence[int], other: Sequence[int], keys: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None
) -> tuple[int, ...]:
    """The live bytes of another run at each event of a real one; of the events that share one here, the most.

    Both are the changes of live bytes, event by event. Their allocations are matched in order by the `keys` of their
    events, or else by size. Between two matches the other run is stretched, and behind the last its events follow one
    by one. No levels where less than half of the shorter run's allocations match.
    """
    mine, yours = keys or [[-(-change // _BLOCK) for change in run] for run in (real, other)]
    born, theirs = ([n for n, change in enumerate(run) if change > 0] for run in (real, other))
    pairs = matched([mine[n] for n in born], [yours[n] for n in theirs])
    if not pairs or 2 * len(pairs) < min(len(born), len(theirs)):
        return ()
    fixed = [(0, 0), *((born[a], theirs[b]) for a, b in pairs)]
    end, other_end = fixed[-1]
    left = min(len(real) - end, len(other) - other_end)
    fixed += [(end + left, other_end + left), (len(real), other_end + left)]
    live, levels = [*accumulate(other)], list[int]()
    for (start, first), (stop, last) in pairwise(fixed):
        edges = [first + event * (last - first) // (stop - start) for event in range(stop - start)] + [last]
        levels += (max(live[low : max(high, low + 1)] or live[-1:]) for low, high in pairwise(edges))
    return tuple(levels)


# -- matching two sequences -------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A stretch of both sequences: from `low` up to `high` of each."""

    low: int
    high: int
    other_low: int
    other_high: int

    @classmethod
    def of(cls, first: Sized, second: Sized) -> Window:
        """Return the window that has both sequences as a whole."""
        return cls(0, len(first), 0, len(second))

    @property
    def one_sided(self) -> bool:
        """Whether there is nothing to match."""
        return self.low == self.high or self.other_low == self.other_high


def matched(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[IndexPair]:
    """Pairs of places with equal elements, rising in both. Equal beginnings and ends are always matched."""
    return sorted(_matched(first, second, Window.of(first, second)))


def gaps(pairs: Sequence[IndexPair], whole: Window) -> Iterator[Window]:
    """The stretches of `whole` between `pairs` where one of the sequences has elements left."""
    low, other_low = whole.low, whole.other_low
    for high, other_high in (*pairs, (whole.high, whole.other_high)):
        if high > low or other_high > other_low:
            yield Window(low, high, other_low, other_high)
        low, other_low = high + 1, other_high + 1


def _matched(first: Sequence[Hashable], second: Sequence[Hashable], whole: Window) -> Iterator[IndexPair]:
    pending = [whole]
    while pending:
        low, high, other_low, other_high = pending.pop()
        while low < high and other_low < other_high and first[low] == second[other_low]:
            yield low, other_low
            low, other_low = low + 1, other_low + 1
        while low < high and other_low < other_high and first[high - 1] == second[other_high - 1]:
            high, other_high = high - 1, other_high - 1
            yield high, other_high
        window = Window(low, high, other_low, other_high)
        if window.one_sided:
            continue
        anchors = _anchors(first, second, window)
        if anchors:
            yield from anchors
            pending += gaps(anchors, window)
        else:
            yield from _shortest_edit(first, second, window) or _by_number(first, second, window)


def _anchors(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> list[IndexPair]:
    """Elements that occur once in both stretches, as many as keep their order."""
    low, high, other_low, other_high = window
    once = {key for key, count in Counter(first[low:high]).items() if count == 1}
    once &= {key for key, count in Counter(second[other_low:other_high]).items() if count == 1}
    if not once:
        return []
    index_of = {second[index]: index for index in range(other_low, other_high) if second[index] in once}
    return _rising([(index, index_of[first[index]]) for index in range(low, high) if first[index] in once])


def _by_number(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> list[IndexPair]:
    """The k-th element of a kind taken for the k-th of that kind, as many as keep their order."""
    low, high, other_low, other_high = window
    indices: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index in range(other_high - 1, other_low - 1, -1):
        indices[second[index]].append(index)
    return _rising([(index, indices[first[index]].pop()) for index in range(low, high) if indices[first[index]]])


def _rising(pairs: Sequence[IndexPair]) -> list[IndexPair]:
    """The longest part of `pairs` (rising in the first place) that also rises in the second."""
    ends: list[int] = []
    tails: list[int] = []
    before: list[int] = []
    for index, (_, second) in enumerate(pairs):
        length = bisect_left(ends, second)
        before.append(tails[length - 1] if length else -1)
        if length == len(ends):
            ends.append(second)
            tails.append(index)
        else:
            ends[length], tails[length] = second, index
    longest = []
    index = tails[-1] if tails else -1
    while index >= 0:
        longest.append(pairs[index])
        index = before[index]
    return longest[::-1]


def _shortest_edit(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> list[IndexPair] | None:
    """The matches of a shortest edit; None where finding it takes too long."""
    low, high, other_low, other_high = window
    width, height = high - low, other_high - other_low
    reached, trail, effort = {1: 0}, [], 0
    for edits in range(width + height + 1):
        trail.append(dict(reached))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (diagonal != edits and reached[diagonal - 1] < reached[diagonal + 1])
            x = reached[diagonal + 1] if down else reached[diagonal - 1] + 1
            y = x - diagonal
            while x < width and y < height and first[low + x] == second[other_low + y]:
                x, y = x + 1, y + 1
                effort += 1
            reached[diagonal] = x
            if x >= width and y >= height:
                return [(low + a, other_low + b) for a, b in _walked_back(trail, width, height)]
        effort += 2 * edits
        if effort > _EFFORT:
            return None
    return None  # pragma: no cover - every edit is at most width + height long


def _walked_back(trail: Sequence[dict[int, int]], x: int, y: int) -> Iterator[IndexPair]:
    """The diagonal steps of the edit that `trail` found, from its end."""
    for edits in range(len(trail) - 1, -1, -1):
        reached, diagonal = trail[edits], x - y
        down = diagonal == -edits or (diagonal != edits and reached[diagonal - 1] < reached[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        start = reached[before]
        while x > start and y > start - before:
            x, y = x - 1, y - 1
            yield x, y
        x, y = start, start - before
