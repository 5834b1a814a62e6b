"""The caching allocator: worked examples derived from PyTorch's rules, and laws that every replay keeps.

The rules are those of PyTorch's c10/cuda/CUDACachingAllocator.cpp; the functions that state them are named at the
examples. Nothing here computes what the allocator computes: examples are worked by hand, and laws look at a replay from
outside, at the segments before and after an event.
"""

import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from memsize import AllocatorConfig
from memsize.errors import InputError
from tests.gpus import OMITTED, AllocationEvents, BoundedReplay, Prefixes, compiled_replay, replay, replay_within
from tests.records import Interval

KiB, MiB = 1 << 10, 1 << 20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def levels(result):
    return tuple(result.final)


def blocks(result):
    """Per segment, the oldest first: its bytes, and the bytes and owner of each block."""
    return [(segment.bytes, [block[1:] for block in segment.blocks]) for segment in reversed(result.segments)]


def allocated(*sizes):
    """Events that allocate storages 0, 1, … of so many bytes."""
    return list(enumerate(sizes))


def mebibytes(result):
    """Per segment, the oldest first: its MiB, and the MiB and owner of each block."""
    return [(size // MiB, [(block // MiB, owner) for block, owner in parts]) for size, parts in blocks(result)]


# --- nothing, small and large (round_size, get_pool, get_allocation_size)


def test_nothing_happens():
    result = replay([])
    assert result.requested == result.allocated == result.reserved == (0, -1)
    assert result.fragmentation == 0
    assert result.segments == ()
    assert result.out_of_memory is None and result.timeline is None


def test_small_requests_share_a_segment_of_2_mib():
    result = replay([(0, 100), (1, 513), (2, MiB)])
    # 512 + 1024 + 1,048,576 = 1,050,112 of 2,097,152
    assert levels(result) == (100 + 513 + MiB, 1_050_112, 2 * MiB)
    assert blocks(result) == [(2 * MiB, [(512, 0), (1024, 1), (MiB, 2), (2 * MiB - 1_050_112, None)])]
    assert result.idle == 2 * MiB - 512  # the segment came with the first request, when 512 B were allocated
    assert [segment.small for segment in result.segments] == [True]


def test_requests_from_1_to_10_mib_share_20_mib():
    result = replay([(0, MiB + 1), (1, 9 * MiB), (2, 9 * MiB)])
    # 1 MiB + 512 B, then 9 MiB twice: 19 MiB + 512 B of 20 MiB; the rest is below 1 MiB but is not cut off by the
    # last one: 20 - 10 MiB - 512 B = 10 MiB - 512 B remain for it, and 1 MiB - 512 B is no rest worth keeping
    assert blocks(result) == [(20 * MiB, [(MiB + 512, 0), (9 * MiB, 1), (10 * MiB - 512, 2)])]
    assert result.allocated.bytes == 20 * MiB
    assert [segment.small for segment in result.segments] == [False]


def test_requests_from_10_mib_get_their_own_segment():
    result = replay([(0, 10 * MiB), (1, 11 * MiB)])
    # 11 MiB is rounded up to 12 MiB; the rest of 1 MiB is not above 1 MiB and is handed out with it
    assert blocks(result) == [(10 * MiB, [(10 * MiB, 0)]), (12 * MiB, [(12 * MiB, 1)])]
    assert levels(result) == (21 * MiB, 22 * MiB, 22 * MiB)
    assert result.reserved == (22 * MiB, 1)


def test_a_small_and_a_large_request_never_share_a_segment():
    # 18 MiB of the large segment are free, and 1 MiB + 512 B of the small one, when 1 MiB and 1 MiB + 1 B come
    result = replay(allocated(2 * MiB, MiB - 512, MiB, MiB + 1))
    assert blocks(result) == [
        (20 * MiB, [(2 * MiB, 0), (MiB + 512, 3), (17 * MiB - 512, None)]),
        (2 * MiB, [(MiB - 512, 1), (MiB, 2), (512, None)]),
    ]


def test_requests_are_rounded_to_divisions_of_a_power_of_two_first():
    config = AllocatorConfig(roundup_divisions=(4,) * 16)
    result = replay(allocated(5 * MiB + 1, 900 * KiB), config)
    # quarters between 4 and 8 MiB are 5, 6, 7; between 512 and 1024 KiB they are 640, 768, 896, 1024
    assert blocks(result) == [
        (20 * MiB, [(6 * MiB, 0), (14 * MiB, None)]),
        (2 * MiB, [(MiB, 1), (MiB, None)]),
    ]
    assert result.final.requested == 5 * MiB + 1 + 900 * KiB


def test_one_division_in_any_interval_turns_the_rounding_on():
    # Two halves between 32 and 64 GiB only: 33 GiB become 48; what is smaller stays a multiple of 512 B
    config = AllocatorConfig(roundup_divisions=(0,) * 15 + (2,))
    assert replay(allocated(33 << 30, 5 * MiB + 1), config).allocated.bytes == (48 << 30) + 5 * MiB + 512


# --- which block, what is cut off, what merges (get_free_block, should_split, free_block)


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


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken():
    frees = [(2, -12 * MiB), (0, -12 * MiB), (1, -12 * MiB)]
    result = replay([*allocated(12 * MiB, 12 * MiB, 12 * MiB), *frees, (3, 12 * MiB)])
    # The newest: a driver was seen to place 512 MiB right below 20, and 1 GiB right below these.
    assert mebibytes(result) == [(12, [(12, None)]), (12, [(12, None)]), (12, [(12, 3)])]


def test_a_block_that_fits_exactly_is_enough():
    result = replay([(0, 30 * MiB), (0, -30 * MiB), (1, 30 * MiB)])
    assert result.reserved == (30 * MiB, 0)
    one_more = replay([(0, 30 * MiB), (0, -30 * MiB), (1, 30 * MiB + 1)])
    assert one_more.reserved == (62 * MiB, 2)


@pytest.mark.parametrize(
    ("request_bytes", "rest"),
    [
        (30 * MiB - 512, 0),
        (29 * MiB, 0),  # a rest of exactly 1 MiB goes with the block
        (29 * MiB - 512, MiB + 512),  # above 1 MiB it is kept
        (29 * MiB - 511, 0),  # rounded up to 29 MiB
    ],
)
def test_a_large_rest_is_kept_above_1_mib(request_bytes, rest):
    result = replay([(0, 30 * MiB), (0, -30 * MiB), (1, request_bytes)])
    parts = [(30 * MiB - rest, 1), (rest, None)][: 2 if rest else 1]
    assert blocks(result) == [(30 * MiB, parts)]
    assert result.final.allocated == 30 * MiB - rest


def test_a_small_rest_is_kept_from_512_bytes():
    # 2 MiB - 512 B are taken by two, and the last 512 B serve a third
    result = replay(allocated(MiB, MiB - 512, 1))
    assert blocks(result) == [(2 * MiB, [(MiB, 0), (MiB - 512, 1), (512, 2)])]
    assert result.final == (2 * MiB - 511, 2 * MiB, 2 * MiB)


def test_a_freed_block_merges_with_both_neighbours():
    result = replay([(0, KiB), (1, KiB), (2, KiB), (0, -KiB), (2, -KiB), (1, -KiB)])
    assert blocks(result) == [(2 * MiB, [(2 * MiB, None)])]
    assert levels(result) == (0, 0, 2 * MiB)


@pytest.mark.parametrize(
    ("freed", "parts"),
    [
        # 4 MiB blocks 0 to 4 fill 20 MiB
        ([1, 2], [(4, 0), (8, None), (4, 3), (4, 4)]),
        ([2, 1], [(4, 0), (8, None), (4, 3), (4, 4)]),
        ([1, 3], [(4, 0), (4, None), (4, 2), (4, None), (4, 4)]),
        ([1, 3, 2], [(4, 0), (12, None), (4, 4)]),
        ([0, 4, 2], [(4, None), (4, 1), (4, None), (4, 3), (4, None)]),
    ],
)
def test_only_neighbours_merge(freed, parts):
    events = [*allocated(*[4 * MiB] * 5), *((storage, -4 * MiB) for storage in freed)]
    assert mebibytes(replay(events)) == [(20, parts)]


def test_neighbours_in_different_segments_do_not_merge():
    # 12 + 12 MiB are free, but in two segments: 14 MiB need a third
    result = replay([*allocated(12 * MiB, 12 * MiB), (0, -12 * MiB), (1, -12 * MiB), (2, 14 * MiB)])
    assert mebibytes(result) == [(12, [(12, None)]), (12, [(12, None)]), (14, [(14, 2)])]


def test_a_merged_block_serves_what_its_parts_could_not():
    events = [*allocated(9 * MiB, 9 * MiB), (0, -9 * MiB), (1, -9 * MiB), (2, 15 * MiB)]
    # 9 + 11 (9 and a rest of 2 MiB that is cut off and comes back) are 20 MiB again: 15 of them, 5 remain
    assert mebibytes(replay(events)) == [(20, [(15, 2), (5, None)])]


def test_a_hole_that_is_too_small_costs_a_segment():
    # 14 + 16 MiB freed beside a live block: 30 MiB are free, but no block of 20
    events = [(0, 14 * MiB), (1, 16 * MiB), (0, -14 * MiB), (1, -16 * MiB), (2, 20 * MiB)]
    result = replay(events)
    assert result.reserved.bytes == 50 * MiB
    assert result.idle == 30 * MiB
    assert result.fragmentation == pytest.approx(0.6)


def test_idle_is_told_of_the_first_moment_of_the_reserved_peak():
    # 20 MiB are reserved from the first request on, when 2 MiB are allocated; the 12 that follow change nothing
    result = replay(allocated(2 * MiB, 12 * MiB))
    assert result.reserved == (20 * MiB, 0)
    assert (result.idle, result.fragmentation) == (18 * MiB, 0.9)
    assert result.allocated == (14 * MiB, 1)


def test_a_peak_is_told_of_the_first_event_that_reaches_it():
    events = [(0, 30 * MiB), (1, 1), (1, -1), (2, 1), (0, -30 * MiB), (3, 30 * MiB)]
    result = replay(events)
    assert result.requested == (30 * MiB + 1, 1)
    assert result.allocated == (30 * MiB + 512, 1)
    assert result.reserved == (32 * MiB, 1)


# --- resizes, streams, refusals


def test_a_resize_holds_both_blocks_while_it_copies():
    result = replay([(0, 10 * MiB), (0, 10 * MiB), (0, -5 * MiB)])
    # 10 then 20 MiB at once; shrinking to 15 MiB takes a third block (16 MiB) while 20 MiB live
    assert result.requested == (35 * MiB, 2)
    assert result.allocated == (36 * MiB, 2)
    assert levels(result) == (15 * MiB, 16 * MiB, 46 * MiB)


def test_a_resized_storage_is_freed_with_all_that_it_grew_to():
    result = replay([(0, 10 * MiB), (0, 10 * MiB), (0, -20 * MiB)])
    assert levels(result) == (0, 0, 30 * MiB)
    assert mebibytes(result) == [(10, [(10, None)]), (20, [(20, None)])]


def test_addresses_of_released_segments_are_assigned_again():
    # Of four segments of 12 MiB the two in the middle are released for one of 24, which then lies between the others.
    # Of blocks of 12 MiB that are free, that of the fourth has the lowest address.
    first, second, third, fourth = ((number, -12 * MiB) for number in range(4))
    events = [*allocated(*[12 * MiB] * 4), second, third, (4, 24 * MiB), first, fourth, (5, 12 * MiB)]
    result = replay(events, capacity=48 * MiB)
    assert mebibytes(result) == [(12, [(12, None)]), (24, [(24, 4)]), (12, [(12, 5)])]


def test_streams_do_not_share_blocks():
    events = [(0, KiB), (0, -KiB), (1, KiB)]
    assert replay(events).reserved.bytes == 2 * MiB
    apart = replay(events, streams={1: 7})
    assert apart.reserved.bytes == 4 * MiB
    assert [segment.stream for segment in apart.segments] == [7, 0]


def test_what_each_stream_has_at_the_peak_adds_up_to_it():
    # Stream 0 has 40 MiB and then 24 more, stream 7 has 30 MiB and a small segment of 2; the 30 may be given back
    events = [(0, 40 * MiB), (1, 30 * MiB), (1, -30 * MiB), (2, 24 * MiB), (3, KiB), (2, -24 * MiB)]
    kept = replay(events, streams={1: 7, 3: 7})
    assert (kept.reserved, kept.of_streams) == ((96 * MiB, 4), {0: 64 * MiB, 7: 32 * MiB})
    emptied = replay(events, streams={1: 7, 3: 7}, emptied=(3,))
    assert (emptied.reserved, emptied.of_streams) == ((70 * MiB, 1), {0: 40 * MiB, 7: 30 * MiB})


def test_a_stream_has_a_pool_for_small_and_one_for_large_blocks():
    result = replay(allocated(1, MiB, MiB + 1, 2 * MiB), streams={1: 3, 2: 3})
    found = [(segment.stream, segment.small, [block[2] for block in segment.blocks]) for segment in result.segments]
    assert found == [(0, False, [3, None]), (3, False, [2, None]), (3, True, [1, None]), (0, True, [0, None])]


def test_what_is_cached_is_given_back_where_the_program_empties_the_cache():
    """30 MiB and then 40: at most 40 MiB where the first are given back, else both; 10 MiB in use stay."""
    events = [(0, 10 * MiB), (1, 30 * MiB), (1, -30 * MiB), (2, 40 * MiB), (2, -40 * MiB)]
    assert replay(events).reserved.bytes == 80 * MiB
    emptied = replay(events, emptied=(3,), timeline=True)
    assert (emptied.reserved.bytes, emptied.reserved.event) == (50 * MiB, 3)
    assert emptied.timeline.reserved.tolist() == [10 * MiB, 40 * MiB, 40 * MiB, 50 * MiB, 50 * MiB]
    assert [(event, size // MiB) for event, _, size in emptied.timeline.segments] == [
        (0, 10),
        (1, 30),
        (3, -30),
        (3, 40),
    ]
    assert replay(events, emptied=(3, 4, 99)).reserved == emptied.reserved


def test_freeing_too_much_is_refused():
    with pytest.raises(InputError, match="event 1 frees more bytes than storage 4 holds"):
        replay([(4, 100), (4, -200)])
    with pytest.raises(InputError, match="event 0 frees more bytes than storage 9 holds"):
        replay([(9, -1)])
    with pytest.raises(InputError, match="event 0 frees more bytes than storage 9 holds"):
        replay([(9, 0)])
    assert replay([(4, 100), (4, -99)]).final.requested == 1


def test_timeline():
    timeline = replay([(0, 100), (1, 3 * MiB), (0, -100)], timeline=True).timeline
    assert timeline.requested.tolist() == [100, 3 * MiB + 100, 3 * MiB]
    assert timeline.allocated.tolist() == [512, 3 * MiB + 512, 3 * MiB]
    assert timeline.reserved.tolist() == [2 * MiB, 22 * MiB, 22 * MiB]
    assert timeline.address[0] == timeline.address[2] != timeline.address[1]
    assert replay([], timeline=True).timeline.requested.shape == (0,)


def test_the_timeline_has_the_address_of_the_block_that_a_segment_shows():
    result = replay([(0, MiB), (1, MiB), (2, 5 * MiB), (3, 6 * MiB)], timeline=True)
    shown = {owner: address for segment in result.segments for address, _, owner in segment.blocks}
    assert result.timeline.address.tolist() == [shown[storage] for storage in range(4)]
    assert shown[1] - shown[0] == MiB and shown[3] - shown[2] == 5 * MiB


# --- running out of memory (malloc, alloc_block, release_cached_blocks)


def test_out_of_memory_after_giving_back_what_is_cached():
    events = [(0, 30 * MiB), (1, 30 * MiB), (0, -30 * MiB), (2, 40 * MiB)]
    assert replay(events, capacity=69 * MiB).out_of_memory is not None
    enough = replay(events, capacity=70 * MiB)
    assert enough.out_of_memory is None
    assert levels(enough) == (70 * MiB, 70 * MiB, 70 * MiB)  # the free 30 MiB went back to CUDA
    failed = replay(events, capacity=69 * MiB).out_of_memory
    assert (failed.event, failed.storage, failed.request, failed.segment) == (3, 2, 40 * MiB, 40 * MiB)
    assert failed.levels == (30 * MiB, 30 * MiB, 30 * MiB)


def test_nothing_is_given_back_while_memory_lasts():
    events = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB)]
    assert replay(events, capacity=70 * MiB).final.reserved == 70 * MiB
    assert replay(events, capacity=70 * MiB - 1).final.reserved == 40 * MiB


def test_a_segment_with_a_live_block_is_not_given_back():
    # 18 of 20 MiB are free beside 2 live ones, and the wholly free 12 MiB and 2 MiB of small blocks go back
    events = [(0, 2 * MiB), (1, 12 * MiB), (2, 30 * MiB), (3, 1), (1, -12 * MiB), (3, -1), (4, 40 * MiB)]
    result = replay(events, capacity=90 * MiB)
    assert mebibytes(result) == [(20, [(2, 0), (18, None)]), (30, [(30, 2)]), (40, [(40, 4)])]
    assert replay(events, capacity=89 * MiB).out_of_memory.levels == (32 * MiB, 32 * MiB, 50 * MiB)


def test_what_other_streams_cache_is_given_back_too():
    events = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB)]
    result = replay(events, capacity=40 * MiB, streams={0: 5})
    assert result.out_of_memory is None
    assert [(segment.stream, segment.bytes) for segment in result.segments] == [(0, 40 * MiB)]


