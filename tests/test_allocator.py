"""The caching allocator: worked examples, laws, and a second implementation written from the documented rules."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsize.device.allocator import replay
from memsize.device.config import AllocatorConfig
from memsize.errors import InputError

KiB, MiB = 1 << 10, 1 << 20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def levels(result):
    return tuple(result.final)


def blocks(result):
    """Per segment by address: its bytes, and the bytes and owner of each block."""
    return [(segment.bytes, [block[1:] for block in segment.blocks]) for segment in result.segments]


# --- worked examples


def test_nothing_happens():
    result = replay([])
    assert result.requested == result.allocated == result.reserved == (0, -1)
    assert result.fragmentation == 0
    assert result.segments == ()


def test_small_requests_share_a_segment_of_2_mib():
    result = replay([(0, 100), (1, 513), (2, MiB)])
    # 512 + 1024 + 1,048,576 = 1,050,112 of 2,097,152
    assert levels(result) == (100 + 513 + MiB, 1_050_112, 2 * MiB)
    assert blocks(result) == [(2 * MiB, [(512, 0), (1024, 1), (MiB, 2), (2 * MiB - 1_050_112, None)])]
    assert result.idle == 2 * MiB - 512  # the segment came with the first request, when 512 B were allocated


def test_requests_from_1_to_10_mib_share_20_mib():
    result = replay([(0, MiB + 1), (1, 9 * MiB), (2, 9 * MiB)])
    # 1 MiB + 512 B, then 9 MiB twice: 19 MiB + 512 B of 20 MiB; the rest is below 1 MiB but is not cut off by the
    # last one: 20 - 10 MiB - 512 B = 10 MiB - 512 B remain for it, and 1 MiB - 512 B is no rest worth keeping
    assert blocks(result) == [(20 * MiB, [(MiB + 512, 0), (9 * MiB, 1), (10 * MiB - 512, 2)])]
    assert result.allocated.bytes == 20 * MiB


def test_requests_from_10_mib_get_their_own_segment():
    result = replay([(0, 10 * MiB), (1, 11 * MiB)])
    # 11 MiB is rounded up to 12 MiB; the rest of 1 MiB is not above 1 MiB and is handed out with it
    assert blocks(result) == [(10 * MiB, [(10 * MiB, 0)]), (12 * MiB, [(12 * MiB, 1)])]
    assert levels(result) == (21 * MiB, 22 * MiB, 22 * MiB)
    assert result.reserved == (22 * MiB, 1)


def test_the_smallest_sufficient_block_is_taken():
    events = [
        (0, 30 * MiB),
        (1, 12 * MiB),
        (2, 20 * MiB),
        (0, -30 * MiB),
        (1, -12 * MiB),
        (2, -20 * MiB),
        (3, 11 * MiB),
    ]
    result = replay(events)
    assert blocks(result) == [
        (30 * MiB, [(30 * MiB, None)]),
        (12 * MiB, [(12 * MiB, 3)]),
        (20 * MiB, [(20 * MiB, None)]),
    ]
    assert result.reserved == (62 * MiB, 2)


def test_a_freed_block_merges_with_both_neighbours():
    result = replay([(0, KiB), (1, KiB), (2, KiB), (0, -KiB), (2, -KiB), (1, -KiB)])
    assert blocks(result) == [(2 * MiB, [(2 * MiB, None)])]
    assert levels(result) == (0, 0, 2 * MiB)


def test_a_hole_that_is_too_small_costs_a_segment():
    # 14 + 16 MiB freed beside a live block: 30 MiB are free, but no block of 20
    events = [(0, 14 * MiB), (1, 16 * MiB), (0, -14 * MiB), (1, -16 * MiB), (2, 20 * MiB)]
    result = replay(events)
    assert result.reserved.bytes == 50 * MiB
    assert result.idle == 30 * MiB
    assert result.fragmentation == pytest.approx(0.6)


def test_a_resize_holds_both_blocks_while_it_copies():
    result = replay([(0, 10 * MiB), (0, 10 * MiB), (0, -5 * MiB)])
    # 10 then 20 MiB at once; shrinking to 15 MiB takes a third block (16 MiB) while 20 MiB live
    assert result.requested == (35 * MiB, 2)
    assert levels(result) == (15 * MiB, 16 * MiB, 46 * MiB)


def test_streams_do_not_share_blocks():
    events = [(0, KiB), (0, -KiB), (1, KiB)]
    assert replay(events).reserved.bytes == 2 * MiB
    apart = replay(events, streams={1: 7})
    assert apart.reserved.bytes == 4 * MiB
    assert [segment.stream for segment in apart.segments] == [0, 7]


def test_out_of_memory_after_giving_back_what_is_cached():
    events = [(0, 30 * MiB), (1, 30 * MiB), (0, -30 * MiB), (2, 40 * MiB)]
    assert replay(events, capacity=69 * MiB).out_of_memory is not None
    enough = replay(events, capacity=70 * MiB)
    assert enough.out_of_memory is None
    assert levels(enough) == (70 * MiB, 70 * MiB, 70 * MiB)  # the free 30 MiB went back to CUDA
    failed = replay(events, capacity=69 * MiB).out_of_memory
    assert (failed.event, failed.storage, failed.request, failed.segment) == (3, 2, 40 * MiB, 40 * MiB)
    assert failed.held == (30 * MiB, 30 * MiB, 30 * MiB)


def test_the_memory_fraction_limits_too():
    half = AllocatorConfig(memory_fraction=0.5)
    assert replay([(0, 40 * MiB)], half, total=80 * MiB).out_of_memory is None
    assert replay([(0, 40 * MiB), (1, 1)], half, total=80 * MiB).out_of_memory.segment == 2 * MiB


def test_an_unsplittable_block_serves_only_what_nearly_fills_it():
    config = AllocatorConfig(max_split_size=20 * MiB)
    events = [(0, 60 * MiB), (0, -60 * MiB), (1, 12 * MiB), (2, 30 * MiB), (3, 50 * MiB)]
    # 12 MiB may not take from the 60; 30 MiB is 30 below it, beyond 20 of tolerance; 50 MiB takes it whole
    result = replay(events, config)
    assert blocks(result) == [(60 * MiB, [(60 * MiB, 3)]), (12 * MiB, [(12 * MiB, 1)]), (30 * MiB, [(30 * MiB, 2)])]


def test_garbage_collection_gives_old_segments_back_before_asking_for_more():
    config = AllocatorConfig(garbage_collection_threshold=0.5, memory_fraction=0.9)
    events = [(0, 60 * MiB), (0, -60 * MiB), (1, 50 * MiB), (1, -50 * MiB), (2, 70 * MiB)]
    # allowed are 180 of 200 MiB, collected from 90 MiB: the 60 held are below; 1 takes them; at 2 still 60
    result = replay(events, config, total=200 * MiB)
    assert result.reserved.bytes == 130 * MiB
    events += [(2, -70 * MiB), (3, 100 * MiB)]
    # at 3, 130 are held, 40 above the threshold; ages: the 60 saw two requests pass, the 70 one; the older goes
    assert replay(events, config, total=200 * MiB).final.reserved == 170 * MiB


def test_expandable_segments_grow_in_steps():
    result = replay([(0, 30 * MiB), (1, 5 * MiB), (2, 10 * MiB), (3, 1)], EXPANDABLE)
    # 30 MiB map 40, of which 10 remain: 5 fit; 10 need 5 more: one step of 20. Small: one step of 2 MiB
    assert result.final.reserved == 62 * MiB
    assert blocks(result) == [
        (60 * MiB, [(30 * MiB, 0), (5 * MiB, 1), (10 * MiB, 2), (15 * MiB, None)]),
        (2 * MiB, [(512, 3), (2 * MiB - 512, None)]),
    ]


def test_expandable_segments_unmap_whole_steps_when_memory_runs_out():
    events = [(0, 30 * MiB), (1, 30 * MiB), (0, -30 * MiB), (2, 40 * MiB)]
    # 60 MiB mapped, 20 of the first 30 can be unmapped; 40 need two steps at the end
    result = replay(events, EXPANDABLE, capacity=80 * MiB)
    assert result.out_of_memory is None
    assert blocks(result) == [(80 * MiB, [(10 * MiB, None), (30 * MiB, 1), (40 * MiB, 2)])]
    assert replay(events, EXPANDABLE, capacity=79 * MiB).out_of_memory.event == 3


def test_expandable_segments_waste_less_than_fixed_ones():
    sizes = [14 * MiB + step * 2 * MiB for step in range(20)]
    events = [event for number, size in enumerate(sizes) for event in ((number, size), (number, -size))]
    assert replay(events).reserved.bytes == sum(sizes)
    assert replay(events, EXPANDABLE).reserved.bytes == 60 * MiB  # 52 MiB in steps of 20


def test_freeing_too_much_is_refused():
    with pytest.raises(InputError, match="event 1 frees more bytes than storage 4 holds"):
        replay([(4, 100), (4, -200)])
    with pytest.raises(InputError, match="event 0 frees more bytes than storage 9 holds"):
        replay([(9, -1)])


def test_timeline():
    timeline = replay([(0, 100), (1, 3 * MiB), (0, -100)], timeline=True).timeline
    assert timeline.requested.tolist() == [100, 3 * MiB + 100, 3 * MiB]
    assert timeline.allocated.tolist() == [512, 3 * MiB + 512, 3 * MiB]
    assert timeline.reserved.tolist() == [2 * MiB, 22 * MiB, 22 * MiB]
    assert timeline.address[0] == timeline.address[2] != timeline.address[1]
    assert replay([], timeline=True).timeline.requested.shape == (0,)


# --- the second implementation: one list of blocks per segment, every question answered by looking at all of them


@dataclass(eq=False)
class Block:
    size: int
    owner: int | None = None
    hole: bool = False
    since: int = 0

    @property
    def free(self):
        return self.owner is None and not self.hole


@dataclass(eq=False)
class Stretch:
    """One segment: what PyTorch got from one cudaMalloc, or one range of addresses that grows."""

    small: bool
    blocks: list[Block] = field(default_factory=list)


class Reference:
    def __init__(self, config, capacity, total):
        self.config, self.capacity = config, capacity
        self.allowed = int(config.memory_fraction * total) if config.memory_fraction < 1 else None
        self.stretches, self.calls, self.reserved = [], 0, 0

    def collects(self):
        return self.allowed is not None and self.config.garbage_collection_threshold > 0

    def rounded(self, request):
        interval = next((i for i in range(15) if request < MiB << (i + 1)), 15)
        count = self.config.roundup_divisions[interval]
        if count > 1 and request > 512 * count:
            floor = 512
            while floor * 2 <= request:
                floor *= 2
            return next(size for size in range(floor, 2 * floor + 1, floor // count) if size >= request)
        return max(512, (request + 511) & ~511)

    def allocate(self, owner, request):
        size = self.rounded(request)
        small = size <= MiB
        if not small and self.collects():
            self.calls += 1
        found = self.search(size, small)
        if found is None:
            self.collect()
            found = self.more(size, small)
            if found is None and self.config.max_split_size is not None and not self.config.expandable_segments:
                found = self.more(size, small) if self.release_oversize(size, small) else None
            if found is None:
                self.release()
                found = self.more(size, small)
        if found is None:
            return False
        stretch, block = found
        rest = block.size - size
        if small or self.config.expandable_segments:
            split = rest >= 512
        else:
            split = rest > MiB and (self.config.max_split_size is None or size < self.config.max_split_size)
        if split:
            block.size = size
            stretch.blocks.insert(stretch.blocks.index(block) + 1, Block(rest, since=self.calls))
        block.owner = owner
        return True

    def segment_size(self, size):
        if size <= MiB:
            return 2 * MiB
        if size < 10 * MiB:
            return self.config.large_segment_size
        return -(-size // (2 * MiB)) * 2 * MiB

    def candidates(self, small):
        """All free blocks of a pool with their stretch, smallest first, then lowest address."""
        pairs = [(s, b) for s in self.stretches if s.small == small for b in s.blocks if b.free]
        return sorted(pairs, key=lambda pair: pair[1].size)  # stable, and pairs are in order of address

    def reach(self, stretch, block):
        following = stretch.blocks[stretch.blocks.index(block) + 1 :]
        return block.size + (following[0].size if following and following[0].hole else 0)

    def search(self, size, small):
        fitting = [pair for pair in self.candidates(small) if pair[1].size >= size]
        if not fitting:
            return None
        at = 0
        if self.config.expandable_segments:
            while at + 1 < len(fitting) and self.reach(*fitting[at + 1]) < self.reach(*fitting[at]):
                at += 1
        limit, found = self.config.max_split_size, fitting[at][1].size
        if limit is not None:
            slack = self.config.max_non_split_rounding or self.config.large_segment_size
            if (size < limit <= found) or (size >= limit and found >= size + slack):
                return None
        return fitting[at]

    def obtain(self, size):
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def more(self, size, small):
        segment = self.segment_size(size)
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.config.expandable_segments:
            return self.expand(size, small)
        if not self.obtain(segment):
            return None
        self.stretches.append(Stretch(small, [Block(segment)]))
        return self.stretches[-1], self.stretches[-1].blocks[0]

    def expand(self, size, small):
        grain = 2 * MiB if small else self.config.large_segment_size
        place = self.room(size, small)
        if place is None:
            space = (self.capacity // 512 + self.capacity // 512 // 8) * 512
            space = max(-(-space // grain) * grain, -(-size // grain) * grain)
            self.stretches.append(Stretch(small, [Block(space, hole=True)]))
            place = self.stretches[-1], 0
        stretch, at = place
        while True:
            if stretch.blocks[at].free and stretch.blocks[at].size >= size:
                return stretch, stretch.blocks[at]
            have = stretch.blocks[at].size if stretch.blocks[at].free else 0
            hole = stretch.blocks[at + 1 if have else at]
            mapped = -(-min(size - have, hole.size) // grain) * grain
            if not self.obtain(mapped):
                return None
            index = stretch.blocks.index(hole)
            hole.size -= mapped
            stretch.blocks.insert(index, Block(mapped))
            self.tidy(stretch)

    def room(self, size, small):
        for stretch in (s for s in self.stretches if s.small == small):
            for at, block in enumerate(stretch.blocks):
                if block.hole:
                    start = at - 1 if at and stretch.blocks[at - 1].free else at
                    run = itertools.takewhile(lambda b: b.owner is None, stretch.blocks[start:])
                    if sum(b.size for b in run) >= size:
                        return stretch, start
        return None

    def tidy(self, stretch, since=0):
        """Merge neighbours that are both free or both unmapped; drop what is empty."""
        merged = []
        for block in (b for b in stretch.blocks if b.size):
            if merged and block.owner is None and merged[-1].owner is None and merged[-1].hole == block.hole:
                merged[-1].size += block.size
                merged[-1].since = since
            else:
                merged.append(block)
        stretch.blocks = merged

    def free(self, owner):
        for stretch in self.stretches:
            for block in stretch.blocks:
                if block.owner == owner:
                    block.owner, block.since = None, self.calls
                    # only the freed block merges: other neighbours are merged already
                    self.tidy(stretch, self.calls)
                    return

    def drop(self, stretch):
        self.reserved -= stretch.blocks[0].size
        self.stretches.remove(stretch)

    def whole(self):
        return [s for s in self.stretches if len(s.blocks) == 1 and s.blocks[0].free]

    def release_oversize(self, size, small):
        wanted, limit = max(size, self.config.max_split_size), self.config.max_split_size
        pairs = self.candidates(small)
        large = [stretch for stretch, block in pairs if block.size >= wanted]
        if large:
            self.drop(large[0])
            return True
        released = 0
        for stretch, block in reversed(pairs):
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self.drop(stretch)
        return released >= wanted

    def release(self):
        if not self.config.expandable_segments:
            for stretch in self.whole():
                self.drop(stretch)
            return
        for stretch in self.stretches:
            grain = 2 * MiB if stretch.small else self.config.large_segment_size
            cut, start = [], 0
            for block in stretch.blocks:
                first, last = -(-start // grain) * grain, (start + block.size) // grain * grain
                start += block.size
                if block.free and first < last:
                    self.reserved -= last - first
                    before = first - (start - block.size)
                    cut += [Block(before), Block(last - first, hole=True), Block(start - last)]
                else:
                    cut.append(block)
            stretch.blocks = cut
            self.tidy(stretch)

    def collect(self):
        if not self.collects():
            return
        excess = self.reserved - int(self.config.garbage_collection_threshold * self.allowed)
        while excess > 0:
            old = [s for s in self.whole() if not s.small and not self.config.expandable_segments]
            ages = {id(s): self.calls - s.blocks[0].since for s in old}
            gone = [s for s in old if ages[id(s)] * len(old) >= sum(ages.values())]
            for stretch in gone:
                excess -= stretch.blocks[0].size
                self.drop(stretch)
            if not gone:
                return

    def layout(self):
        found = []
        for stretch in self.stretches:
            for hole, run in itertools.groupby(stretch.blocks, key=lambda block: block.hole):
                run = list(run)
                if not hole:
                    found.append((sum(b.size for b in run), [(b.size, b.owner) for b in run]))
        return found


def refer(events, config, capacity, total):
    """What `replay` should say: levels after each event, the last layout, and at which event memory ran out."""
    reference, held, rows, keys = Reference(config, capacity, total), {}, [], itertools.count()
    for index, (storage, delta) in enumerate(events):
        key, size = held.get(storage, (None, 0))
        if size + delta:
            new = next(keys)
            if not reference.allocate(new, size + delta):
                return rows, reference.layout(), index, held
            held[storage] = (new, size + delta)
        else:
            del held[storage]
        if key is not None:
            reference.free(key)
        used = sum(b.size for s in reference.stretches for b in s.blocks if b.owner is not None)
        rows.append((sum(size for _, size in held.values()), used, reference.reserved))
    return rows, reference.layout(), None, held


sizes = st.one_of(
    st.integers(1, 4 * KiB),
    st.integers(1, 2 * MiB),
    st.integers(MiB, 12 * MiB),
    st.integers(5, 40).map(lambda count: count * MiB),
    st.sampled_from([512, MiB, MiB + 1, 10 * MiB, 20 * MiB, 21 * MiB]),
)
actions = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 30), sizes), max_size=60)


@st.composite
def streams(draw):
    """Events in which storages are allocated (5 of 10), freed (4 of 10) and resized (1 of 10)."""
    live, events, names = {}, [], itertools.count()
    for action, choice, size in draw(actions):
        storage = sorted(live)[choice % len(live)] if live else None
        if storage is None or action < 5:
            storage = next(names)
            live[storage] = size
            events.append((storage, size))
        elif action < 9:
            events.append((storage, -live.pop(storage)))
        elif live[storage] != size:
            events.append((storage, size - live[storage]))
            live[storage] = size
    return events


configs = st.builds(
    AllocatorConfig,
    expandable_segments=st.booleans(),
    max_split_size=st.sampled_from([None, None, 40 * MiB, 41 * MiB]),
    max_non_split_rounding=st.sampled_from([None, 40 * MiB]),
    roundup_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (1, 2, 4, 8) * 4]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.6]),
    large_segment_size=st.sampled_from([20 * MiB, 11 * MiB, 40 * MiB]),
    memory_fraction=st.sampled_from([1.0, 0.9]),
)
capacities = st.sampled_from([60 * MiB, 120 * MiB, 200 * MiB, 1 << 40])


@settings(max_examples=300, deadline=None)
@given(streams(), configs, capacities)
def test_agrees_with_the_second_implementation(events, config, capacity):
    rows, layout, failed, held = refer(events, config, capacity, capacity)
    result = replay(events, config, capacity=capacity, timeline=True)
    assert (result.out_of_memory and result.out_of_memory.event) == failed
    timeline = result.timeline
    assert list(zip(timeline.requested, timeline.allocated, timeline.reserved, strict=True)) == rows
    owners = {key: storage for storage, (key, _) in held.items()}
    expected = [(size, [(block, owners.get(owner)) for block, owner in parts]) for size, parts in layout]
    assert sorted(blocks(result), key=str) == sorted(expected, key=str)


# --- laws


@settings(deadline=None)
@given(streams(), configs, capacities)
def test_requested_is_at_most_allocated_is_at_most_reserved(events, config, capacity):
    result = replay(events, config, capacity=capacity, timeline=True)
    timeline = result.timeline
    assert np.all(timeline.requested <= timeline.allocated)
    assert np.all(timeline.allocated <= timeline.reserved)
    assert result.requested.bytes <= result.allocated.bytes <= result.reserved.bytes <= capacity
    assert 0 <= result.fragmentation <= 1


@settings(deadline=None)
@given(streams(), configs, capacities)
def test_blocks_tile_their_segments_and_segments_do_not_overlap(events, config, capacity):
    result = replay(events, config, capacity=capacity)
    assert sum(segment.bytes for segment in result.segments) == result.final.reserved
    end = 0
    for segment in result.segments:
        assert segment.address >= end
        position = segment.address
        for address, size, _ in segment.blocks:
            assert address == position
            assert size % 512 == 0
            position += size
        end = segment.address + segment.bytes
        assert position == end
    owners = [block[2] for segment in result.segments for block in segment.blocks if block[2] is not None]
    assert len(owners) == len(set(owners))


@settings(deadline=None)
@given(streams(), configs)
def test_replay_is_deterministic(events, config):
    assert replay(events, config) == replay(iter(events), config)


@settings(deadline=None)
@given(streams())
def test_reserved_never_falls_without_a_limit(events):
    reserved = replay(events, timeline=True).timeline.reserved
    assert np.all(np.diff(reserved) >= 0)


@settings(deadline=None)
@given(streams(), st.booleans())
def test_freeing_everything_leaves_whole_segments_and_a_second_round_reserves_nothing(events, expandable):
    config = AllocatorConfig(expandable_segments=expandable)
    first = [event for event in events if event[1] > 0]
    first = list(dict(first).items())
    round_trip = first + [(storage, -size) for storage, size in first]
    once = replay(round_trip, config)
    assert once.final[:2] == (0, 0)
    if not expandable:
        assert all(len(segment.blocks) == 1 for segment in once.segments)
    again = replay(round_trip + round_trip, config)
    assert again.reserved == once.reserved


@settings(deadline=None)
@given(streams(), configs)
def test_more_capacity_changes_nothing_where_there_was_enough(events, config):
    ample = replay(events, AllocatorConfig(expandable_segments=config.expandable_segments))
    bounded = replay(
        events, AllocatorConfig(expandable_segments=config.expandable_segments), capacity=ample.reserved.bytes
    )
    assert bounded.out_of_memory is None
    assert bounded.final == ample.final
