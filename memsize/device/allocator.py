"""The CUDA caching allocator over a run's events: what PyTorch would call requested, allocated and reserved.

Small requests (up to 1 MiB) and large ones have pools of their own, per stream. A request is rounded up to a block, the
best fitting free block serves it, and CUDA is asked for a segment only when there is none. Segments go back when memory
runs out. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (malloc, alloc_block, garbage_collect_cached_blocks).

A block that other streams may still use when it is freed (`record_stream`) can be reused at once if these are done with
it, or else once the program has waited for them: both can be replayed (`deferred`).

Known limits: no CUDA graph pools, and `cudaMalloc` succeeds as long as the sum fits, as if physical memory never
fragmented.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from memsize.device.allocator_config import BLOCK, SMALL, SMALL_SEGMENT, AllocatorConfig
from memsize.device.pools import ADDRESS, SHIFT, ExpandablePool, LimitedPool, Memory, Pool
from memsize.errors import InputError

if TYPE_CHECKING:
    import numpy as np

DEFAULT: Final = AllocatorConfig()
_SMALL: Final = SMALL // BLOCK
_UNLIMITED: Final = 1 << 62
_CACHE: Final = -1, 0
"""Stands among events for all that is cached being given back."""
NOTHING: Final = -2, 0
"""Stands for an event that is left out, so that those after it keep their numbers."""
_WAITED: Final = -3, 0
"""Stands among events for the program having waited for other streams, whose blocks are then free."""
_ADDRESS_SPACE: Final = (1 << 40) // BLOCK
"""Address space of an expandable segment where the card's size is unknown: 1 TiB."""


class Peak(NamedTuple):
    """The most bytes that were held, and the index of the first event after which they were (-1: before any)."""

    bytes: int
    event: int