def test_a_replay_ends_where_memory_runs_out():
    result = replay([(0, 30 * MiB), (1, 50 * MiB), (0, -30 * MiB)], capacity=60 * MiB, timeline=True)
    assert result.out_of_memory.event == 1
    assert levels(result) == (30 * MiB, 30 * MiB, 30 * MiB)
    assert result.timeline.reserved.tolist() == [30 * MiB]
    assert result.requested == (30 * MiB, 0)


def test_the_memory_fraction_limits_too():
    half = AllocatorConfig(memory_fraction=0.5)
    assert replay([(0, 40 * MiB)], half, total=80 * MiB).out_of_memory is None
    assert replay([(0, 40 * MiB), (1, 1)], half, total=80 * MiB).out_of_memory.segment == 2 * MiB
    assert replay([(0, 40 * MiB)], half, total=80 * MiB - 2).out_of_memory is not None


def test_the_memory_fraction_is_of_the_capacity_where_the_card_is_unknown():
    half = AllocatorConfig(memory_fraction=0.5)
    assert replay([(0, 40 * MiB)], half, capacity=80 * MiB).out_of_memory is None
    assert replay([(0, 42 * MiB)], half, capacity=80 * MiB).out_of_memory is not None
    # Half of the card's 100 MiB, of which the context leaves 45
    assert replay([(0, 44 * MiB)], half, capacity=45 * MiB, total=100 * MiB).out_of_memory is None
    assert replay([(0, 46 * MiB)], half, capacity=45 * MiB, total=100 * MiB).out_of_memory is not None


