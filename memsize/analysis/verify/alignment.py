"""A predicted log and a real one laid side by side: the first operations whose allocations differ.

Allocations are matched by size and place, then by size where the places are told differently, then by place where the
sizes differ. What is left over only one side has. Matched allocations that end at different moments differ too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from memsize.analysis.verify.matching import Pair, gaps, matched
from memsize.records.measurement import NOWHERE, Allocation, Log, allocations
from memsize.records.verification import Alignment, Difference, Kind

_BLOCK: Final = 512
"""Requests that the allocator rounds to the same multiple are the same allocation."""


def align(predicted: Log, real: Log) -> Alignment:
    """The differences between two logs of one step; swapping the two swaps what is said of them, and nothing else."""
    first, second = allocations(predicted), allocations(real)
    turned = _order(second) < _order(first)
    pairs = [(a, b) for b, a in _pairs(second, first)] if turned else _pairs(first, second)
    found = sorted(_differences(first, second, pairs), key=lambda item: item[0])
    return Alignment(len(first), len(second), len(pairs), tuple(difference for _, difference in found))


def _order(side: Sequence[Allocation]) -> tuple[object, ...]:
    """Ties between equally good matches fall the same way whichever log comes first."""
    return len(side), [(_blocks(each), each.place.phase, each.place.layer or "", each.place.op) for each in side]


def _blocks(each: Allocation) -> int:
    return -(-each.bytes // _BLOCK)


_KEYS: Final[tuple[Callable[[Allocation], Hashable], ...]] = (
    lambda each: (_blocks(each), each.place),
    _blocks,
    lambda each: each.place if each.place != NOWHERE else id(each),
)
"""By what allocations are matched, in turn. What nobody noted the place of is matched by its size alone."""


def _pairs(first: Sequence[Allocation], second: Sequence[Allocation]) -> list[Pair]:
    pairs: list[Pair] = []
    for key in _KEYS:
        mine, theirs = list(map(key, first)), list(map(key, second))
        for window in list(gaps(pairs, len(first), len(second))):
            if not window.one_sided:
                low, high, other_low, other_high = window
                found = matched(mine[low:high], theirs[other_low:other_high])
                pairs += [(low + a, other_low + b) for a, b in found]
        pairs.sort()
    return pairs


def _differences(
    first: Sequence[Allocation], second: Sequence[Allocation], pairs: Sequence[Pair]
) -> Iterator[tuple[tuple[int, int], Difference]]:
    """Each difference with where it stands: after how many matches, and how far after the last of them."""
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    for window in gaps(pairs, len(first), len(second)):
        after = bisect_left(mine, window.low)
        for place in range(window.low, window.high):
            each = first[place]
            yield (after, place - window.low), Difference("predicted only", each.place, each.bytes, None, each.at_peak)
        for place in range(window.other_low, window.other_high):
            each = second[place]
            yield (after, place - window.other_low), Difference("real only", each.place, None, each.bytes, each.at_peak)
    for rank, (a, b) in enumerate(pairs):
        kind = _unlike(first[a], second[b], mine, theirs)
        if kind is not None:
            said, seen = first[a], second[b]
            at_peak = said.at_peak or seen.at_peak
            yield (rank, -1), Difference(kind, said.place, said.bytes, seen.bytes, at_peak)


def _unlike(said: Allocation, seen: Allocation, mine: Sequence[int], theirs: Sequence[int]) -> Kind | None:
    """How a matched allocation is not as predicted; None where it is."""
    if said.bytes != seen.bytes:
        return "other size"
    ends = _end(said, mine), _end(seen, theirs)
    if ends[0] == ends[1]:
        return None
    return "freed later" if ends[1] > ends[0] else "freed earlier"


def _end(each: Allocation, places: Sequence[int]) -> int:
    """How many of the matched allocations come before the end of this one; more than all where it has none."""
    return len(places) + 1 if each.freed is None else bisect_left(places, each.freed)
