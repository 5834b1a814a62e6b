"""Replay a run's events through the CUDA caching allocator: requested, allocated and reserved bytes, event by event.

`replay` knows how much memory CUDA can give; `replay_within` knows it only as an interval, as on a real card.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memsize.device.allocation_events import OMITTED, AllocationEvents
from memsize.device.allocator import SMALL_BLOCKS, Allocator, Layout, Segment
from memsize.device.allocator_config import BLOCK, AllocatorConfig
from memsize.device.compiled_replay import CompiledReplay, compiled_replay
from memsize.device.pools import ADDRESS, SHIFT, Pool
from memsize.errors import InputError
from memsize.records.gpu import Interval

if TYPE_CHECKING:
    import numpy as np

Events = Iterable[tuple[int, int]]
Numbered = Iterator[tuple[int, tuple[int, int]]]
DEFAULT: Final = AllocatorConfig()
_MOST_PREFIXES: Final = 128


class Mark(NamedTuple):
    """Something that the program does before `event`: empty the cache, or wait for streams that use deferred blocks."""

    event: int
    action: Literal["empty the cache", "wait for streams"]


class Peak(NamedTuple):
    """The most bytes at any moment, and the first event after which they are in use (-1: before any)."""

    bytes: int
    event: int


class Levels(NamedTuple):
    """Bytes at one moment."""

    requested: int
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that failed: its event and bytes, the bytes then requested from CUDA, and the levels before it."""

    event: int
    storage: int
    request: int
    segment: int
    levels: Levels


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
    """The result of a replay: `requested` ≤ `allocated` ≤ `reserved` at every event.

    `idle` is what was reserved and not allocated when `reserved` peaked first. A replay that ran out of memory ends
    there, with the levels of that moment.
    """

    requested: Peak
    allocated: Peak
    reserved: Peak
    idle: int
    final: Levels
    layout: Layout
    out_of_memory: OutOfMemory | None = None
    timeline: Timeline | None = None
    skipped: frozenset[int] = frozenset()
    """The storages that the run did without, as there was no room for them."""
    refused: int | None = None
    """The least that CUDA refused to bring the reserved bytes to; None where it refused nothing."""
    of_streams: Mapping[int, int] = field(default_factory=dict)
    """The bytes of each stream's segments when `reserved` peaked first: they add up to it."""

    def holds_with(self, capacity: int | None) -> bool:
        """Whether a replay with `capacity` bytes (None: any number) would be the same: CUDA grants and refuses as much.

        Valid only if nothing else depends on the capacity (`AllocatorConfig.depends_on_card`).
        """
        return _is_between(self.reserved.bytes, self.refused, capacity)

    @property
    def last_change(self) -> int:
        """The last event at which memory came from CUDA, went back, or was refused; -1 where none did."""
        changes, failure = self.layout.allocator.memory.changes, self.out_of_memory
        return max(changes[-1][0] if changes else -1, failure.event if failure else -1)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments at the end, by address."""
        return self.layout.segments

    @property
    def fragmentation(self) -> float:
        """The share of the reserved peak that no block used then, 0 to 1."""
        return self.idle / self.reserved.bytes if self.reserved.bytes else 0.0


def replay(
    events: Events,
    config: AllocatorConfig = DEFAULT,
    *,
    capacity: int | None = None,
    total: int | None = None,
    streams: Mapping[int, int] | None = None,
    optional: Collection[int] = (),
    emptied: Collection[int] = (),
    deferred: Mapping[int, int] | None = None,
    timeline: bool = False,
    prefixes: Prefixes | None = None,
) -> Replay:
    """Replay `events`, pairs of a storage and the bytes that it gains (above 0: allocated) or loses (below 0: freed).

    A difference on a live storage that does not free it is a resize: a new block, a copy, then the old block is freed.
    `capacity` is what CUDA can give this process (the card less its context), None without bound; `total` is the card's
    size, of which `config.memory_fraction` is taken (None: `capacity`). `streams` maps storages to the stream they are
    allocated on (default 0). `optional` are storages that the run does without where there is no room. The cache is
    emptied before the events with the numbers in `emptied`. `deferred` maps each event that frees a block to the event
    before which the block can be reused, unless memory runs out first. `prefixes` are those of other replays that
    differ in nothing but the capacity: this one continues from the longest that it has too, and adds its own. Raises
    `InputError` when an event frees more than a storage holds.
    """
    if not isinstance(events, Sized):
        events = tuple(events)
    whole = total if total is not None else capacity
    allocator = Allocator(config, capacity, None if whole is None else config.allowed(whole))
    run = _Run(allocator, streams or {}, optional, deferred or {}, rows=[] if timeline else None)
    marks = [Mark(event, "empty the cache") for event in emptied]
    marks += [Mark(event, "wait for streams") for event in {*run.deferred.values()}]
    if isinstance(events, AllocationEvents) and not (timeline or deferred) and allocator.is_plain:
        first = min((mark.event for mark in marks), default=len(events))
        run.begin(compiled_replay(events[:first], run.streams, allocator.limit, config.large_segment_size // BLOCK))
    if prefixes is not None and not config.depends_on_card:
        shared = prefixes.longest(capacity)
        run = run if shared is None or shared.event <= run.event else shared.copy(capacity)
        run.prefixes, run.next_copy = prefixes, run.event + 1
    # What is done before the first of these events is done again, to no effect.
    marks = sorted(mark for mark in marks if run.event <= mark.event < len(events))
    for mark, stretch in _stretches(events, run.event, marks):
        if mark is not None:
            run.apply(mark)
        run.replay(stretch)
        if run.failure is not None:
            break
    return run.result(len(events))


def _stretches(events: Events, first: int, marks: Sequence[Mark]) -> Iterator[tuple[Mark | None, Numbered]]:
    """The events from the `first` on, numbered, parted at the marks: each stretch with the mark before its first."""
    rest = events[first:] if isinstance(events, AllocationEvents) else islice(events, first, None)
    numbered = enumerate(rest, first)
    mark = None
    for following in marks:
        yield mark, islice(numbered, following.event - first)
        first, mark = following.event, following
    yield mark, numbered


@dataclass(slots=True)
class _Run:
    """A replay in progress: what is alive, and the figures after the events so far.

    What is allocated, reserved or idle is counted in blocks of 512 B. `rows` are (event, requested, allocated,
    reserved, address) after each event; None where nobody reads them. `event` is the first to be replayed. `prefixes`
    get a copy of the run before a request that CUDA refuses, from the event `next_copy` on.
    """

    allocator: Allocator
    streams: Mapping[int, int]
    optional: Collection[int]
    deferred: Mapping[int, int]
    rows: list[tuple[int, int, int, int, int]] | None
    prefixes: Prefixes | None = None
    event: int = 0
    next_copy: int = 0
    skipped: set[int] = field(default_factory=set)
    failure: tuple[int, int, int, int] | None = None
    """The event, storage and bytes of the request that failed, and the bytes then requested from CUDA."""
    requested: int = 0
    allocated: int = 0
    peaks: tuple[tuple[int, int], tuple[int, int], tuple[int, int]] = (0, -1), (0, -1), (0, -1)
    """The most requested, allocated and reserved, and after which event."""
    idle: int = 0

    def copy(self, capacity: int | None, **changes: Any) -> _Run:
        """A copy of the run, on a GPU that can give `capacity`."""
        rows = None if self.rows is None else self.rows.copy()
        return replace(self, allocator=self.allocator.copy(capacity), rows=rows, skipped=self.skipped.copy(), **changes)

    def begin(self, started: CompiledReplay | None) -> None:
        """Go on from where compiled code has come to, if it has replayed any events."""
        if started is None:
            return
        self.event = started.event
        self.requested, self.allocated, self.idle = started.requested, started.allocated, started.idle
        self.peaks = started.peaks
        started.fill(self.allocator)

    def apply(self, mark: Mark) -> None:
        """Do what the program does between two events."""
        self.allocator.memory.event = mark.event
        if mark.action == "empty the cache":
            self.allocator.release()
        else:
            self.allocator.free_deferred(mark.event)

    def replay(self, numbered: Numbered) -> None:
        """Loop over events, up to a failure. State is in local names: an attribute or a call per figure would halve the
        speed.
        """
        live, streams, deferred, rows = self.allocator.live, self.streams, self.deferred, self.rows
        allocator, memory, block_size = self.allocator, self.allocator.memory, self.allocator.config.block_size
        small, large = allocator.pool(0, True), allocator.pool(0, False)
        plain = max(allocator.config.roundup_divisions) < 2
        requested, allocated, reserved, idle = self.requested, self.allocated, memory.reserved, self.idle
        (most_requested, at_requested), (most_allocated, at_allocated), (most_reserved, at_reserved) = self.peaks
        if self.optional:
            numbered = (event for event in numbered if event[1][0] not in self.skipped)
        for event, (storage, delta) in numbered:
            before = live.get(storage)
            request = delta if before is None else before[0] + delta
            if request > 0:
                size = (request + BLOCK - 1) // BLOCK if plain else block_size(request) // BLOCK
                pool = small if size <= SMALL_BLOCKS else large
                if streams and streams.get(storage, 0):
                    pool = allocator.pool(streams[storage], size <= SMALL_BLOCKS)
                block = pool.take(size)
                if not block:
                    self.requested, self.allocated, self.idle = requested, allocated, idle
                    self.peaks = (
                        (most_requested, at_requested),
                        (most_allocated, at_allocated),
                        (most_reserved, at_reserved),
                    )
                    block = self._grow(pool, size, event=event, storage=storage, request=request)
                    reserved = memory.reserved
                    if not block and self.failure is not None:
                        break
                    if not block:
                        continue
                    if reserved > most_reserved:
                        most_reserved, at_reserved = reserved, event
                        idle = reserved - allocated - (block >> SHIFT)
                live[storage] = (request, block, pool)
                requested += request
                allocated += block >> SHIFT
                if requested > most_requested:
                    most_requested, at_requested = requested, event
                if allocated > most_allocated:
                    most_allocated, at_allocated = allocated, event
            elif before is not None and not request:
                block = live.pop(storage)[1]
            elif storage == OMITTED[0]:
                continue
            else:
                raise InputError(f"event {event} frees more bytes than storage {storage} holds")
            if before is not None:
                requested -= before[0]
                allocated -= before[1] >> SHIFT
                if deferred and event in deferred:
                    allocator.defer(deferred[event], before)
                else:
                    before[2].give(before[1])
            if rows is not None:
                rows.append((event, requested, allocated, reserved, block & ADDRESS))
        self.requested, self.allocated, self.idle = requested, allocated, idle
        self.peaks = (most_requested, at_requested), (most_allocated, at_allocated), (most_reserved, at_reserved)

    def _grow(self, pool: Pool, size: int, *, event: int, storage: int, request: int) -> int:
        """A block from more memory; 0 where there is none, and the run goes on without the storage or fails."""
        self.allocator.memory.event = event
        if self.prefixes is not None and event >= self.next_copy and self.prefixes.end_with(self.allocator, size):
            self.prefixes.runs.append(self.copy(None, event=event, prefixes=None))
            self.next_copy = event + self.prefixes.apart
            if self.rows is not None or self.allocator.memory.capacity is None:
                self.prefixes = None  # copies of a timeline, or of a run that grows on, cost more than they save
        block = self.allocator.grow(pool, size)
        if not block and storage in self.optional and storage not in self.allocator.live:
            self.skipped.add(storage)
        elif not block:
            self.failure = event, storage, request, self.allocator.segment(size) * BLOCK
        return block

    def result(self, events: int) -> Replay:
        """The result of a run of so many events."""
        requested, allocated, reserved = self.peaks
        changes, failure = self.allocator.memory.changes, self.failure
        final = Levels(self.requested, self.allocated * BLOCK, self.allocator.memory.reserved * BLOCK)
        ended = events if failure is None else failure[0]
        sizes: Counter[int] = Counter()
        for at, stream, _, size in changes:
            if at <= reserved[1]:
                sizes[stream] += size * BLOCK
        return Replay(
            requested=Peak(*requested),
            allocated=Peak(allocated[0] * BLOCK, allocated[1]),
            reserved=Peak(reserved[0] * BLOCK, reserved[1]),
            idle=self.idle * BLOCK,
            final=final,
            layout=Layout(self.allocator),
            out_of_memory=None if failure is None else OutOfMemory(*failure, levels=final),
            timeline=None if self.rows is None else _timeline(self.rows, changes, ended),
            skipped=frozenset(self.skipped),
            refused=self.allocator.refused,
            of_streams=dict(sorted(sizes.items())),
        )


def _timeline(
    rows: list[tuple[int, int, int, int, int]], changes: Iterable[tuple[int, int, int, int]], events: int
) -> Timeline:
    """The levels after each of `events` events; an event without a row has those of the row before."""
    import numpy as np

    table = np.array([(-1, 0, 0, 0, 0), *rows], dtype=np.int64)
    table = table[np.searchsorted(table[:, 0], np.arange(events), side="right") - 1]
    table[:, 2:] *= BLOCK
    _, requested, allocated, reserved, address = table.T.copy()
    segments = tuple((event, start * BLOCK, size * BLOCK) for event, _, start, size in changes)
    return Timeline(requested, allocated, reserved, address, segments)


def _is_between(reserved: int, refused: int | None, capacity: int | None) -> bool:
    """Whether CUDA, with `capacity`, grants what made `reserved` bytes and refuses what would make `refused`."""
    if capacity is None:
        return refused is None
    return reserved <= capacity and (refused is None or capacity < refused)


@dataclass(slots=True)
class Prefixes:
    """The beginnings of replays that differ only in the capacity, each up to a request that CUDA refuses.

    That of a replay without bound ends before it reserves more than `least` bytes, the least capacity worth a replay.
    Those of one replay end `apart` events after each other, as each is a copy, which takes as long as some 200 events.
    """

    least: int | None = None
    apart: int = 10_000
    runs: deque[_Run] = field(default_factory=lambda: deque(maxlen=_MOST_PREFIXES))

    def longest(self, capacity: int | None) -> _Run | None:
        """The longest that a replay with `capacity` shares, as CUDA grants and refuses the same before."""
        shared = (run for run in self.runs if _is_between(run.peaks[2][0] * BLOCK, run.allocator.refused, capacity))
        return max(shared, key=lambda run: run.event, default=None)

    def end_with(self, allocator: Allocator, size: int) -> bool:
        """Whether a beginning ends where more memory is needed for a block of `size`."""
        memory = allocator.memory
        end = memory.capacity if memory.capacity is not None else self.least and self.least // BLOCK
        return end is not None and memory.reserved + allocator.segment(size) > end


class BoundedReplay(NamedTuple):
    """Two replays on a card: with the least memory that may be used outside the allocator, and with the most.

    `failure` is the request that fails with the most overhead. Where the run only completes with the least, both are
    that replay. `certain`: it fails even so, and both are a replay without any bound.
    """

    with_least_overhead: Replay
    with_most_overhead: Replay
    failure: OutOfMemory | None = None
    certain: bool = False


def replay_within(
    events: Events,
    config: AllocatorConfig,
    total: int,
    outside: Interval,
    *,
    streams: Mapping[int, int] | None = None,
    optional: Collection[int] = (),
    emptied: Collection[int] = (),
    deferred: Mapping[int, int] | None = None,
    timeline: bool = False,
    shared: list[Replay] | None = None,
) -> BoundedReplay:
    """Replay `events` on a card of `total` bytes, of which the CUDA context, and NCCL, take an amount in `outside`.

    Near the limit the two replays differ: the overhead decides when cached segments are given back, and a run that
    gives some back reserves less. `shared` are the replays on other cards, used again where they would be the same; new
    ones are added. The other arguments are those of `replay`.
    """
    how: Any = {"streams": streams, "optional": optional, "emptied": emptied, "deferred": deferred}
    run = partial(replay, events, timeline=timeline, prefixes=Prefixes(), **how)
    others = [] if shared is None else shared

    def with_capacity(capacity: int | None) -> Replay:
        equal = next((other for other in others if other.holds_with(capacity)), None)
        if equal is None or config.depends_on_card:
            unbounded = replace(config, memory_fraction=1.0)
            equal = run(config=unbounded) if capacity is None else run(config=config, capacity=capacity, total=total)
            others.append(equal)
        return equal

    def beside(overhead: int) -> Replay:
        return with_capacity(max(total - overhead, 0))

    most = beside(outside.high)
    if most.refused is None:
        return BoundedReplay(most, most)
    least, failure = beside(outside.low), most.out_of_memory
    if least.out_of_memory is None:
        return BoundedReplay(least, most if failure is None else least, failure)
    if failure is None:
        return BoundedReplay(most, most)
    unbounded = with_capacity(None)
    return BoundedReplay(unbounded, unbounded, failure, certain=True)