# --- blocks that are not split (should_split, get_free_block, release_available_cached_blocks)


def test_an_unsplittable_block_serves_only_what_nearly_fills_it():
    config = AllocatorConfig(max_split_size=20 * MiB)
    events = [(0, 60 * MiB), (0, -60 * MiB), (1, 12 * MiB), (2, 30 * MiB), (3, 50 * MiB)]
    # 12 MiB may not take from the 60; 30 MiB is 30 below it, beyond 20 of tolerance; 50 MiB takes it whole
    result = replay(events, config)
    assert blocks(result) == [(60 * MiB, [(60 * MiB, 3)]), (12 * MiB, [(12 * MiB, 1)]), (30 * MiB, [(30 * MiB, 2)])]


@pytest.mark.parametrize(
    ("cached", "request_bytes", "reused"),
    [
        # max_split_size is 40 MiB, the tolerance 20 MiB
        (38 * MiB, 30 * MiB, True),  # both below: split
        (40 * MiB, 38 * MiB, False),  # an unsplittable block, and a request that may be split
        (42 * MiB, 40 * MiB, True),
        (60 * MiB - 2 * MiB, 40 * MiB, True),  # 18 MiB too much
        (60 * MiB, 40 * MiB, False),  # 20 MiB too much are not below the tolerance
    ],
)
def test_where_unsplittable_begins(cached, request_bytes, reused):
    config = AllocatorConfig(max_split_size=40 * MiB)
    result = replay([(0, cached), (0, -cached), (1, request_bytes)], config)
    assert result.final.reserved == (cached if reused else cached + request_bytes)
    if reused and request_bytes >= 40 * MiB:
        assert result.final.allocated == cached  # all of it, whatever the rest
    else:
        assert result.final.allocated == request_bytes


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (AllocatorConfig(max_split_size=40 * MiB), 20 * MiB),
        (AllocatorConfig(max_split_size=40 * MiB, large_segment_size=30 * MiB), 30 * MiB),
        (AllocatorConfig(max_split_size=40 * MiB, max_non_split_rounding=26 * MiB), 26 * MiB),
    ],
)
def test_by_how_much_an_unsplittable_block_may_exceed_a_request(config, tolerance):
    cached = 50 * MiB + tolerance
    assert replay([(0, cached), (0, -cached), (1, 50 * MiB)], config).reserved.bytes == cached + 50 * MiB
    cached -= 2 * MiB
    assert replay([(0, cached), (0, -cached), (1, 50 * MiB)], config).reserved.bytes == cached


def test_one_unsplittable_block_that_would_do_is_given_back_before_all_others():
    config = AllocatorConfig(max_split_size=20 * MiB)
    # Cached: 12 (splittable), 70, 90 MiB. 40 MiB fit none (30 and 50 too much): 70 is the smallest that would do
    events = [*allocated(12 * MiB, 70 * MiB, 90 * MiB), (0, -12 * MiB), (1, -70 * MiB), (2, -90 * MiB), (3, 40 * MiB)]
    result = replay(events, config, capacity=180 * MiB)
    assert mebibytes(result) == [(12, [(12, None)]), (40, [(40, 3)]), (90, [(90, None)])]


def test_a_splittable_request_releases_an_unsplittable_block():
    config = AllocatorConfig(max_split_size=20 * MiB)
    # 14 MiB are looked for from max_split_size on: 20 MiB, not the 30
    events = [*allocated(30 * MiB, 20 * MiB), (0, -30 * MiB), (1, -20 * MiB), (2, 14 * MiB)]
    assert mebibytes(replay(events, config, capacity=50 * MiB)) == [(30, [(30, None)]), (14, [(14, 2)])]


