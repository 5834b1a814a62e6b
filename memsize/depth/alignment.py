"""A table of a run of `n` repeated blocks, and of one with `n + 1`, extended to any number of blocks.

The second table is the first with segments repeated once more. A row is a key, which says the same at any depth, and
numbers (an index, a size), which change by the same amount with each block that a model has more, and with each time
that a segment is repeated. So the table of a deeper model follows by induction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

Value = TypeVar("Value", bound=Hashable)

_AHEAD = 8
"""How many rows at the least go on alike behind a segment that is tried first."""
_MOST_TRIES = 2000


class Table(NamedTuple):
    """Rows of a trace: the number of each row's key (the same key has the same one in all tables), and its numbers."""

    keys: Integers
    numbers: Integers


class Extension(NamedTuple):
    """The rows of a deep model, and the row of the shorter table that each is like."""

    keys: Integers
    numbers: Integers
    origin: Integers


class Insertion(NamedTuple):
    """A segment that the longer table has at `longer`, where the shorter one is at `shorter`: it repeats the `length`
    rows before it.
    """

    shorter: int
    longer: int
    length: int


def insertions(shorter: Integers, longer: Integers) -> list[Insertion] | None:
    """Return the segments that turn `shorter` into `longer`, each a repetition of what stands right before it; None
    where there are no such segments.
    """
    return _Search(shorter, longer).segments(0, 0, 0)


class _Search:
    """A search for segments from the beginning on. The shortest that goes on well comes first."""

    def __init__(self, shorter: Integers, longer: Integers) -> None:
        self.shorter = shorter
        self.longer = longer
        self.tries = 0

    def segments(self, at: int, to: int, last: int) -> list[Insertion] | None:
        """Return the segments from row `at` of the shorter table and `to` of the longer one, of which they may repeat
        what stands from `last` on.
        """
        alike = _common(self.shorter[at:], self.longer[to:])
        at, to = at + alike, to + alike
        if at == len(self.shorter) and to == len(self.longer):
            return []
        lengths = [*self._lengths(to, last, len(self.longer) - len(self.shorter) - (to - at))]
        for length in sorted(lengths, key=lambda n: not self._goes_on(at, to + n, max(n, _AHEAD))):
            self.tries += 1
            if self.tries > _MOST_TRIES or not self._goes_on(at, to + length, 1):
                continue
            rest = self.segments(at, to + length, to + length)
            if rest is not None:
                back = self._slack(to, length, last) // 2
                return [Insertion(at - back, to - back, length), *rest]
        return None

    def _lengths(self, at: int, last: int, most: int) -> Iterator[int]:
        """Yield the lengths, up to `most`, of segments of the longer table at `at` that repeat what stands before."""
        rows = self.longer
        most = min(most, at - last, len(rows) - at)
        for position in (rows[at : at + most] == rows[at - 1]).nonzero()[0].tolist():
            length = position + 1
            if (rows[at : at + length] == rows[at - length : at]).all():
                yield length

    def _slack(self, at: int, length: int, last: int) -> int:
        """Return by how many rows a segment may begin earlier.

        It is best taken from the middle of all repetitions: a row is then compared with that of the same repetition.
        """
        before, end = self.longer[last:at], self.longer[last + length : at + length]
        return _common(before[::-1], end[::-1])

    def _goes_on(self, at: int, to: int, ahead: int) -> bool:
        """Whether `ahead` rows of the two tables are alike from here on."""
        rest, other = self.shorter[at : at + ahead], self.longer[to : to + ahead]
        return _common(rest, other) == min(len(self.shorter) - at, len(self.longer) - to, ahead)


def _common(a: Integers, b: Integers) -> int:
    """Return how many rows at the beginning are alike."""
    size = min(len(a), len(b))
    different = (a[:size] != b[:size]).nonzero()[0]
    return int(different[0]) if len(different) else size


def extended(shorter: Table, longer: Table, blocks: int) -> Extension | None:
    """Return the table of a model that has `blocks` more than that of `shorter`, where `longer` has one more; None
    where the two do not align.
    """
    segments = insertions(shorter.keys, longer.keys)
    if segments is None or not all(_has_neighbours(shorter.keys, longer.keys, segment) for segment in segments):
        return None
    numbers, origin = [], []
    at = to = 0
    for at_end, to_end, length in [*segments, Insertion(len(shorter.keys), len(longer.keys), 0)]:
        first, second = shorter.numbers[at:at_end], longer.numbers[to:to_end]
        origin.append(np.arange(at, at_end))
        numbers.append(first + (second - first) * blocks)
        at, to = at_end, to_end + length
        if length:
            repeated = longer.numbers[to_end:to]
            # What a block more adds to the numbers of the repetition before, and to those of the one behind.
            before = longer.numbers[to_end - length : to_end] - shorter.numbers[at - length : at]
            behind = longer.numbers[to : to + length] - shorter.numbers[at : at + length]
            origin.append(np.tile(np.arange(at - length, at), blocks))
            steps = np.arange(blocks)[:, None, None] * (behind - before)
            numbers.append((repeated + before * (blocks - 1) + steps).reshape(blocks * length, repeated.shape[1]))
    rows = np.concatenate(origin)
    return Extension(shorter.keys[rows], np.concatenate(numbers), rows)


def extended_values(shorter: Sequence[Value], longer: Sequence[Value], blocks: int) -> tuple[Value, ...] | None:
    """Return the values of a model that has `blocks` more than that of `shorter`, where `longer` has one more; None
    where the two do not align.
    """
    numbers: dict[Value, int] = {}
    first, second = (
        Table(np.array([numbers.setdefault(value, len(numbers)) for value in values]), np.zeros((len(values), 0), int))
        for values in (shorter, longer)
    )
    result, values = extended(first, second, blocks), list(numbers)
    return None if result is None else tuple(values[number] for number in result.keys)


def _has_neighbours(shorter: Integers, longer: Integers, segment: Insertion) -> bool:
    """Whether the shorter table has the rows of a segment right before it and right behind it as well."""
    at, to, length = segment
    rows, around = longer[to : to + length], shorter[max(at - length, 0) : at + length]
    return len(around) == 2 * length and bool((around.reshape(2, length) == rows).all())
