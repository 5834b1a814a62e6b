"""The size from which on something holds, measured there and at the size before: a line only says where to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FARTHEST: Final = 2**24
_LOOKS: Final = 6
"""How many sizes are measured around a predicted one: each takes a run or two of the model."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """The batch size from which on one way of running keeps fewer bytes than another.

    `batch` is the smallest such batch: measured to keep less, with `batch - 1` measured to keep as much or more (unless
    `batch` is 1). None when there is none. `start` is the batch asked about, with what each keeps there; `per_sample`
    is what one more sample adds to each.
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

    def foretold(batch: int) -> bool:
        return slope <= 0 and here + slope * (batch - start) < 0

    batch = first_size(foretold, lambda batch: gap(batch) < 0, _FARTHEST)
    (first, second), following = seen[start], seen[start + 1]
    return Crossover(
        batch=batch,
        start=start,
        first=first,
        second=second,
        first_per_sample=following[0] - first,
        second_per_sample=following[1] - second,
    )


def first_size(foretold: Callable[[int], bool], measured: Callable[[int], bool], most: int) -> int | None:
    """The smallest size for which `measured` holds while it doesn't for the one before; None where none was found.

    `foretold` says where to look, up to `most`, and costs next to nothing.
    """
    if not foretold(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if foretold(middle) else (middle, high)
    seen = {0: False}

    def holds(size: int) -> bool:
        if size not in seen:
            seen[size] = measured(size)
        return seen[size]

    while len(seen) <= _LOOKS:
        if not holds(high):
            high += 1
        elif holds(high - 1):
            high -= 1
        else:
            return high
    return None