def test_where_none_would_do_the_largest_unsplittable_blocks_are_given_back():
    config = AllocatorConfig(max_split_size=20 * MiB)
    frees = [(0, -12 * MiB), (1, -40 * MiB), (2, -60 * MiB), (3, -50 * MiB)]
    events = [*allocated(12 * MiB, 40 * MiB, 60 * MiB, 50 * MiB), *frees, (4, 100 * MiB)]
    # 60, then 50 MiB: 110 are at least 100; 40 and 12 MiB stay
    result = replay(events, config, capacity=162 * MiB)
    assert mebibytes(result) == [(12, [(12, None)]), (40, [(40, None)]), (100, [(100, 4)])]
    # 60 + 50 are exactly 110: no more goes back
    exact = [*events[:-1], (4, 110 * MiB)]
    assert replay(exact, config, capacity=162 * MiB).final.reserved == (12 + 40 + 110) * MiB
    # 112 MiB take the 40 as well
    more = [*events[:-1], (4, 112 * MiB)]
    assert replay(more, config, capacity=162 * MiB).final.reserved == (12 + 112) * MiB


def test_splittable_blocks_are_given_back_only_with_everything_else():
    config = AllocatorConfig(max_split_size=40 * MiB)
    events = [*allocated(30 * MiB, 40 * MiB), (0, -30 * MiB), (1, -40 * MiB), (2, 70 * MiB)]
    # 40 MiB alone are not enough, so that all that is free goes
    assert mebibytes(replay(events, config, capacity=70 * MiB)) == [(70, [(70, 2)])]


# --- garbage collection (garbage_collect_cached_blocks)


def test_garbage_collection_gives_old_segments_back_before_asking_for_more():
    config = AllocatorConfig(garbage_collection_threshold=0.5, memory_fraction=0.9)
    events = [(0, 60 * MiB), (0, -60 * MiB), (1, 50 * MiB), (1, -50 * MiB), (2, 70 * MiB)]
    # allowed are 180 of 200 MiB, collected from 90 MiB: the 60 held are below; 1 takes them; at 2 still 60
    result = replay(events, config, total=200 * MiB)
    assert result.reserved.bytes == 130 * MiB
    events += [(2, -70 * MiB), (3, 100 * MiB)]
    # at 3, 130 are held, 40 above the threshold; ages: the 60 saw two requests pass, the 70 one; the older goes
    assert replay(events, config, total=200 * MiB).final.reserved == 170 * MiB


def test_garbage_is_collected_above_the_threshold_only():
    config = AllocatorConfig(garbage_collection_threshold=0.5, memory_fraction=0.5)
    events = [(0, 50 * MiB), (0, -50 * MiB), (1, 52 * MiB)]
    # half of half of 200 MiB: 50 MiB are not above 50
    assert replay(events, config, total=220 * MiB).final.reserved == 102 * MiB
    assert replay(events, config, total=200 * MiB - 4).final.reserved == 52 * MiB


def test_garbage_is_not_collected_without_a_memory_fraction():
    config = AllocatorConfig(garbage_collection_threshold=0.1)
    events = [(0, 50 * MiB), (0, -50 * MiB), (1, 52 * MiB)]
    assert replay(events, config, capacity=200 * MiB).final.reserved == 102 * MiB


def test_segments_as_old_as_the_average_go_together():
    config = AllocatorConfig(garbage_collection_threshold=0.1, memory_fraction=0.9)
    frees = [(0, -12 * MiB), (1, -14 * MiB), (2, -16 * MiB)]
    events = [*allocated(12 * MiB, 14 * MiB, 16 * MiB), *frees, (3, 20 * MiB)]
    # All three were freed at the same count of requests: all are of the average age, though 9 MiB would be enough
    assert replay(events, config, total=400 * MiB).final.reserved == 20 * MiB


def test_younger_segments_go_when_the_older_are_not_enough():
    config = AllocatorConfig(garbage_collection_threshold=0.1, memory_fraction=0.5)
    events = [(0, 12 * MiB), (1, 60 * MiB), (0, -12 * MiB), (2, 70 * MiB), (1, -60 * MiB), (3, 80 * MiB)]
    # At 3, 142 MiB are held and 20 wanted: 12 has age 2, 60 has age 1, 1.5 on average; 12 goes first, 60 after it
    assert mebibytes(replay(events, config, total=400 * MiB)) == [(70, [(70, 2)]), (80, [(80, 3)])]


def test_age_counts_requests_for_large_blocks_since_the_block_was_freed():
    config = AllocatorConfig(garbage_collection_threshold=0.5, memory_fraction=0.5)
    events = [(0, 40 * MiB), (1, 44 * MiB), (1, -44 * MiB), (2, 50 * MiB), (0, -40 * MiB), (3, 60 * MiB)]
    # 44 was freed one request for large blocks before 40: 134 of 100 MiB are held, 44 are enough
    assert mebibytes(replay(events, config, total=400 * MiB)) == [(40, [(40, None)]), (50, [(50, 2)]), (60, [(60, 3)])]
    # A small request in between ages nothing: both saw one request pass, and both go
    small = [(8, 1), *allocated(40 * MiB, 44 * MiB, 50 * MiB), (1, -44 * MiB), (9, 1), (0, -40 * MiB), (3, 60 * MiB)]
    assert mebibytes(replay(small, config, total=400 * MiB))[1:] == [(60, [(60, 3)]), (50, [(50, 2)])]


def test_a_segment_that_is_split_or_small_is_no_garbage():
    config = AllocatorConfig(garbage_collection_threshold=0.01, memory_fraction=0.5)
    events = [(0, 2 * MiB), (1, 1), (1, -1), (2, 30 * MiB)]
    # 18 of 20 MiB are free, and 2 MiB of small blocks
    result = replay(events, config, total=400 * MiB)
    assert mebibytes(result) == [(20, [(2, 0), (18, None)]), (2, [(2, None)]), (30, [(30, 2)])]


def test_expandable_segments_are_no_garbage():
    config = AllocatorConfig(expandable_segments=True, garbage_collection_threshold=0.01, memory_fraction=0.5)
    result = replay([(0, 40 * MiB), (0, -40 * MiB), (1, 60 * MiB)], config, total=400 * MiB)
    assert mebibytes(result) == [(60, [(60, 1)])]
    assert result.reserved == (60 * MiB, 2)


# --- expandable segments (try_allocate_expandable_block, find_expandable_block, map_block, unmap_block)


def test_expandable_segments_grow_in_steps():
    result = replay([(0, 30 * MiB), (1, 5 * MiB), (2, 10 * MiB), (3, 1)], EXPANDABLE)
    # 30 MiB map 40, of which 10 remain: 5 fit; 10 need 5 more: one step of 20. Small: one step of 2 MiB
    assert result.final.reserved == 62 * MiB
    assert blocks(result) == [
        (60 * MiB, [(30 * MiB, 0), (5 * MiB, 1), (10 * MiB, 2), (15 * MiB, None)]),
        (2 * MiB, [(512, 3), (2 * MiB - 512, None)]),
    ]


def test_expandable_segments_cut_off_any_rest():
    # 20 MiB less 512 B: the rest of 512 B is kept, and a large request maps beyond it
    result = replay(allocated(20 * MiB - 512, 2 * MiB), EXPANDABLE)
    assert blocks(result) == [(40 * MiB, [(20 * MiB - 512, 0), (2 * MiB, 1), (18 * MiB + 512, None)])]


def test_the_step_of_expandable_segments_is_the_size_of_large_segments():
    config = AllocatorConfig(expandable_segments=True, large_segment_size=32 * MiB)
    assert replay(allocated(2 * MiB), config).reserved.bytes == 32 * MiB
    assert replay(allocated(2 * MiB, 31 * MiB, 1), config).reserved.bytes == 66 * MiB


