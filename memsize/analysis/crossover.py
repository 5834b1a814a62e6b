"""From which batch on one way of running keeps less than another. Measured: a line only says where to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FARTHEST = 2**24
_STEPS = 4
"""How far from the line the answer is looked for: each step is a run or two of the model."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """From which batch size on one way of running keeps fewer bytes than another.

    `batch` is the smallest such batch: measured to keep less, with `batch - 1` measured to keep as much or more
    (unless `batch` is 1). None when there is none. `start` is the batch asked about, with what each keeps there;
    `per_sample` is what one more sample adds to each.
    """

    batch: int | None
    start: int
    first: int
    second: int
    first_per_sample: int
    second_per_sample: int


def find_crossover(measure: Callable[[int], tuple[int, int]], start: int) -> Crossover:
    """The smallest batch from which the second of `measure(batch)`'s figures is below the first.

    `measure` gives the bytes that both keep at a batch size; it is called a handful of times, once per batch size.
    """
    seen: dict[int, tuple[int, int]] = {}

    def gap(batch: int) -> int:
        if batch not in seen:
            seen[batch] = measure(batch)
        return seen[batch][1] - seen[batch][0]

    here, slope = gap(start), gap(start + 1) - gap(start)
    batch = _search(gap, start, here, slope)
    (first, second), following = seen[start], seen[start + 1]
    return Crossover(batch, start, first, second, following[0] - first, following[1] - second)


def _search(gap: Callable[[int], int], start: int, here: int, slope: int) -> int | None:
    if slope > 0 or (slope == 0 and here >= 0):
        return None
    if slope == 0:
        return _last_step(gap, 1)
    # On the line through the two measurements the gap is below 0 from here on.
    guess = max(1, start + here // -slope + 1)
    return None if guess > _FARTHEST else _last_step(gap, guess)


def _last_step(gap: Callable[[int], int], guess: int) -> int | None:
    """From a guess to the exact batch: memory need not be linear in the batch."""
    for _ in range(_STEPS):
        if gap(guess) >= 0:
            guess += 1
        elif guess > 1 and gap(guess - 1) < 0:
            guess -= 1
        else:
            return guess
    return None
