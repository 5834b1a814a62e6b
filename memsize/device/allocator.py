"""The CUDA caching allocator: pools of free blocks, and what happens when none of them serves a request.

Small requests (up to 1 MiB) and large ones have pools of their own, per stream. A request is rounded up to a block, the
best fitting free block serves it, and CUDA is asked for a segment only when there is none. Segments go back when memory
runs out. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (malloc, alloc_block, garbage_collect_cached_blocks).

A block that other streams may still use when it is freed (`record_stream`) is deferred: it can be reused once the
program has waited for them.

Known limits: the pool of a CUDA graph that is gone is not given back, and `cudaMalloc` succeeds as long as the sum
fits, as if physical memory never fragmented.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Final

from memsize.device.allocator_config import BLOCK, SMALL, SMALL_SEGMENT, AllocatorConfig
from memsize.device.pools import ADDRESS, SHIFT, ExpandablePool, LimitedPool, Memory, Pool
from memsize.records.trace import PRIVATE_POOL

SMALL_BLOCKS: Final = SMALL // BLOCK
"""The largest block of the small pools, in blocks of 512 B."""
_UNLIMITED: Final = 1 << 62
_ADDRESS_SPACE: Final = (1 << 40) // BLOCK
"""Address space of an expandable segment where the card's size is unknown: 1 TiB."""

LiveBlock = tuple[int, int, Pool]
"""A live storage's requested bytes, its block, and the pool of the block."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous memory from CUDA and the blocks that tile it: (address, bytes, storage), storage None where free."""

    address: int
    bytes: int
    stream: int
    small: bool
    blocks: tuple[tuple[int, int, int | None], ...]