def test_expandable_segments_unmap_whole_steps_when_memory_runs_out():
    events = [(0, 30 * MiB), (1, 30 * MiB), (0, -30 * MiB), (2, 40 * MiB)]
    # 60 MiB mapped, 20 of the first 30 can be unmapped; 40 need two steps at the end
    result = replay(events, EXPANDABLE, capacity=80 * MiB)
    assert result.out_of_memory is None
    assert blocks(result) == [(80 * MiB, [(10 * MiB, None), (30 * MiB, 1), (40 * MiB, 2)])]
    assert replay(events, EXPANDABLE, capacity=79 * MiB).out_of_memory.event == 3


def test_only_steps_that_are_wholly_free_are_unmapped():
    # 10 + 45 + 25 MiB map 80; the 45 span 10 to 55 MiB: of the steps at 0, 20, 40 and 60 only that at 20 is free
    events = [*allocated(10 * MiB, 45 * MiB, 25 * MiB), (1, -45 * MiB), (3, 60 * MiB)]
    result = replay(events, EXPANDABLE, capacity=120 * MiB)
    assert mebibytes(result)[::-1] == [(20, [(10, 0), (10, None)]), (100, [(15, None), (25, 2), (60, 3)])]
    assert replay(events, EXPANDABLE, capacity=119 * MiB).out_of_memory.levels.reserved == 60 * MiB


def test_the_lowest_hole_that_suffices_is_mapped_again():
    # Steps 0 and 1 (40 MiB), 2 live, 3 to 5 (60 MiB), 6 live; unmapped to make room on another stream
    sizes = (40 * MiB, 20 * MiB, 60 * MiB, 20 * MiB)
    events = [*allocated(*sizes), (0, -40 * MiB), (2, -60 * MiB), (4, 100 * MiB), (4, -100 * MiB)]
    first = replay([*events, (5, 30 * MiB)], EXPANDABLE, capacity=140 * MiB, streams={4: 1})
    assert [segment[1] for segment in mebibytes(first)] == [[(20, 3)], [(30, 5), (10, None), (20, 1)]]
    second = replay([*events, (5, 50 * MiB)], EXPANDABLE, capacity=140 * MiB, streams={4: 1})
    assert [segment[1] for segment in mebibytes(second)] == [[(20, 1), (50, 5), (10, None), (20, 3)]]


def test_a_free_block_before_a_hole_is_part_of_the_room():
    # 0 to 30 live, 30 to 60 free, of which 40 to 60 are unmapped for the other stream: 25 MiB begin at 30
    events = [*allocated(30 * MiB, 30 * MiB), (1, -30 * MiB), (2, 20 * MiB), (2, -20 * MiB), (3, 25 * MiB)]
    result = replay(events, EXPANDABLE, capacity=60 * MiB, streams={2: 1})
    assert mebibytes(result) == [(60, [(30, 0), (25, 3), (5, None)])]


STRETCH = [*allocated(200 * MiB, 1200 * MiB, 40 * MiB), (0, -200 * MiB), (2, -40 * MiB)]
"""A card of 1,440 MiB that is mapped as a whole, free at its beginning and at its end. Its stretch of addresses is an
eighth longer, 1,620 MiB: 40 + 180 = 220 MiB follow the live block."""


def test_addresses_reach_an_eighth_beyond_the_card():
    fits = replay([*STRETCH, (3, 220 * MiB)], EXPANDABLE, capacity=1440 * MiB)
    assert mebibytes(fits) == [(1420, [(1200, 1), (220, 3)])]
    beyond = replay([*STRETCH, (3, 221 * MiB)], EXPANDABLE, capacity=1440 * MiB)
    # one MiB more begins another stretch, of 12 steps of 20 MiB
    assert mebibytes(beyond) == [(1200, [(1200, 1)]), (240, [(221, 3), (19, None)])]


def test_a_block_at_the_mapped_end_counts_with_what_it_can_grow_by():
    # Free are 60 MiB between live blocks, and 50 MiB at the mapped end, before which nothing is unmapped
    events = [*allocated(60 * MiB, 10 * MiB, 50 * MiB), (0, -60 * MiB), (2, -50 * MiB), (3, 45 * MiB)]
    result = replay(events, EXPANDABLE, capacity=1 << 40)
    assert mebibytes(result) == [(120, [(45, 3), (15, None), (10, 1), (50, None)])]
    # Of two that are smaller than what the end can grow to, the smaller one serves
    two = [*allocated(*(size * MiB for size in (70, 10, 60, 10, 50))), (0, -70 * MiB), (2, -60 * MiB), (4, -50 * MiB)]
    assert mebibytes(replay([*two, (5, 45 * MiB)], EXPANDABLE)) == [
        (200, [(70, None), (10, 1), (45, 5), (15, None), (10, 3), (50, None)]),
    ]
    # Without a block that is smaller than what the end can grow to, the end serves
    short = [*events[:3], (2, -50 * MiB), (3, 45 * MiB)]
    assert mebibytes(replay(short, EXPANDABLE)) == [(120, [(60, 0), (10, 1), (45, 3), (5, None)])]


def test_expandable_segments_waste_less_than_fixed_ones():
    sizes = [14 * MiB + step * 2 * MiB for step in range(20)]
    events = [event for number, size in enumerate(sizes) for event in ((number, size), (number, -size))]
    assert replay(events).reserved.bytes == sum(sizes)
    assert replay(events, EXPANDABLE).reserved.bytes == 60 * MiB  # 52 MiB in steps of 20


def test_expandable_segments_merge_the_rests_of_one_stream_alone():
    # Three outputs of 448 MiB are freed; what is kept of the layers has 128 MiB, and so has a buffer of stream 1.
    kept = [(number, 128 * MiB) for number in range(3, 12)]
    events = [*allocated(*[448 * MiB] * 3), *((number, -448 * MiB) for number in range(3)), *kept]
    events += [(12, 128 * MiB), (12, -128 * MiB), (13, 192 * MiB)]
    placed = {12: 1}
    # Three fit into each segment of 448, and leave 64: 192 MiB need one more, which stream 1 doesn't give
    fixed = replay(events, streams=placed)
    assert mebibytes(fixed)[:3] == [(448, [(128, n), (128, n + 1), (128, n + 2), (64, None)]) for n in (9, 6, 3)]
    assert fixed.reserved.bytes == (3 * 448 + 128 + 192) * MiB
    # In one stretch 3 x 448 are 1,344 MiB, in steps of 20 1,360: 9 x 128 of them are kept, and 208 are left for 192
    merged = replay(events, EXPANDABLE, streams=placed)
    assert mebibytes(merged)[0] == (1360, [*((128, n) for n in range(3, 12)), (192, 13), (16, None)])
    assert merged.reserved.bytes == (1360 + 140) * MiB  # 128 MiB of stream 1, in 7 steps


def test_max_split_size_keeps_large_expandable_blocks_from_small_requests():
    config = AllocatorConfig(expandable_segments=True, max_split_size=40 * MiB)
    events = [(0, 40 * MiB), (1, 2 * MiB), (0, -40 * MiB), (2, 30 * MiB)]
    # The 40 MiB at the beginning serve no request below 40; 18 are free at the end, 12 more are one step
    assert mebibytes(replay(events, config)) == [(80, [(40, None), (2, 1), (30, 2), (8, None)])]


def test_of_equal_blocks_that_cannot_grow_the_first_serves():
    events = [*allocated(*[5 * MiB] * 5), (1, -5 * MiB), (3, -5 * MiB), (5, 5 * MiB)]
    # 25 of 40 MiB; the 15 at the end can grow, the 5 between live blocks cannot
    assert mebibytes(replay(events, EXPANDABLE)) == [
        (40, [(5, 0), (5, 5), (5, 2), (5, None), (5, 4), (15, None)]),
    ]


