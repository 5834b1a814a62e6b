"""A training of hundreds of steps, from the allocations of the few that were recorded.

What a step leaves for the next one (gradients, running averages) replaces what the step before it left: the n-th
storage of a size that it frees is the n-th of that size that it left before. The blocks of these move from step to
step, so that `reserved` may grow after hundreds of steps.

Of free blocks of one size the allocator takes the one with the lowest address (c10/cuda/CUDACachingAllocator.cpp,
BlockComparatorSize). The driver assigns addresses as it likes, and what grows over hundreds of steps depends on them:
`ORDERS` has four ways.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from memsize.device.allocator import Allocator, LiveBlock
from memsize.device.allocator_config import BLOCK, SMALL, AllocatorConfig
from memsize.device.pools import GAP, SHIFT, Memory
from memsize.records.trace import Trace

Changes = Sequence[tuple[int, int]]
"""Storages, and the bytes that they gain or lose."""
_Key = tuple[int, int]
"""A storage as recorded, and how often its step had been repeated when it was made."""


class Addresses(Memory):
    """Memory whose segments get addresses upwards from 0 or downwards from `_TOP`: in the first gap between others, or
    beyond all of them, also of those that were given back.
    """

    __slots__ = ("downwards", "reused", "taken")

    def __init__(self, downwards: bool, reused: bool) -> None:
        super().__init__(None)
        self.downwards = downwards
        self.reused = reused
        self.taken: list[tuple[int, int]] = []
        """Where segments start and end, as distances from where addresses begin."""

    def assign_address(self, size: int, alignment: int = GAP) -> int:
        end = self.taken[-1][1] + GAP if self.taken else 0
        if self.reused:
            ends = (0, *(after + GAP for _, after in self.taken))
            end = next(
                (end for end, (start, _) in zip(ends, self.taken, strict=False) if start - end >= size + GAP), end
            )
        return _TOP - end - size if self.downwards else end

    def record_change(self, stream: int, start: int, size: int) -> None:
        first = _TOP - start - abs(size) if self.downwards else start
        if size > 0:
            insort(self.taken, (first, first + size))
        elif self.reused:
            self.taken.remove((first, first - size))


ORDERS: Final = tuple((downwards, reused) for downwards in (True, False) for reused in (True, False))
"""Whether addresses fall, and whether those of segments that were given back are assigned again; as usual first."""
_TOP: Final = 1 << 43


class Levels(NamedTuple):
    """Bytes after a step."""

    allocated: int
    reserved: int


class _Succession(NamedTuple):
    """The storages that a step leaves for the next one, and for each that it frees the one that it left before."""

    left: frozenset[int]
    freed: dict[int, int]


class LongTraining:
    """The allocator of a training; the last `steps` parts of `trace` are its recorded steps.

    The program empties the cache before the first step, and after each recorded one, which only marks its end. It makes
    a tensor after the last: a record ends with what was allocated last. Without `memory` addresses fall and are reused.
    """

    def __init__(self, trace: Trace, steps: int, memory: Memory | None = None) -> None:
        self._events: Final[Changes] = [(event.storage, event.delta) for event in trace.events]
        emptied = trace.emptied
        self._ends: Final = emptied[-steps - 1 :]
        self._allocator: Final = Allocator(AllocatorConfig(), None, None)
        self._allocator.memory = memory or self._allocator.memory
        self._live: Final[dict[_Key, LiveBlock]] = {}
        self._allocated = 0
        self._made: dict[int, _Key] = {}
        self._repeats = 0
        self._successions: dict[int, _Succession] = {}
        start = 0
        for end in emptied[:-steps]:
            self._play(self._events[start:end])
            self.empty_cache()
            start = end

    def run(self, recorded: Sequence[int], last: int, evaluated: int) -> list[Levels]:
        """Return the levels after each step, 1 to `last`. Steps whose numbers are in `recorded`, such as the first, are
        played as they are; others repeat the latest of these. The cache is emptied after every `evaluated` steps.
        """
        stops = {*range(evaluated, last, evaluated), last, *(step - 1 for step in recorded[1:])}
        levels: list[Levels] = []
        for stop in sorted(stops):
            latest = bisect_right(recorded, stop) - 1
            if len(levels) + 1 in recorded:
                levels.append(self.record(latest))
            levels += self.repeated(latest, stop - len(levels))
            if stop % evaluated == 0:
                self.empty_cache()
        return levels

    def empty_cache(self) -> None:
        """Give back segments that no block uses."""
        self._allocator.release()

    def levels(self) -> Levels:
        """What is in use now."""
        return Levels(self._allocated, self._allocator.memory.reserved * BLOCK)

    def record(self, step: int) -> Levels:
        """Play the recorded step of that number, from 0 on, for the first time."""
        self._play(self._events[self._ends[step] : self._ends[step + 1]])
        return self.levels()

    def repeated(self, step: int, times: int) -> list[Levels]:
        """Play a recorded step again and again. Once its large blocks lie where they lay before, what follows is known,
        but for the small blocks that steps add.
        """
        levels: list[Levels] = []
        states: dict[object, int] = {}
        while len(levels) < times:
            self._repeat(step)
            levels.append(self.levels())
            first = states.setdefault(self._state(step), len(levels))
            if (period := len(levels) - first) and len(levels) + period <= times:
                count = (times - len(levels)) // period
                levels.extend(levels[-period:] * count)
                states.clear()
        return levels

    def _repeat(self, step: int) -> None:
        left, freed = self._succession(step)
        self._repeats += 1
        made = {storage: (storage, self._repeats) for storage in left}
        for storage, delta in self._events[self._ends[step] : self._ends[step + 1]]:
            self._change(made.get(storage) or self._key(freed.get(storage, storage)), delta)
        self._made |= made

    def _key(self, storage: int) -> _Key:
        return self._made.get(storage, (storage, 0))

    def _state(self, step: int) -> object:
        """Where the large storages are that the step leaves, and what is reserved."""
        left = [self._live[self._key(storage)] for storage in sorted(self._succession(step).left)]
        return self.levels().reserved, tuple(block for size, block, _ in left if size > SMALL)

    def _succession(self, step: int) -> _Succession:
        if step not in self._successions:
            self._successions[step] = _succession(self._events, self._ends[step], self._ends[step + 1])
        return self._successions[step]

    def _play(self, events: Changes) -> None:
        for storage, delta in events:
            self._change(self._key(storage), delta)

    def _change(self, key: _Key, delta: int) -> None:
        before = self._live.pop(key, None)
        size = delta if before is None else before[0] + delta
        if size > 0:
            blocks = self._allocator.config.block_size(size) // BLOCK
            pool = self._allocator.pool(0, blocks * BLOCK <= SMALL)
            block = pool.take(blocks) or self._allocator.grow(pool, blocks)
            self._live[key] = (size, block, pool)
            self._allocated += (block >> SHIFT) * BLOCK
        if before is not None:
            _, block, pool = before
            pool.give(block)
            self._allocated -= (block >> SHIFT) * BLOCK


def emptied(trace: Trace) -> Iterator[list[int]]:
    """Yield, for each of `ORDERS`, what is reserved where the program empties the cache, from its second time on."""
    for order in ORDERS:
        program = LongTraining(trace, len(trace.emptied) - 1, Addresses(*order))
        levels = []
        for part in range(len(trace.emptied) - 1):
            levels.append(program.record(part).reserved)
            program.empty_cache()
        yield levels


def _succession(events: Changes, start: int, end: int) -> _Succession:
    sizes: dict[int, int] = {}
    for storage, delta in events[:start]:
        sizes[storage] = sizes.get(storage, 0) + delta
    before = {storage for storage, size in sizes.items() if size}
    made, freed = [], []
    for storage, delta in events[start:end]:
        sizes[storage] = sizes.get(storage, 0) + delta
        if storage not in before:
            made.append(storage)
        elif not sizes[storage]:
            freed.append((storage, -delta))
    left: dict[int, deque[int]] = {}
    for storage in dict.fromkeys(made):
        if sizes[storage]:
            left.setdefault(sizes[storage], deque()).append(storage)
    everything = frozenset(storage for storages in left.values() for storage in storages)
    return _Succession(everything, {storage: left[size].popleft() for storage, size in freed})
