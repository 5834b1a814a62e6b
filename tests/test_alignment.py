"""Two logs side by side: hand-built ones, and the laws that every pair of logs obeys."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, strategies as st

from tests.measurements import (
    NO_LOCATION,
    AllocationLog,
    LogEntry,
    OpLocation,
    Window,
    _shortest_edit,
    align,
    allocations,
    gaps,
    levels_beside,
    log_of,
    matched,
)
from tests.records import AllocationDifference, DifferenceKind

FC, ACT, HEAD = (
    OpLocation("forward", "fc", "addmm"),
    OpLocation("forward", "act", "relu"),
    OpLocation("forward", "head", "addmm"),
)
GRAD = OpLocation("backward", "head", "mm")

Event = tuple[int, int, OpLocation]


def log(*events: Event) -> AllocationLog:
    return log_of(events)


#: fc's output is freed after act's exists; head's gradient outlives the step
STEP: tuple[Event, ...] = (
    (0, 4096, FC),
    (1, 4096, ACT),
    (0, -4096, ACT),
    (2, 1024, HEAD),
    (3, 2048, GRAD),
    (1, -4096, GRAD),
    (2, -1024, GRAD),
)


def test_allocations_of_a_log() -> None:
    # most bytes are alive after GRAD: 4096 + 1024 + 2048 = 7,168; after ACT they were 8,192
    found = allocations(log(*STEP))
    assert [(each.bytes, each.place, each.freed, each.at_peak) for each in found] == [
        (4096, FC, 2, True),
        (4096, ACT, 4, True),
        (1024, HEAD, 4, False),
        (2048, GRAD, None, False),
    ]


def test_what_grows_in_place_is_one_more_allocation() -> None:
    found = allocations(log((0, 512, FC), (0, 512, ACT), (0, -1024, HEAD)))
    assert [(each.bytes, each.freed) for each in found] == [(512, 2), (512, 2)]


def test_a_storage_from_before_is_no_allocation() -> None:
    assert allocations(log((-1, -4096, FC), (0, 512, ACT))) == ((512, ACT, None, False),)


def test_the_same_log_has_no_difference() -> None:
    found = align(log(*STEP), log(*STEP))
    assert (found.predicted, found.real, found.matched, found.differences) == (4, 4, 4, ())


def test_one_that_only_the_real_step_has() -> None:
    workspace = (9, 8_519_680, HEAD)
    real = (*STEP[:3], workspace, *STEP[3:])
    found = align(log(*STEP), log(*real))
    assert found.differences == (AllocationDifference("real only", HEAD, None, 8_519_680, True),)
    assert found.differences[0].bytes == 8_519_680
    turned = align(log(*real), log(*STEP))
    assert turned.differences == (AllocationDifference("predicted only", HEAD, 8_519_680, None, True),)
    assert turned.differences[0].bytes == -8_519_680


def test_another_size_at_the_same_place() -> None:
    real = [(s, d * 2, p) if s == 1 else (s, d, p) for s, d, p in STEP]
    found = align(log(*STEP), log(*real))
    assert found.differences == (AllocationDifference("other size", ACT, 4096, 8192, True),)
    assert found.differences[0].bytes == 4096


def test_sizes_that_differ_within_a_block() -> None:
    # both are one block of 512 B, so they match at once; what was asked for differs all the same
    found = align(log((0, 500, FC)), log((0, 512, ACT)))
    assert found.differences == (AllocationDifference("other size", FC, 500, 512, True),)


def test_another_end() -> None:
    real = [event for event in STEP if event[:2] != (0, -4096)] + [(0, -4096, GRAD)]
    found = align(log(*STEP), log(*real))
    assert found.differences == (AllocationDifference("freed later", FC, 4096, 4096, True),)
    assert found.differences[0].bytes == 4096
    turned = align(log(*real), log(*STEP))
    assert [difference.kind for difference in turned.differences] == ["freed earlier"]
    assert turned.differences[0].bytes == -4096


def test_places_told_differently_are_no_difference() -> None:
    real = [(s, d, NO_LOCATION if s == 2 else p) for s, d, p in STEP]
    assert align(log(*STEP), log(*real)).differences == ()


def test_what_nobody_noted_the_place_of_is_matched_by_size_only() -> None:
    found = align(log((0, 512, NO_LOCATION)), log((0, 2048, NO_LOCATION)))
    assert [difference.kind for difference in found.differences] == ["predicted only", "real only"]


def test_differences_come_in_the_order_of_the_step() -> None:
    real = ((7, 512, FC), *STEP[:4], (8, 512, HEAD), *STEP[4:])
    found = align(log(*STEP), log(*real))
    assert [difference.place for difference in found.differences] == [FC, HEAD]


PLACES = st.sampled_from([FC, ACT, HEAD, GRAD, NO_LOCATION])
SIZES = st.sampled_from([4, 512, 513, 1024, 65_536, 2**20])


@st.composite
def logs(draw: st.DrawFn) -> AllocationLog:
    """Any log: storages appear in order, and some end."""
    events: list[Event] = []
    live: list[tuple[int, int]] = []
    for number in range(draw(st.integers(0, 25))):
        if live and draw(st.booleans()):
            storage, size = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append((storage, -size, draw(PLACES)))
        else:
            size = draw(SIZES)
            live.append((number, size))
            events.append((number, size, draw(PLACES)))
    return log_of(events)


@given(logs())
def test_a_log_is_as_itself(first: AllocationLog) -> None:
    found = align(first, first)
    assert not found.differences
    assert found.matched == found.predicted == found.real


@given(logs(), st.data())
def test_an_allocation_put_in_is_found(first: AllocationLog, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(first.entries)))
    # no other allocation has that size
    entries = [(e.storage, e.delta, first.places[e.place]) for e in first.entries]
    second = log_of([*entries[:position], (999, 7 * 2**20, GRAD), *entries[position:]])
    found = align(first, second)
    only = [difference for difference in found.differences if difference.kind == "real only"]
    assert [(each.place, each.predicted, each.real) for each in only] == [(GRAD, None, 7 * 2**20)]
    assert found.differences == tuple(only)


MIRRORED: dict[DifferenceKind, DifferenceKind] = {
    "predicted only": "real only",
    "real only": "predicted only",
    "other size": "other size",
    "freed later": "freed earlier",
    "freed earlier": "freed later",
}


@given(logs(), logs())
def test_swapping_the_sides_swaps_what_is_said_of_them(first: AllocationLog, second: AllocationLog) -> None:
    one, other = align(first, second), align(second, first)
    assert (one.predicted, one.real, one.matched) == (other.real, other.predicted, other.matched)
    assert Counter((MIRRORED[d.kind], d.real, d.predicted, d.at_peak) for d in one.differences) == Counter(
        (d.kind, d.predicted, d.real, d.at_peak) for d in other.differences
    )


@given(logs(), logs())
def test_every_allocation_is_matched_or_told(first: AllocationLog, second: AllocationLog) -> None:
    found = align(first, second)
    kinds = Counter(difference.kind for difference in found.differences)
    assert found.matched + kinds["predicted only"] == found.predicted
    assert found.matched + kinds["real only"] == found.real


SEQUENCES = st.lists(st.integers(0, 6), max_size=60)


@given(SEQUENCES, SEQUENCES)
def test_pairs_are_equal_and_rise(first: list[int], second: list[int]) -> None:
    pairs = matched(first, second)
    assert all(first[a] == second[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    left = sum(w.high - w.low + w.other_high - w.other_low for w in gaps(pairs, Window.of(first, second)))
    assert left + 2 * len(pairs) == len(first) + len(second)


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_the_shortest_edit_is_one(first: list[int], second: list[int]) -> None:
    found = _shortest_edit(first, second, Window(0, len(first), 0, len(second)))
    assert found is not None
    assert len(found) == longest_common(first, second)


def longest_common(first: list[int], second: list[int]) -> int:
    """The textbook's table."""
    row = [0] * (len(second) + 1)
    for a in first:
        above = row[:]
        for place, b in enumerate(second):
            row[place + 1] = above[place] + 1 if a == b else max(above[place + 1], row[place])
    return row[-1]