def test_a_request_beyond_an_eighth_of_the_card_has_a_stretch_that_holds_it():
    # A card of 80 MiB has stretches of 90, rounded up to 100; one of 120 MiB would fail for its memory alone
    result = replay([(0, 120 * MiB)], EXPANDABLE, capacity=80 * MiB)
    assert (result.out_of_memory.event, result.out_of_memory.levels.reserved) == (0, 0)


def test_without_a_card_a_stretch_is_as_long_as_what_is_asked_for():
    result = replay([(0, 2 << 40), (1, 3 * MiB)], EXPANDABLE)
    assert result.final.reserved == -(-((2 << 40) + 3 * MiB) // (20 * MiB)) * 20 * MiB


# --- on a card


def test_a_storage_that_a_run_can_do_without_is_left_out_where_there_is_no_room():
    events = [(0, 30 * MiB), (1, 20 * MiB), (1, -20 * MiB), (2, 10 * MiB)]
    assert replay(events, capacity=49 * MiB).out_of_memory.storage == 1
    result = replay(events, capacity=49 * MiB, optional={1}, timeline=True)
    assert result.out_of_memory is None and result.allocated.bytes == 40 * MiB
    assert result.timeline.allocated.tolist() == [30 * MiB, 30 * MiB, 30 * MiB, 40 * MiB]
    assert result.skipped == {1}
    first = replay(events[1:3], capacity=10 * MiB, optional={1}, timeline=True)
    assert first.timeline.reserved.tolist() == [0, 0] and first.skipped == {1}
    assert replay(events, capacity=50 * MiB, optional={1}) == replay(events, capacity=50 * MiB)
    assert replay(events, capacity=39 * MiB, optional={1}).out_of_memory.storage == 2


def test_trying_for_it_gives_back_what_is_cached():
    events = [(0, 30 * MiB), (1, 12 * MiB), (1, -12 * MiB), (2, 20 * MiB), (2, -20 * MiB)]
    assert replay(events, capacity=49 * MiB, optional={2}).final.reserved == 30 * MiB


def test_a_card_is_replayed_beside_the_least_and_the_most_that_others_take():
    events, outside = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB)], Interval(10 * MiB, 20 * MiB)
    config = AllocatorConfig()

    def alone(replay):
        return BoundedReplay(replay, replay)

    assert replay_within(events, config, 90 * MiB, outside) == alone(replay(events))
    # Of 89 MiB, 79 are enough for 30 + 40; where 69 are left, the first 30 are given back.
    found = replay_within(events, config, 89 * MiB, outside)
    assert found == BoundedReplay(replay(events), replay(events, capacity=69 * MiB))
    assert (found.with_least_overhead.reserved.bytes, found.with_most_overhead.reserved.bytes) == (70 * MiB, 40 * MiB)
    # Of 79 MiB, neither 69 nor 59 are.
    assert replay_within(events, config, 79 * MiB, outside).with_least_overhead.reserved.bytes == 40 * MiB
    perhaps = replay_within(events, config, 59 * MiB, outside)
    assert perhaps.with_least_overhead == perhaps.with_most_overhead == replay(events, capacity=49 * MiB)
    assert not perhaps.certain
    assert perhaps.failure == replay(events, capacity=39 * MiB).out_of_memory
    never = replay_within(events, config, 49 * MiB, outside)
    assert never == alone(replay(events))._replace(
        failure=replay(events, capacity=29 * MiB).out_of_memory, certain=True
    )


def test_a_run_that_needs_a_fuller_card_is_told_as_it_ends_there(monkeypatch):
    """Giving back early may leave room where a larger block would have been split: then the fuller card decides."""
    fails, ends = replay([(0, 40 * MiB)], capacity=30 * MiB), replay([(0, 30 * MiB)], capacity=50 * MiB)
    ends = replace(ends, refused=60 * MiB)

    def either(*_: object, capacity: int, **__: object) -> object:
        return ends if capacity == 50 * MiB else fails

    monkeypatch.setattr(
        "memsize.device.replay.replay", lambda *_, capacity, **__: ends if capacity == 50 * MiB else fails
    )
    assert replay_within([], AllocatorConfig(), 70 * MiB, Interval(10 * MiB, 20 * MiB)) == BoundedReplay(ends, ends)


# --- made-up streams of events
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


# --- compiled code

is_compiled = pytest.mark.skipif(
    compiled_replay._library() is None, reason="not compiled: python hatch_build.py, with a C++ compiler"
)


def both(events, **options):
    """The replays of the same events by Python alone, and by compiled code as far as that goes."""
    storages, deltas = np.array(events, dtype=np.int64).reshape(-1, 2).T
    with mock.patch.object(compiled_replay, "_LEAST", 1):
        return replay(events, **options), replay(AllocationEvents(storages, deltas, {}), **options)


@is_compiled
@settings(deadline=None)
@given(streams(), configs, capacities, st.dictionaries(st.integers(0, 20), st.sampled_from([3, 7])), st.booleans())
def test_compiled_code_replays_as_python_does(events, config, capacity, streams, is_bounded):
    events = [*events[:5], OMITTED, *events[5:]]
    options = {"config": config, "capacity": capacity if is_bounded else None, "streams": streams}
    alone, compiled = both(events, **options)
    assert compiled == alone
    emptied_alone, emptied_compiled = both(events, emptied=[len(events) // 2], **options)
    assert emptied_compiled == emptied_alone


@is_compiled
def test_compiled_code_comes_to_the_first_request_that_is_refused():
    # 30 MiB are cached; 40 more do not fit into 69, which gives the 30 back.
    events = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB)]
    columns = AllocationEvents(*np.array(events).T, {})
    with mock.patch.object(compiled_replay, "_LEAST", 1):
        done = compiled_replay.compiled_replay(columns, {}, 69 * MiB // 512, 20 * MiB // 512)
    assert (done.event, done.reserved, done.requested) == (2, 30 * MiB // 512, 0)
    alone, compiled = both(events, capacity=69 * MiB)
    assert compiled == alone and compiled.final.reserved == 40 * MiB


@is_compiled
def test_what_compiled_code_cannot_replay_is_refused_as_ever():
    columns = AllocationEvents(np.array([0, 0]), np.array([512, -1024]), {})
    with (
        mock.patch.object(compiled_replay, "_LEAST", 1),
        pytest.raises(InputError, match="event 1 frees more bytes than storage 0 holds"),
    ):
        replay(columns)


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
@given(streams(), configs, st.sampled_from([20 * MiB, 60 * MiB]))
def test_a_run_that_can_do_without_everything_never_fails(events, config, capacity):
    held: dict[int, list[int]] = {}
    for storage, size in events:
        held.setdefault(storage, []).append(size)
    # One that is resized is needed.
    assume(all(len(sizes) == 1 or (len(sizes) == 2 and sum(sizes) == 0) for sizes in held.values()))
    result = replay(events, config, capacity=capacity, optional=set(held), timeline=True)
    assert result.out_of_memory is None and len(result.timeline.reserved) == len(events)
    taken = [event for event in events if event[0] not in result.skipped]
    assert replay(taken, config, capacity=capacity).requested.bytes == result.requested.bytes
    assert np.all(result.timeline.requested <= result.timeline.allocated)
    assert np.all(result.timeline.allocated <= result.timeline.reserved)


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
@given(streams(), configs, capacities, st.integers(0, 40 * MiB))
def test_what_a_card_shows_is_bounded_or_what_the_run_would_take(events, config, total, least):
    found = replay_within(events, config, total, Interval(least, least + 20 * MiB))
    assert found.with_least_overhead.out_of_memory is None
    if found.certain:
        ample = replace(config, memory_fraction=1.0)
        assert found.failure is not None and found.with_least_overhead == replay(events, ample)
    else:
        assert found.with_least_overhead.reserved.bytes <= total - least
    if found.failure is None:
        assert found.with_most_overhead.reserved.bytes <= total - least - 20 * MiB
        assert found.with_least_overhead.requested == found.with_most_overhead.requested


@settings(deadline=None)
@given(streams(), configs, st.lists(capacities, min_size=2, max_size=4), st.integers(0, 40 * MiB))
def test_cards_that_share_replays_show_what_each_shows_alone(events, config, totals, least):
    shared, outside = [], Interval(least, least + 20 * MiB)
    for total in totals:
        together = replay_within(events, config, total, outside, shared=shared)
        assert together == replay_within(events, config, total, outside)


def test_cards_that_are_large_enough_share_one_replay():
    events, shared, outside = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB)], [], Interval(10 * MiB, 20 * MiB)
    for total in (90, 100, 200):
        replay_within(events, AllocatorConfig(), total * MiB, outside, shared=shared)
    assert shared == [replay(events)]
    # Of 89 MiB, 79 are enough for 30 + 40 as well; 69 are not.
    replay_within(events, AllocatorConfig(), 89 * MiB, outside, shared=shared)
    assert shared == [replay(events), replay(events, capacity=69 * MiB)]


