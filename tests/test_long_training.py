"""A training of many steps follows from a few that were recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import memsize
from benchmarks.published.recipes.long_training import ORDERS, Addresses, Levels, LongTraining, emptied
from memsize.units import MiB

RECORDED = 3
STEPS = 40
EVALUATED = 15


def _steps() -> Iterator[None]:
    """Steps that replace what the one before left, beside activations that are freed. A loss is kept of each."""
    weight = torch.empty(8 * MiB, dtype=torch.int8, device="cuda")
    averages = [torch.empty(size * MiB, dtype=torch.int8, device="cuda") for size in (3, 5, 3)]
    losses = []
    torch.cuda.empty_cache()
    while True:
        for number, average in enumerate(averages):
            activation = torch.empty(7 * MiB, dtype=torch.int8, device="cuda")
            averages[number] = torch.empty_like(average)
            del activation, average
        losses.append(torch.empty(1, device="cuda"))
        yield
        assert weight.is_cuda


def test_repeated_steps_are_those_of_the_run() -> None:
    with memsize.virtual_gpu("T4"):
        run, levels = _steps(), []
        for step in range(1, STEPS + 1):
            next(run)
            levels.append(Levels(torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            if step % EVALUATED == 0:
                torch.cuda.empty_cache()
    with memsize.virtual_gpu("T4") as region:
        run = _steps()
        for _ in range(RECORDED):
            next(run)
            torch.cuda.empty_cache()
        run.close()
    repeated = LongTraining(region.trace, RECORDED).run((1, 2, 3), STEPS, EVALUATED)
    assert [level.reserved for level in repeated] == [level.reserved for level in levels]
    # Where the steps' blocks lie as before, the losses are not counted on: 512 B each.
    assert all(0 <= b.allocated - a.allocated <= 512 * STEPS for a, b in zip(repeated, levels, strict=True))


def test_what_a_step_leaves_replaces_what_the_step_before_it_left() -> None:
    with memsize.virtual_gpu("T4") as region:
        left = torch.empty(8 * MiB, dtype=torch.int8, device="cuda")
        torch.cuda.empty_cache()
        for _ in range(2):
            activation = torch.empty(30 * MiB, dtype=torch.int8, device="cuda")
            left = torch.empty(14 * MiB, dtype=torch.int8, device="cuda")
            del activation
            torch.cuda.empty_cache()
        torch.empty(1, device="cuda")
        del left
    training = LongTraining(region.trace, 2)
    # The first 8 MiB are in a segment of 20, larger blocks in segments of their own.
    assert training.levels() == Levels(8 * MiB, 20 * MiB)
    assert training.record(0) == Levels(14 * MiB, (20 + 30 + 14) * MiB)
    # The new block is made while the one that it replaces is there: the first 20 MiB have room for it by now.
    assert training.record(1) == Levels(14 * MiB, (20 + 30 + 14) * MiB)
    assert training.repeated(1, 100) == [Levels(14 * MiB, (20 + 30 + 14) * MiB)] * 100
    training.empty_cache()
    # Repetitions move it between the segments of 14 and 20 MiB; an even number leaves it where step 2 did.
    assert training.levels() == Levels(14 * MiB, 20 * MiB)


@pytest.mark.parametrize(
    ("order", "addresses"),
    [
        # Segments of 20, 30 and 14 MiB lie 2 MiB apart; the first leaves room for one of 14 behind it.
        ((False, False), [0, 22, 54, 70]),
        ((False, True), [0, 22, 54, 0]),
        ((True, False), [-20, -52, -68, -84]),
        ((True, True), [-20, -52, -68, -14]),
    ],
)
def test_a_driver_may_assign_addresses_in_four_ways(order: tuple[bool, bool], addresses: list[int]) -> None:
    assert order in ORDERS
    memory, blocks, found = Addresses(*order), MiB // 512, []
    for size in (20, 30, 14, 14):
        if len(found) == 3:
            memory.record_change(0, found[0], -20 * blocks)
        found.append(memory.assign_address(size * blocks))
        memory.record_change(0, found[-1], size * blocks)
    top = (1 << 43) if order[0] else 0
    assert [address - top for address in found] == [mebibytes * blocks for mebibytes in addresses]


def test_what_is_reserved_where_the_cache_is_emptied() -> None:
    with memsize.virtual_gpu("T4") as region:
        torch.cuda.empty_cache()
        for sizes in ((3, 30), (14,), (40, 5)):
            tensors = [torch.empty(size * MiB, dtype=torch.int8, device="cuda") for size in sizes]
            torch.cuda.empty_cache()
        torch.empty(1, device="cuda")
        del tensors
    # A list lives until the next one is complete: 14 MiB find room behind the 3 in a segment of 20, but 5 none beside
    # the 14, so that they take another 20, and 40 a segment of their own.
    assert [*emptied(region.trace)] == [[50 * MiB, 50 * MiB, 80 * MiB]] * len(ORDERS)
