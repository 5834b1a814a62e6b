"""Free blocks of one stream and one size class: which one serves a request, what is cut off, what merges.

Sizes and addresses are counted in blocks of 512 B. A *block* is one integer, ``size << SHIFT | address``: blocks then
sort by size, then by address, which is the order in which PyTorch searches. Two dictionaries find a free block by where
it starts and by where it ends, so that a freed block finds its free neighbours without a list of all blocks; segments
are placed apart, so that blocks of two segments never touch.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (get_free_block, should_split, alloc_found_block, free_block,
try_merge_blocks, find_expandable_block, map_block, unmap_block, release_blocks).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from copy import copy
from typing import ClassVar, Final, Self

from memsize.errors import InputError

SHIFT: Final = 44
"""Bits of an address: 2^44 blocks of 512 B are 8 PiB, more than even a long replay allocates."""
ADDRESS: Final = (1 << SHIFT) - 1
GAP: Final = 4096
"""Blocks left free between two segments (2 MiB)."""


class Memory:
    """The memory that CUDA can give: how much is handed out, how much there is, and which address was the last.

    Each segment lies as high as possible below the first one, as drivers place them (docs/method.md). Only their order
    within a pool matters, and only between free blocks of one size.
    """

    __slots__ = ("capacity", "changes", "clock", "event", "gaps", "lowest_address", "reserved")

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.event = 0
        """The event that is being replayed."""
        self.clock = 0
        """How many requests came to the limited pools of all streams."""
        self.changes: list[tuple[int, int, int, int]] = []
        """The stretches mapped (size above 0) or given back (below 0): the event, the stream, the start, the size."""
        self.lowest_address = ADDRESS + 1
        self.gaps: list[tuple[int, int]] = []
        """Where addresses start and end above the lowest that were given back, in order."""

    def copy(self, capacity: int | None) -> Memory:
        """The same memory, of which CUDA can give `capacity`."""
        other = copy(self)
        other.capacity = capacity
        other.changes, other.gaps = self.changes.copy(), self.gaps.copy()
        return other

    def record_change(self, stream: int, start: int, size: int) -> None:
        """Note that a stretch was mapped, or given back with a `size` below 0."""
        self.changes.append((self.event, stream, start, size))

    def obtain(self, size: int) -> bool:
        """Hand out `size` more, if there is as much."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def give_back(self, size: int) -> None:
        self.reserved -= size

    def assign_address(self, size: int, alignment: int = GAP) -> int:
        """The address of `size` blocks of address space, a multiple of `alignment`.

        Raises `InputError` beyond the last address: CUDA's own are shorter.
        """
        for index in reversed(range(len(self.gaps))):
            start, end = self.gaps[index]
            address = (end - GAP - size) // alignment * alignment
            if address >= start:
                self.gaps[index : index + 1] = [(start, address)] if address > start else []
                return address
        address = (self.lowest_address - GAP - size) // alignment * alignment
        if address < 0:
            raise InputError("this needs more than 8 PiB of memory, more than a GPU can address: use a smaller batch")
        self.lowest_address = address
        return address

    def return_address(self, start: int, size: int) -> None:
        """Let the addresses of a segment be assigned again, with the room above it."""
        index, end = bisect_left(self.gaps, (start,)), start + size + GAP
        if index < len(self.gaps) and self.gaps[index][0] == end:
            end = self.gaps.pop(index)[1]
        if index and self.gaps[index - 1][1] == start:
            index -= 1
            start = self.gaps.pop(index)[0]
        self.gaps.insert(index, (start, end))