@settings(deadline=None)
@given(streams(), configs)
def test_more_capacity_changes_nothing_where_there_was_enough(events, config):
    ample = replay(events, AllocatorConfig(expandable_segments=config.expandable_segments))
    bounded = replay(
        events, AllocatorConfig(expandable_segments=config.expandable_segments), capacity=ample.reserved.bytes
    )
    assert bounded.out_of_memory is None
    assert bounded.final == ample.final


@settings(deadline=None)
@given(streams(), configs, st.integers(0, 100), st.integers(0, 100))
def test_a_replay_holds_with_every_capacity_between_what_was_reserved_and_what_was_refused(events, config, one, other):
    config = replace(config, expandable_segments=False, memory_fraction=1.0)
    result = replay(events, config, capacity=one * 2 * MiB)
    assert result.holds_with(one * 2 * MiB) and not result.holds_with(result.reserved.bytes - 1)
    assert (result.refused is None) <= (result.out_of_memory is None)
    if result.holds_with(other * 2 * MiB):
        assert replay(events, config, capacity=other * 2 * MiB) == result
    if result.refused is not None:
        assert result.holds_with(result.refused - 1) and not result.holds_with(result.refused)


def columns(result):
    """The replay without its timeline, and the timeline as lists."""
    levels = result.timeline
    rows = [column.tolist() for column in (levels.requested, levels.allocated, levels.reserved, levels.address)]
    return replace(result, timeline=None), rows, levels.segments


@settings(deadline=None)
@given(
    streams(),
    configs,
    st.lists(st.none() | st.integers(0, 100), min_size=2, max_size=6),
    st.dictionaries(st.integers(0, 9), st.integers(0, 2)),
    st.sets(st.integers(0, 40)),
    st.sets(st.integers(0, 60), max_size=3),
    st.lists(st.integers(0, 60), min_size=60, max_size=60),
    st.none() | st.integers(0, 200 * MiB),
    st.booleans(),
)
def test_replays_that_share_prefixes_equal_those_from_the_start(
    events, config, counts, placed, dispensable, emptied, lags, least, timeline
):
    frees = [event for event, (_, delta) in enumerate(events) if delta < 0]
    deferred = {event: min(event + 1 + lag, len(events)) for event, lag in zip(frees, lags, strict=False) if lag > 30}
    how = {"streams": placed, "optional": dispensable, "emptied": emptied, "deferred": deferred, "timeline": timeline}
    prefixes = Prefixes(least, apart=1)
    for count in counts:
        capacity = None if count is None else count * 2 * MiB
        shared = replay(events, config, capacity=capacity, prefixes=prefixes, **how)
        alone = replay(events, config, capacity=capacity, **how)
        assert columns(shared) == columns(alone) if timeline else shared == alone


def test_a_replay_continues_where_another_was_refused_memory():
    events = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB), (1, -40 * MiB), (2, 60 * MiB)]
    prefixes = Prefixes(least=20 * MiB)

    def starts():
        return [prefix.event for prefix in prefixes.runs]

    # 30 + 40 is the first request beyond 65 MiB, 30 + 40 + 60 the first beyond 120.
    replay(events, capacity=65 * MiB, prefixes=prefixes)
    assert starts() == [2]
    # The first events are not read again: with others in their stead the result is the same.
    others = [(7, 1 * MiB), (8, 2 * MiB), *events[2:]]
    assert replay(others, capacity=120 * MiB, prefixes=prefixes) == replay(events, capacity=120 * MiB)
    assert starts() == [2, 4]
    # With 50 MiB all is as with 65 up to the refusal; with 20 nothing is.
    assert replay(others, capacity=50 * MiB, prefixes=prefixes) == replay(events, capacity=50 * MiB)
    assert replay(events, capacity=20 * MiB, prefixes=prefixes) == replay(events, capacity=20 * MiB)
    # That with 50 left another: it is refused 70 MiB first, and 100 at the last event, as with 40 to 69.
    assert starts() == [2, 4, 4]
    later = [(8, 2 * MiB), (9, 3 * MiB), (7, 1 * MiB), (6, 4 * MiB), events[4]]
    assert replay(later, capacity=69 * MiB, prefixes=prefixes) == replay(events, capacity=69 * MiB)
    assert replay(later, capacity=40 * MiB, prefixes=prefixes) == replay(events, capacity=40 * MiB)
    # Without bound, and with nothing to continue from, it leaves the state before the request that exceeds `least`.
    prefixes = Prefixes(least=35 * MiB)
    assert replay(events, prefixes=prefixes) == replay(events)
    assert starts() == [2]
    # A fraction of the card depends on the card.
    fraction = AllocatorConfig(memory_fraction=0.9)
    assert replay(events, fraction, capacity=120 * MiB, prefixes=prefixes).reserved.bytes == 70 * MiB


def test_the_least_that_was_refused():
    events = [(0, 30 * MiB), (0, -30 * MiB), (1, 40 * MiB), (1, -40 * MiB), (2, 60 * MiB)]
    # With 65 MiB, 30 + 40 is refused, then 40 + 60; once all is given back there is room.
    result = replay(events, capacity=65 * MiB)
    assert (result.refused, result.reserved.bytes, result.out_of_memory) == (70 * MiB, 60 * MiB, None)
    # With 50 MiB the last request fails all the same: 60 MiB is the least that it needs.
    failed = replay(events, capacity=50 * MiB)
    assert (failed.refused, failed.reserved.bytes, failed.out_of_memory.event) == (60 * MiB, 40 * MiB, 4)
    assert replay(events).refused is None


def free_blocks(result, like=None):
    """(bytes, address) of each free block, in segments of the same stream and size class as `like`."""
    return [
        (size, address)
        for segment in result.segments
        if like is None or (segment.stream, segment.small) == (like.stream, like.small)
        for address, size, owner in segment.blocks
        if owner is None
    ]


def home(result, storage):
    """The segment of a live storage, and the address and bytes of its block."""
    return next(
        (segment, address, size)
        for segment in result.segments
        for address, size, owner in segment.blocks
        if owner == storage
    )


def last_event(events):
    """The replays before and after the last event that allocates, and that event."""
    count = max((at for at, (_, size) in enumerate(events) if size > 0), default=None)
    assume(count is not None)
    return replay(events[:count]), replay(events[: count + 1]), events[count]