class Levels(NamedTuple):
    """Bytes at one moment."""

    requested: int
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that failed: at which event, the bytes of the request, what CUDA was asked for, what was held."""

    event: int
    storage: int
    request: int
    segment: int
    held: Levels


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous memory from CUDA and the blocks that tile it: (address, bytes, storage), storage None where free."""

    address: int
    bytes: int
    stream: int
    small: bool
    blocks: tuple[tuple[int, int, int | None], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The levels after each event, and the address of the block that the event allocated or freed (int64 arrays).

    `segments` are the stretches of memory that CUDA gave (bytes > 0) or got back: (event, address, bytes).
    """

    requested: np.ndarray[tuple[int], np.dtype[np.int64]]
    allocated: np.ndarray[tuple[int], np.dtype[np.int64]]
    reserved: np.ndarray[tuple[int], np.dtype[np.int64]]
    address: np.ndarray[tuple[int], np.dtype[np.int64]]
    segments: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay showed. `requested` ≤ `allocated` ≤ `reserved` at every event.

    `idle` is what was reserved and not allocated when `reserved` peaked first. A replay that ran out of memory ends
    there, with the levels that were held.
    """

    requested: Peak
    allocated: Peak
    reserved: Peak
    idle: int
    final: Levels
    segments: tuple[Segment, ...]
    out_of_memory: OutOfMemory | None = None
    timeline: Timeline | None = None
    skipped: frozenset[int] = frozenset()
    """The storages that the run did without, as there was no room for them."""
    refused: int | None = None
    """The least that CUDA refused to bring the reserved bytes to; None where it refused nothing."""
    of_streams: Mapping[int, int] = field(default_factory=dict)
    """The bytes of each stream's segments when `reserved` peaked first: they add up to it."""

    def holds_with(self, capacity: int) -> bool:
        """Whether it is the replay with `capacity` bytes too: with them, CUDA would have granted and refused the same.

        Only where nothing else depends on the capacity: a fraction of the card, or the span of an expandable segment.
        """
        return self.reserved.bytes <= capacity and (self.refused is None or capacity < self.refused)

    @property
    def fragmentation(self) -> float:
        """The share of the reserved peak that no block used then, 0 to 1."""
        return self.idle / self.reserved.bytes if self.reserved.bytes else 0.0


class Allocator:
    """The pools of one process on one GPU, and what they do when no free block serves a request."""

    def __init__(
        self,
        config: AllocatorConfig,
        capacity: int | None,
        allowed: int | None,
        streams: Mapping[int, int] | None = None,
        optional: Collection[int] = (),
        emptied: Collection[int] = (),
        deferred: Mapping[int, int] | None = None,
    ) -> None:
        self.config = config
        self.allowed = allowed
        self.streams = streams or {}
        self.optional = optional
        self.emptied = sorted(emptied)
        self.deferred = deferred or {}
        self.skipped: set[int] = set()
        self.refused: int | None = None
        self.seen = 0
        self.memory = Memory(None if capacity is None else capacity // BLOCK)
        self.pools: dict[tuple[int, bool], Pool] = {}
        self._clock = [0]
        self._waiting: list[tuple[int, _Held]] = []

    def admitted(self, events: Iterable[tuple[int, int]]) -> Iterable[tuple[int, tuple[int, int]]]:
        """`events` with their numbers, without those of storages that were skipped; `_CACHE` where it is emptied, and
        `_WAITED` where the program waited for other streams.
        """
        pairs = self._unskipped(events) if self.optional else enumerate(events)
        told = [(event, _CACHE) for event in self.emptied]
        told += [(event, _WAITED) for event in dict.fromkeys(self.deferred.values())]
        return _between(pairs, deque(sorted(told))) if told else pairs

    def _unskipped(self, events: Iterable[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, int]]]:
        for number, pair in enumerate(events):
            self.seen = number + 1
            if pair[0] not in self.skipped:
                yield number, pair

    def defer(self, event: int, held: _Held) -> None:
        """Keep the block that `event` frees until the program has waited for the streams that may still use it."""
        insort(self._waiting, (self.deferred[event], held), key=itemgetter(0))

    def waited(self, event: int) -> None:
        """Give back the blocks that nobody uses any more before `event`."""
        while self._waiting and self._waiting[0][0] <= event:
            _, block, pool = self._waiting.pop(0)[1]
            pool.give(block)

    def told(self, mark: int, event: int) -> None:
        """What `mark` stands for among the storages of events."""
        if mark == _CACHE[0]:
            self.release()
        elif mark == _WAITED[0]:
            self.waited(event)

    def skips(self, storage: int) -> bool:
        """Whether the run does without `storage`, for which there is no room."""
        if storage in self.optional:
            self.skipped.add(storage)
        return storage in self.skipped

    def pool(self, stream: int, small: bool) -> Pool:
        """The pool of `stream` for small or for large blocks."""
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = self._new_pool(stream, small)
        return pool

    def grow(self, pool: Pool, size: int) -> int:
        """A block of `size` from more memory, releasing what is cached where it must; 0 when out of memory."""
        segment = self.segment(size)
        self._collect()
        return (
            self._obtain(pool, size, segment)
            or (isinstance(pool, LimitedPool) and pool.release_oversize(size) and self._obtain(pool, size, segment))
            or (self.release() and self._obtain(pool, size, segment))
        )

    def segment(self, size: int) -> int:
        """The size of the segment for a block of `size`, both in blocks of 512 B."""
        return self.config.segment_size(size * BLOCK) // BLOCK

    def segments(self, live: Mapping[int, _Held]) -> tuple[Segment, ...]:
        """All segments by address, with the blocks of `live` storages and the free ones."""
        held = [(block, storage) for storage, (_, block, _) in live.items()]
        owners = {each[0] & ADDRESS: each for each in (*held, *((block, None) for _, (_, block, _) in self._waiting))}
        found = []
        for (stream, small), pool in self.pools.items():
            for start, end in pool.ranges():
                blocks = tuple(_tiles(start, end, pool, owners))
                found.append(Segment(start * BLOCK, (end - start) * BLOCK, stream, small, blocks))
        return tuple(sorted(found, key=lambda segment: segment.address))

    def _new_pool(self, stream: int, small: bool) -> Pool:
        config, least = self.config, 1 if small else _SMALL + 1
        most = _UNLIMITED if config.max_split_size is None else config.max_split_size // BLOCK
        rounding = config.max_non_split_rounding or config.large_segment_size
        if config.expandable_segments:
            grain = (SMALL_SEGMENT if small else config.large_segment_size) // BLOCK
            capacity = self.memory.capacity
            space = _ADDRESS_SPACE if capacity is None else capacity + capacity // 8
            return ExpandablePool(self.memory, stream, grain, -(-space // grain) * grain, most, rounding // BLOCK)
        if small or (config.max_split_size is None and not self._collects):
            return Pool(self.memory, stream, least)
        return LimitedPool(self.memory, stream, least, most, rounding // BLOCK, self._clock)

    def _obtain(self, pool: Pool, size: int, segment: int) -> int:
        wanted = (self.memory.reserved + segment) * BLOCK
        block = 0 if self.allowed is not None and wanted > self.allowed else pool.extend(size, segment)
        if not block:
            self.refused = wanted if self.refused is None else min(wanted, self.refused)
        return block

    def release(self) -> bool:
        """Wait for other streams, then give back every segment that no block uses."""
        self.waited(_UNLIMITED)
        for pool in self.pools.values():
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
            if isinstance(pool, LimitedPool)
            for block in pool.whole()
        ]
        while excess > 0 and whole:
            average = sum(age for age, _, _ in whole) / len(whole)
            for age, block, pool in whole:
                if age >= average:
                    pool.drop(block)
                    excess -= (block >> SHIFT) * BLOCK
            whole = [entry for entry in whole if entry[0] < average]


_Held = tuple[int, int, Pool]
"""A live storage: the bytes it asked for, its block, and the block's pool."""


def replay(
    events: Iterable[tuple[int, int]],
    config: AllocatorConfig = DEFAULT,
    *,
    capacity: int | None = None,
    total: int | None = None,
    streams: Mapping[int, int] | None = None,
    optional: Collection[int] = (),
    emptied: Collection[int] = (),
    deferred: Mapping[int, int] | None = None,
    timeline: bool = False,
) -> Replay:
    """What the allocator holds while `events` happen: (storage, bytes) pairs, positive to allocate, negative to free.

    A difference on a live storage that does not free it is a resize: a new block, a copy, then the old block is freed.
    `capacity` is what CUDA can give this process (the card less its context), None without bound; `total` is the card's
    size, of which `config.memory_fraction` is taken (None: `capacity`). `streams` maps storages to the stream they are
    allocated on (default 0). `optional` are storages that the run does without where there is no room. Before each of
    the events that `emptied` numbers, all that is cached is given back. `deferred` maps events that free a block to
    those before which it can be reused, unless memory runs out first. Raises `InputError` when an event frees more than
    a storage holds.
    """
    whole = total if total is not None else capacity
    allowed = None if whole is None else config.allowed(whole)
    return _run(events, Allocator(config, capacity, allowed, streams, optional, emptied, deferred), timeline)


def _run(events: Iterable[tuple[int, int]], allocator: Allocator, timeline: bool) -> Replay:
    """The loop over `events`. Its state is in local names: an attribute or a call per figure would halve its speed."""
    small, large, streams = allocator.pool(0, True), allocator.pool(0, False), allocator.streams
    memory, block_size = allocator.memory, allocator.config.block_size
    plain, deferred = max(allocator.config.roundup_divisions) < 2, allocator.deferred
    live: dict[int, _Held] = {}
    rows: list[tuple[int, int, int, int, int]] | None = [] if timeline else None
    segments: list[tuple[int, int, int, int]] = []
    requested = allocated = reserved = most_requested = most_allocated = most_reserved = idle = 0
    at_requested = at_allocated = at_reserved = event = -1
    failure: OutOfMemory | None = None
    for event, (storage, delta) in allocator.admitted(events):
        held = live.get(storage)
        if held is not None and held[0] + delta == 0:
            del live[storage]
            requested += delta
            allocated -= held[1] >> SHIFT
            if event in deferred:
                allocator.defer(event, held)
            else:
                held[2].give(held[1])
            if rows is not None:
                rows.append((event, requested, allocated, reserved, held[1] & ADDRESS))
            continue
        request = delta if held is None else held[0] + delta
        if request <= 0:
            if storage >= 0:
                raise InputError(f"event {event} frees more bytes than storage {storage} holds")
            allocator.told(storage, event)
            reserved = memory.reserved
            segments += memory.changes_at(event)
            continue
        size = (request + BLOCK - 1) // BLOCK if plain else block_size(request) // BLOCK
        pool = small if size <= _SMALL else large
        if streams and streams.get(storage, 0):
            pool = allocator.pool(streams[storage], size <= _SMALL)
        block = pool.take(size)
        if not block:
            block = allocator.grow(pool, size)
            reserved = memory.reserved
            segments += memory.changes_at(event)
            if not block and held is None and allocator.skips(storage):
                continue
            if not block:
                levels = Levels(requested, allocated * BLOCK, reserved * BLOCK)
                failure = OutOfMemory(event, storage, request, allocator.segment(size) * BLOCK, levels)
                break
        live[storage] = (request, block, pool)
        requested += request
        allocated += block >> SHIFT
        if requested > most_requested:
            most_requested, at_requested = requested, event
        if allocated > most_allocated:
            most_allocated, at_allocated = allocated, event
        if reserved > most_reserved:
            most_reserved, at_reserved, idle = reserved, event, reserved - allocated
        if held is not None:
            requested -= held[0]
            allocated -= held[1] >> SHIFT
            if event in deferred:
                allocator.defer(event, held)
            else:
                held[2].give(held[1])
        if rows is not None:
            rows.append((event, requested, allocated, reserved, block & ADDRESS))
    ends = failure.event if failure else max(allocator.seen, len(rows or ()))
    return Replay(
        Peak(most_requested, at_requested),
        Peak(most_allocated * BLOCK, at_allocated),
        Peak(most_reserved * BLOCK, at_reserved),
        idle * BLOCK,
        Levels(requested, allocated * BLOCK, reserved * BLOCK),
        allocator.segments(live),
        failure,
        None if rows is None else _timeline(rows, segments, ends),
        frozenset(allocator.skipped),
        allocator.refused,
        _of_streams(segments, at_reserved),
    )


def _between(
    pairs: Iterable[tuple[int, tuple[int, int]]], told: deque[tuple[int, tuple[int, int]]]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """The numbered events `pairs`, each after those that are `told` of its number or one before."""
    for number, pair in pairs:
        while told and told[0][0] <= number:
            yield number, told.popleft()[1]
        yield number, pair


def _of_streams(segments: Iterable[tuple[int, int, int, int]], event: int) -> dict[int, int]:
    """The bytes that each stream has in segments after an event."""
    found: Counter[int] = Counter()
    for at, stream, _, size in segments:
        if at <= event:
            found[stream] += size * BLOCK
    return dict(sorted(found.items()))


def _tiles(
    start: int, end: int, pool: Pool, owners: Mapping[int, tuple[int, int | None]]
) -> Iterable[tuple[int, int, int | None]]:
    """The blocks from `start` to `end`, in order, in bytes."""
    while start < end:
        block, storage = owners.get(start, (0, None))
        size = (block or pool.starts[start]) >> SHIFT
        yield start * BLOCK, size * BLOCK, storage
        start += size


def _timeline(
    rows: list[tuple[int, int, int, int, int]], segments: list[tuple[int, int, int, int]], events: int
) -> Timeline:
    """The levels after each of so many events; after one that has no row they are those of the row before."""
    import numpy as np

    table = np.array([(-1, 0, 0, 0, 0), *rows], dtype=np.int64)
    table = table[np.searchsorted(table[:, 0], np.arange(events), side="right") - 1]
    table[:, 2:] *= BLOCK
    _, requested, allocated, reserved, address = table.T.copy()
    stretches = tuple((event, start * BLOCK, size * BLOCK) for event, _, start, size in segments)
    return Timeline(requested, allocated, reserved, address, stretches)