def test_a_long_log_with_little_in_common() -> None:
    """Beyond what a shortest edit may cost, the k-th of a kind is the k-th: ten thousand of each, in another order."""
    first = [1, 2, 3, 4] * 2_500
    second = [4, 3, 2, 1] * 2_500
    pairs = matched(first, second)
    assert len(pairs) >= 2_500
    assert all(first[a] == second[b] for a, b in pairs)


def test_a_hundred_thousand_events() -> None:
    """A large step, and the same with every hundredth allocation missing."""
    places = [OpLocation("forward", f"layers.{number // 10}", "addmm") for number in range(50_000)]
    events = [(number, 512 * (1 + number % 37), places[number]) for number in range(50_000)]
    ends = [(number, -512 * (1 + number % 37), places[number]) for number in reversed(range(50_000))]
    whole = log_of([*events, *ends])
    part = log_of([event for event in (*events, *ends) if event[0] % 100])
    found = align(whole, part)
    assert Counter(difference.kind for difference in found.differences) == {"predicted only": 500}


@pytest.mark.parametrize("log_", [log(), log(*STEP)])
def test_a_log_beside_nothing(log_: AllocationLog) -> None:
    found = align(log_, log())
    assert found.predicted == len(found.differences) == len(allocations(log_))


def test_places_are_kept_once() -> None:
    assert log(*STEP).places == (FC, ACT, HEAD, GRAD)
    assert log(*STEP).entries[2] == LogEntry(0, -4096, 1)


# -- another run at each event of one ---------------------------------------------------------------------------------

CHANGES = st.lists(st.integers(-(2**20), 2**20).filter(bool), min_size=1, max_size=60)


@given(CHANGES, st.data())
def test_a_run_beside_itself_is_itself_also_where_it_ends_early(changes: list[int], data: st.DataObject) -> None:
    run = [2**20, *changes]
    count = data.draw(st.integers(1, len(run)))
    assert levels_beside(run[:count], run) == tuple(accumulate(run[:count]))


def test_what_lies_between_matches_is_stretched_with_its_highest_level() -> None:
    # 4 and 8 KiB match. Between them the other run takes 100 KiB and gives them back, in two events for one here.
    real, other = [4096, -4096, 8192], [4096, 102400, -102400, -4096, 8192]
    assert levels_beside(real, other) == (106496, 4096, 8192)
    assert levels_beside(other, real) == (4096, 4096, 0, 0, 8192)
    # Nothing is said of runs without allocations in common, nor where the other is longer.
    assert levels_beside([4096, -4096], [8192, -8192]) == ()
    # Unless it is known what made them, as of one model in two precisions.
    assert levels_beside([4096, -4096], [8192, -8192], ("ab", "ab")) == (8192, 0)
    assert levels_beside([4096, 512], [4096, 512, 4096]) == (4096, 4608)