@settings(deadline=None, max_examples=200)
@given(streams())
def test_the_best_fit_is_the_smallest_sufficient_block_then_the_lowest_address(events):
    before, after, (storage, _) = last_event(events)
    segment, address, size = home(after, storage)
    request = next(held for held in (sum(s for n, s in events if n == storage), size) if held > 0)
    request = min(-(-request // 512) * 512, size)
    sufficient = [(free, at) for free, at in free_blocks(before, segment) if free >= request]
    if sufficient:
        assert address == min(sufficient)[1]
        assert after.final.reserved == before.final.reserved
    else:
        assert address not in [at for _, at in free_blocks(before)]
        assert after.final.reserved - before.final.reserved == segment.bytes


@settings(deadline=None)
@given(streams())
def test_free_neighbours_are_always_merged_and_segments_have_the_allowed_sizes(events):
    for segment in replay(events).segments:
        owners = [owner for _, _, owner in segment.blocks]
        assert (None, None) not in itertools.pairwise(owners)
        if segment.small:
            assert segment.bytes == 2 * MiB
        else:
            assert segment.bytes == 20 * MiB or (segment.bytes >= 10 * MiB and segment.bytes % (2 * MiB) == 0)


@settings(deadline=None)
@given(streams())
def test_a_block_exceeds_its_request_by_the_rest_that_is_not_worth_keeping(events):
    result = replay(events)
    held = {}
    for storage, delta in events:
        held[storage] = held.get(storage, 0) + delta
    for segment in result.segments:
        for _, size, owner in segment.blocks:
            if owner is not None:
                assert segment.small == (held[owner] <= MiB)
                assert 0 <= size - held[owner] <= (511 if segment.small else MiB + 511)


@settings(deadline=None)
@given(streams(), configs, capacities, st.integers(0, 60))
def test_the_past_does_not_depend_on_what_follows(events, config, capacity, count):
    whole = replay(events, config, capacity=capacity, timeline=True)
    part = replay(events[:count], config, capacity=capacity, timeline=True)
    for name in ("requested", "allocated", "reserved", "address"):
        assert np.array_equal(getattr(part.timeline, name), getattr(whole.timeline, name)[:count])
    for name in ("requested", "allocated", "reserved"):
        assert getattr(part, name).bytes <= getattr(whole, name).bytes


@settings(deadline=None)
@given(streams(), configs, capacities)
def test_the_levels_after_each_event_are_the_sums_of_what_the_segments_hold(events, config, capacity):
    result = replay(events, config, capacity=capacity, timeline=True)
    parts = [block for segment in result.segments for block in segment.blocks]
    assert result.final.allocated == sum(size for _, size, owner in parts if owner is not None)
    live = {}
    for storage, delta in events[: len(result.timeline.requested)]:
        live[storage] = live.get(storage, 0) + delta
    live = {storage: size for storage, size in live.items() if size}
    assert result.final.requested == sum(live.values())
    assert {owner for _, _, owner in parts if owner is not None} == set(live)
    assert all(size >= live[owner] for _, size, owner in parts if owner is not None)


@settings(deadline=None)
@given(streams(), st.dictionaries(st.integers(0, 9), st.integers(0, 2)))
def test_streams_and_size_classes_are_allocators_of_their_own(events, placed):
    events = [(storage, size) for storage, size in dict(events).items() if size > 0]
    whole = replay(events, streams=placed)
    apart = 0
    for stream, small in itertools.product((0, 1, 2), (True, False)):
        own = [(s, size) for s, size in events if placed.get(s, 0) == stream and (size <= MiB) == small]
        apart += replay(own).final.reserved
    assert whole.final.reserved == apart
    for segment in whole.segments:
        assert {placed.get(owner, 0) for *_, owner in segment.blocks if owner is not None} <= {segment.stream}


@settings(deadline=None)
@given(streams(), configs, capacities, st.dictionaries(st.integers(0, 9), st.integers(0, 2)))
def test_streams_add_up_to_the_reserved_peak(events, config, capacity, placed):
    result = replay(events, config, capacity=capacity, streams=placed)
    assert sum(result.of_streams.values()) == result.reserved.bytes
    assert all(size >= 0 for size in result.of_streams.values())


@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=20), st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_frees_does_not_matter_to_what_is_left(requests, random, expandable):
    config = AllocatorConfig(expandable_segments=expandable)
    taken = allocated(*requests)
    frees = [(storage, -size) for storage, size in taken if storage % 3]
    shuffled = random.sample(frees, len(frees))
    assert blocks(replay([*taken, *frees], config)) == blocks(replay([*taken, *shuffled], config))


@settings(deadline=None)
@given(st.lists(sizes, min_size=8, max_size=30), st.integers(2, 5), st.integers(4, 60))
def test_memory_runs_out_only_when_every_segment_is_in_use(requests, stride, mebibytes):
    # Every so many requests, all storages but one of them are freed
    events = []
    for storage, size in enumerate(requests):
        events.append((storage, size))
        if storage % stride == 0:
            events += [(old, -requests[old]) for old in range(max(0, storage - stride + 1), storage)]
    result = replay(events, capacity=mebibytes * MiB)
    failed = result.out_of_memory
    if failed is None:
        assert result.reserved.bytes <= mebibytes * MiB
        return
    for segment in result.segments:
        assert any(owner is not None for *_, owner in segment.blocks)
        if segment.small == (failed.request <= MiB):
            assert all(size < failed.request for _, size, owner in segment.blocks if owner is None)
    assert failed.levels.reserved + failed.segment > mebibytes * MiB


@settings(deadline=None)
@given(st.lists(sizes, max_size=30), st.sampled_from([20 * MiB, 11 * MiB, 40 * MiB]))
def test_expandable_segments_have_no_gap_while_nothing_is_freed(requests, step):
    config = AllocatorConfig(expandable_segments=True, large_segment_size=step)
    rounded = [-(-size // 512) * 512 for size in requests]
    small = sum(size for size in rounded if size <= MiB)
    large = sum(size for size in rounded if size > MiB)
    expected = -(-small // (2 * MiB)) * 2 * MiB + -(-large // step) * step
    assert replay(allocated(*requests), config).final == (sum(requests), small + large, expected)


@settings(deadline=None)
@given(streams(), capacities)
def test_expandable_segments_are_mapped_in_whole_steps(events, capacity):
    for segment in replay(events, EXPANDABLE, capacity=capacity).segments:
        step = 2 * MiB if segment.small else 20 * MiB
        assert segment.bytes % step == 0
        assert segment.address % step == 0


@settings(deadline=None)
@given(streams())
def test_an_unsplittable_segment_holds_one_block(events):
    limit = 25 * MiB
    result = replay(events, AllocatorConfig(max_split_size=limit))
    live = {}
    for storage, delta in events:
        live[storage] = live.get(storage, 0) + delta
    for segment in result.segments:
        if segment.bytes >= limit:
            [(_, size, owner)] = segment.blocks
            assert owner is None or limit <= -(-live[owner] // 512) * 512 + 2 * MiB
            assert owner is None or size < live[owner] + 20 * MiB


@settings(deadline=None)
@given(streams(), st.sampled_from([0.1, 0.5, 0.9]))
def test_garbage_collection_changes_nothing_below_its_threshold(events, threshold):
    plain = AllocatorConfig(memory_fraction=0.9)
    collecting = AllocatorConfig(memory_fraction=0.9, garbage_collection_threshold=threshold)
    roomy = int(replay(events).reserved.bytes / threshold / 0.9) + 4 * MiB
    assert replay(events, collecting, total=roomy) == replay(events, plain, total=roomy)