class Pool:
    """Free blocks of a stream that are cut from segments of their own, as `cudaMalloc` gives them.

    `least` is the smallest rest that is cut off; a smaller one is handed out with the block. `segments` maps where a
    segment starts to its size.
    """

    __slots__ = ("ends", "free", "least", "memory", "segments", "starts", "stream")
    STATE: ClassVar[tuple[str, ...]] = ("ends", "free", "segments", "starts")
    """The collections that change."""

    def __init__(self, memory: Memory, stream: int, least: int) -> None:
        self.memory = memory
        self.stream = stream
        self.least = least
        self.free: list[int] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.segments: dict[int, int] = {}

    def copy(self, memory: Memory) -> Self:
        pool = copy(self)
        pool.memory = memory
        for name in self.STATE:
            setattr(pool, name, getattr(self, name).copy())
        return pool

    def take(self, size: int) -> int:
        """The smallest free block of at least `size`, its rest cut off; 0 when there is none."""
        free = self.free
        at = bisect_left(free, size << SHIFT)
        if at == len(free):
            return 0
        return self.cut(free.pop(at), size)

    def cut(self, block: int, size: int) -> int:
        """The first `size` of a block that left the free list, or all of it when the rest is too small to keep."""
        rest = (block >> SHIFT) - size
        start = block & ADDRESS
        del self.starts[start]
        if rest < self.least:
            del self.ends[start + (block >> SHIFT)]
            return block
        tail = rest << SHIFT | start + size
        insort(self.free, tail)
        self.starts[start + size] = self.ends[start + size + rest] = tail
        return size << SHIFT | start

    def give(self, block: int) -> int:
        """Put `block` back, merged with the free blocks on either side; returns the merged block."""
        start = block & ADDRESS
        end = start + (block >> SHIFT)
        free, starts, ends = self.free, self.starts, self.ends
        if end in starts:
            after = starts.pop(end)
            del free[bisect_left(free, after)]
            end += after >> SHIFT
        if start in ends:
            before = ends.pop(start)
            del free[bisect_left(free, before)]
            start = before & ADDRESS
        block = end - start << SHIFT | start
        insort(free, block)
        starts[start] = ends[end] = block
        return block

    def extend(self, size: int, segment: int) -> int:
        """The first `size` of a new segment of `segment`; 0 when CUDA has no more memory."""
        if not self.memory.obtain(segment):
            return 0
        start = self.memory.assign_address(segment)
        self.segments[start] = segment
        self.memory.record_change(self.stream, start, segment)
        block = segment << SHIFT | start
        self.starts[start] = self.ends[start + segment] = block
        return self.cut(block, size)

    def release(self) -> None:
        """Give back every segment that is free as a whole."""
        for block in self.whole():
            self.drop(block)

    def whole(self) -> list[int]:
        """The free blocks that are segments of their own, smallest first."""
        return [block for block in self.free if self.segments.get(block & ADDRESS) == block >> SHIFT]

    def drop(self, block: int) -> None:
        """Give back the segment that the free `block` makes up."""
        self.withdraw(block)
        del self.segments[block & ADDRESS]
        self.memory.record_change(self.stream, block & ADDRESS, -(block >> SHIFT))
        self.memory.return_address(block & ADDRESS, block >> SHIFT)
        self.memory.give_back(block >> SHIFT)

    def withdraw(self, block: int) -> None:
        """Take `block` out of the free ones."""
        start = block & ADDRESS
        del self.free[bisect_left(self.free, block)]
        del self.starts[start]
        del self.ends[start + (block >> SHIFT)]

    def ranges(self) -> list[tuple[int, int]]:
        """Where memory is mapped: (start, end) of each segment."""
        return [(start, start + size) for start, size in self.segments.items()]


class LimitedPool(Pool):
    """A pool of large blocks under `max_split_size`, or under garbage collection, which asks for the age of a block.

    A block of at least `most` is never split: it serves no smaller request, and none that it exceeds by `tolerance`.
    """

    __slots__ = ("born", "most", "tolerance")
    STATE = (*Pool.STATE, "born")

    def __init__(self, memory: Memory, stream: int, least: int, most: int, tolerance: int) -> None:
        super().__init__(memory, stream, least)
        self.most = most
        self.tolerance = tolerance
        self.born: dict[int, int] = {}

    def take(self, size: int) -> int:
        self.memory.clock += 1
        at = bisect_left(self.free, size << SHIFT)
        if at == len(self.free) or not suits(self.free[at] >> SHIFT, size, self.most, self.tolerance):
            return 0
        return self.cut(self.free.pop(at), size)

    def cut(self, block: int, size: int) -> int:
        return super().cut(block, size if size < self.most else block >> SHIFT)

    def give(self, block: int) -> int:
        merged = super().give(block)
        self.born[merged & ADDRESS] = self.memory.clock
        return merged

    def age(self, block: int) -> int:
        """How many requests the free `block` has seen pass."""
        return self.memory.clock - self.born[block & ADDRESS]

    def release_oversize(self, size: int) -> bool:
        """Give back unsplittable blocks: one that would do for `size`, else the largest until as much is released."""
        wanted = max(size, self.most)
        at = bisect_left(self.free, wanted << SHIFT)
        if at < len(self.free):
            self.drop(self.free[at])
            return True
        released = 0
        while self.free and released < wanted and self.free[-1] >> SHIFT >= self.most:
            released += self.free[-1] >> SHIFT
            self.drop(self.free[-1])
        return released >= wanted