class Allocator:
    """The pools of one process on one GPU.

    `capacity` is the memory that CUDA can give (None: without bound), `allowed` the bytes that `memory_fraction` lets
    the allocator reserve (None: all).
    """

    def __init__(self, config: AllocatorConfig, capacity: int | None, allowed: int | None) -> None:
        self.config = config
        self.allowed = allowed
        self.refused: int | None = None
        """The least bytes that CUDA refused to bring the reserved ones to; None where it refused nothing."""
        self.memory = Memory(None if capacity is None else capacity // BLOCK)
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.live: dict[int, LiveBlock] = {}
        """The blocks of the storages that are alive."""
        self.deferred: list[tuple[int, LiveBlock]] = []
        """Freed blocks that other streams may use, with the event before which the program has waited for them."""

    def copy(self, capacity: int | None) -> Allocator:
        """The same state on a GPU that can give `capacity` bytes, which may be all that depends on the GPU."""
        other = copy(self)
        other.memory = self.memory.copy(None if capacity is None else capacity // BLOCK)
        other.pools = {key: pool.copy(other.memory) for key, pool in self.pools.items()}
        twins = dict(zip(self.pools.values(), other.pools.values(), strict=True))
        other.live = {storage: (size, block, twins[pool]) for storage, (size, block, pool) in self.live.items()}
        other.deferred = [(until, (size, block, twins[pool])) for until, (size, block, pool) in self.deferred]
        return other

    def defer(self, until: int, freed: LiveBlock) -> None:
        """Keep a freed block until the program has waited, before event `until`, for the streams that may use it."""
        insort(self.deferred, (until, freed), key=itemgetter(0))

    def free_deferred(self, event: int = _UNLIMITED) -> None:
        """Free the deferred blocks for which the program has waited before `event`; all of them without one."""
        while self.deferred and self.deferred[0][0] <= event:
            _, (_, block, pool) = self.deferred.pop(0)
            pool.give(block)

    def pool(self, stream: int, small: bool) -> Pool:
        """The pool of `stream` for small or for large blocks."""
        if (stream, small) not in self.pools:
            self.pools[stream, small] = self._new_pool(stream, small)
        return self.pools[stream, small]

    def grow(self, pool: Pool, size: int) -> int:
        """A block of `size` from more memory, releasing what is cached where it must; 0 when out of memory."""
        segment = self.segment(size)
        self._collect()
        return (
            self._obtain(pool, size, segment)
            or (isinstance(pool, LimitedPool) and pool.release_oversize(size) and self._obtain(pool, size, segment))
            or (self.release() and self._obtain(pool, size, segment))
        )

    @property
    def is_plain(self) -> bool:
        """Whether all pools are plain ones, and requests are rounded to 512 B alone."""
        config = self.config
        splits = config.max_split_size is None and max(config.roundup_divisions) < 2
        return splits and not config.expandable_segments and not self._collects

    @property
    def limit(self) -> int | None:
        """The most that can be reserved, in blocks; None where there is no bound."""
        limits = (self.memory.capacity, None if self.allowed is None else self.allowed // BLOCK)
        return min((limit for limit in limits if limit is not None), default=None)

    def segment(self, size: int) -> int:
        """The size of the segment for a block of `size`, both in blocks of 512 B."""
        return self.config.segment_size(size * BLOCK) // BLOCK

    def _new_pool(self, stream: int, small: bool) -> Pool:
        config, least = self.config, 1 if small else SMALL_BLOCKS + 1
        most = _UNLIMITED if config.max_split_size is None else config.max_split_size // BLOCK
        tolerance = (config.max_non_split_rounding or config.large_segment_size) // BLOCK
        if config.expandable_segments:
            grain = (SMALL_SEGMENT if small else config.large_segment_size) // BLOCK
            capacity = self.memory.capacity
            space = _ADDRESS_SPACE if capacity is None else capacity + capacity // 8
            space = -(-space // grain) * grain
            return ExpandablePool(self.memory, stream, grain=grain, space=space, most=most, tolerance=tolerance)
        if small or (config.max_split_size is None and not self._collects):
            return Pool(self.memory, stream, least)
        return LimitedPool(self.memory, stream, least, most=most, tolerance=tolerance)

    def _obtain(self, pool: Pool, size: int, segment: int) -> int:
        wanted = (self.memory.reserved + segment) * BLOCK
        block = 0 if self.allowed is not None and wanted > self.allowed else pool.extend(size, segment)
        if not block:
            self.refused = wanted if self.refused is None else min(wanted, self.refused)
        return block

    def release(self) -> bool:
        """Wait for other streams, then give back every segment that no block uses, but for those of CUDA graphs."""
        self.free_deferred()
        for (stream, _), pool in self.pools.items():
            if stream < PRIVATE_POOL:
                pool.release()
        return True

    @property
    def _collects(self) -> bool:
        return self.allowed is not None and self.config.garbage_collection_threshold > 0

    def _collect(self) -> None:
        """Give back segments that have been free for longer than the average, oldest first, down to the threshold."""
        if self.allowed is None or not self._collects:
            return
        excess = self.memory.reserved * BLOCK - int(self.config.garbage_collection_threshold * self.allowed)
        whole = [
            (pool.age(block), block, pool)
            for pool in self.pools.values()
            if isinstance(pool, LimitedPool) and pool.stream < PRIVATE_POOL
            for block in pool.whole()
        ]
        while excess > 0 and whole:
            average = sum(age for age, _, _ in whole) / len(whole)
            for age, block, pool in whole:
                if age >= average:
                    pool.drop(block)
                    excess -= (block >> SHIFT) * BLOCK
            whole = [entry for entry in whole if entry[0] < average]


@dataclass(frozen=True, eq=False)
class Layout:
    """The state of an allocator when nothing changes it any more. Its segments are listed once somebody reads them."""

    allocator: Allocator

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.segments == other.segments

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments by address, with the blocks of live storages, deferred ones and free ones."""
        owners: dict[int, tuple[int, int | None]] = {
            block & ADDRESS: (block, storage) for storage, (_, block, _) in self.allocator.live.items()
        }
        owners |= {block & ADDRESS: (block, None) for _, (_, block, _) in self.allocator.deferred}
        segments = [
            Segment(start * BLOCK, (end - start) * BLOCK, stream, small, tuple(_tiles(start, end, pool, owners)))
            for (stream, small), pool in self.allocator.pools.items()
            for start, end in pool.ranges()
        ]
        return tuple(sorted(segments, key=lambda segment: segment.address))


def _tiles(
    start: int, end: int, pool: Pool, owners: Mapping[int, tuple[int, int | None]]
) -> Iterator[tuple[int, int, int | None]]:
    while start < end:
        block, storage = owners.get(start, (0, None))
        size = (block or pool.starts[start]) >> SHIFT
        yield start * BLOCK, size * BLOCK, storage
        start += size
