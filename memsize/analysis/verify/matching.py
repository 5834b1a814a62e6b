"""Two sequences laid side by side: which element of one is which of the other, in order.

What comes once in both is an anchor (patience diff, Bram Cohen). Between anchors the shortest edit is looked for
(Myers, "An O(ND) Difference Algorithm", 1986) as long as it is cheap; beyond that the k-th of a kind is taken for the
k-th.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

_EFFORT: Final = 300_000
"""Steps that one search for a shortest edit may take: a few tenths of a second, and some 500 edits."""

Pair = tuple[int, int]


class Window(NamedTuple):
    """A stretch of both sequences: from `low` up to `high` of each."""

    low: int
    high: int
    other_low: int
    other_high: int

    @property
    def one_sided(self) -> bool:
        """Whether there is nothing to match."""
        return self.low == self.high or self.other_low == self.other_high


def matched(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Pair]:
    """Pairs of places with equal elements, rising in both. Equal beginnings and ends are always matched."""
    return sorted(_matched(first, second, Window(0, len(first), 0, len(second))))


def gaps(pairs: Sequence[Pair], first: int, second: int) -> Iterator[Window]:
    """The stretches between `pairs` where sequences of these lengths have elements left."""
    low = other_low = 0
    for high, other_high in (*pairs, (first, second)):
        if high > low or other_high > other_low:
            yield Window(low, high, other_low, other_high)
        low, other_low = high + 1, other_high + 1


def _matched(first: Sequence[Hashable], second: Sequence[Hashable], whole: Window) -> Iterator[Pair]:
    pending = [whole]
    while pending:
        window, pairs = _trimmed(first, second, pending.pop())
        yield from pairs
        if window.one_sided:
            continue
        anchors = _anchors(first, second, window)
        if anchors:
            yield from anchors
            pending += _between(anchors, window)
        else:
            yield from _shortest_edit(first, second, window) or _by_number(first, second, window)


def _trimmed(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> tuple[Window, list[Pair]]:
    """The window without what it begins and ends with in both."""
    low, high, other_low, other_high = window
    pairs = []
    while low < high and other_low < other_high and first[low] == second[other_low]:
        pairs.append((low, other_low))
        low, other_low = low + 1, other_low + 1
    while low < high and other_low < other_high and first[high - 1] == second[other_high - 1]:
        high, other_high = high - 1, other_high - 1
        pairs.append((high, other_high))
    return Window(low, high, other_low, other_high), pairs


def _between(pairs: Sequence[Pair], window: Window) -> Iterator[Window]:
    low, other_low = window.low, window.other_low
    for high, other_high in (*pairs, (window.high, window.other_high)):
        yield Window(low, high, other_low, other_high)
        low, other_low = high + 1, other_high + 1


def _anchors(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> list[Pair]:
    """Elements that come once in both stretches, as many as keep their order."""
    low, high, other_low, other_high = window
    once = {key for key, count in Counter(first[low:high]).items() if count == 1}
    once &= {key for key, count in Counter(second[other_low:other_high]).items() if count == 1}
    if not once:
        return []
    where = {second[place]: place for place in range(other_low, other_high) if second[place] in once}
    return _rising([(place, where[first[place]]) for place in range(low, high) if first[place] in once])


def _by_number(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> list[Pair]:
    """The k-th element of a kind taken for the k-th of that kind, as many as keep their order."""
    low, high, other_low, other_high = window
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place in range(other_high - 1, other_low - 1, -1):
        places[second[place]].append(place)
    candidates = [(place, places[first[place]].pop()) for place in range(low, high) if places[first[place]]]
    return _rising(candidates)


def _rising(pairs: Sequence[Pair]) -> list[Pair]:
    """The longest part of `pairs` (rising in the first place) that also rises in the second."""
    ends: list[int] = []
    tails: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(ends, place)
        before.append(tails[length - 1] if length else -1)
        if length == len(ends):
            ends.append(place)
            tails.append(index)
        else:
            ends[length], tails[length] = place, index
    found = []
    index = tails[-1] if tails else -1
    while index >= 0:
        found.append(pairs[index])
        index = before[index]
    return found[::-1]


def _shortest_edit(first: Sequence[Hashable], second: Sequence[Hashable], window: Window) -> list[Pair] | None:
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


def _walked_back(trail: Sequence[dict[int, int]], x: int, y: int) -> Iterator[Pair]:
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