class ExpandablePool(Pool):
    """Free blocks cut from one stretch of address space that grows by mapping memory at its end, `grain` at a time.

    `holes` maps where unmapped address space starts to where it ends. `space` is the address space of one stretch: one
    and an eighth of the card. A hole appears before the end only after running out of memory. A stretch that is
    unmapped as a whole is kept, where PyTorch gives its addresses back: no size depends on it.
    """

    __slots__ = ("grain", "holes", "most", "space", "tolerance")
    STATE = (*Pool.STATE, "holes")

    def __init__(self, memory: Memory, stream: int, grain: int, space: int, most: int, tolerance: int) -> None:
        super().__init__(memory, stream, least=1)
        self.grain = grain
        self.space = space
        self.most = most
        self.tolerance = tolerance
        self.holes: dict[int, int] = {}

    def take(self, size: int) -> int:
        """Like a plain pool, but a block at the mapped end also counts all the space into which it can still grow."""
        free = self.free
        at = bisect_left(free, size << SHIFT)
        while at + 1 < len(free) and self._reach(free[at + 1]) < self._reach(free[at]):
            at += 1
        if at == len(free) or not suits(free[at] >> SHIFT, size, self.most, self.tolerance):
            return 0
        return self.cut(free.pop(at), size)

    def extend(self, size: int, segment: int) -> int:
        """The first `size` of the lowest stretch of free and unmapped space that suffices; 0 when CUDA has no more."""
        start = self._candidate(size)
        while (mapped := self.starts.get(start, 0) >> SHIFT) < size:
            if not self._map(start + mapped, size - mapped):
                return 0
        block = self.starts[start]
        del self.free[bisect_left(self.free, block)]
        return self.cut(block, size)

    def release(self) -> None:
        """Unmap what lies between multiples of `grain` in every free block."""
        for block in tuple(self.free):
            start = block & ADDRESS
            end = start + (block >> SHIFT)
            first, last = -(-start // self.grain) * self.grain, end // self.grain * self.grain
            if first < last:
                self.withdraw(block)
                for part, stop in ((start, first), (last, end)):
                    if part < stop:
                        self.give(stop - part << SHIFT | part)
                self.memory.record_change(self.stream, first, first - last)
                self.memory.give_back(last - first)
                before = next((start for start, end in self.holes.items() if end == first), first)
                self.holes[before] = self.holes.pop(last, last)

    def whole(self) -> list[int]:
        """None: every block has unmapped space beside it, so that garbage collection leaves it alone."""
        return []

    def ranges(self) -> list[tuple[int, int]]:
        mapped = []
        for start, size in self.segments.items():
            position = start
            for hole in sorted(hole for hole in self.holes if start <= hole < start + size):
                if position < hole:
                    mapped.append((position, hole))
                position = self.holes[hole]
            if position < start + size:
                mapped.append((position, start + size))
        return mapped

    def _reach(self, block: int) -> int:
        size = block >> SHIFT
        end = (block & ADDRESS) + size
        return size + self.holes.get(end, end) - end

    def _candidate(self, size: int) -> int:
        for hole in sorted(self.holes):
            before = self.ends.get(hole)
            start = hole if before is None else before & ADDRESS
            if self._room(start, size) >= size:
                return start
        space = max(self.space, -(-size // self.grain) * self.grain)
        start = self.memory.assign_address(space, self.grain)
        self.segments[start] = space
        self.holes[start] = start + space
        return start

    def _room(self, start: int, size: int) -> int:
        end = start
        while end - start < size:
            if end in self.holes:
                end = self.holes[end]
            elif end in self.starts:
                end += self.starts[end] >> SHIFT
            else:
                break
        return end - start

    def _map(self, hole: int, size: int) -> bool:
        end = self.holes[hole]
        mapped = -(-min(size, end - hole) // self.grain) * self.grain
        if not self.memory.obtain(mapped):
            return False
        self.memory.record_change(self.stream, hole, mapped)
        del self.holes[hole]
        if hole + mapped < end:
            self.holes[hole + mapped] = end
        self.give(mapped << SHIFT | hole)
        return True


def suits(block: int, size: int, most: int, tolerance: int) -> bool:
    """Whether a block may serve `size`: an unsplittable one (at least `most`) only a request nearly as large."""
    return block < most if size < most else block < size + tolerance
