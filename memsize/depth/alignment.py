"""A table of a run of `n` repeated blocks, and of one with `n + 1`, extended to any number of blocks.

The second table is the first with segments repeated once more. A row is a key, which says the same at any depth, and
numbers (an index, a size), which change by the same amount with each block that a model has more, and with each time
that a segment is repeated. So the table of a deeper model follows by induction. Where a model has several kinds of
blocks, an encoder's and a decoder's, a table with one more of each kind shows what that kind adds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

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
    """Return the segments that turn `shorter` into `longer`, each a repetition of its neighbours; None without any."""
    return _Search(shorter, longer).segments(0, 0, 0)


class _Search:
    """A search for segments from the beginning on. The shortest that goes on well comes first."""

    def __init__(self, shorter: Integers, longer: Integers) -> None:
        self.shorter = shorter
        self.longer = longer
        self.tries = 0

    def segments(self, at: int, to: int, last: int) -> list[Insertion] | None:
        """Return the segments from two rows on, which may repeat what stands from `last` on."""
        alike = _common(self.shorter[at:], self.longer[to:])
        at, to = at + alike, to + alike
        if at == len(self.shorter) and to == len(self.longer):
            return []
        lengths = [*self._lengths(to, last, len(self.longer) - len(self.shorter) - (to - at))]
        for length in sorted(lengths, key=lambda n: not self._goes_on(at, to + n, max(n, _AHEAD))):
            self.tries += 1
            if self.tries > _MOST_TRIES or not self._goes_on(at, to + length, 1):
                continue
            # It is best taken from the middle of all repetitions: a row is then compared with that of the same one.
            before, end = self.longer[last:to], self.longer[last + length : to + length]
            back = _common(before[::-1], end[::-1]) // 2
            segment = Insertion(at - back, to - back, length)
            # Of rows that the shorter table has on one side alone, nothing shows by how much their numbers change.
            around = self.shorter[max(segment.shorter - length, 0) : segment.shorter + length]
            rows = self.longer[segment.longer : segment.longer + length]
            if len(around) < 2 * length or (around.reshape(2, length) != rows).any():
                continue
            rest = self.segments(at, to + length, to + length)
            if rest is not None:
                return [segment, *rest]
        return None

    def _lengths(self, at: int, last: int, most: int) -> Iterator[int]:
        """Yield the lengths, up to `most`, of segments of the longer table at `at` that repeat what stands before."""
        rows = self.longer
        most = min(most, at - last, len(rows) - at)
        for position in (rows[at : at + most] == rows[at - 1]).nonzero()[0].tolist():
            length = position + 1
            if (rows[at : at + length] == rows[at - length : at]).all():
                yield length

    def _goes_on(self, at: int, to: int, ahead: int) -> bool:
        """Whether `ahead` rows of the two tables are alike from here on."""
        rest, other = self.shorter[at : at + ahead], self.longer[to : to + ahead]
        return _common(rest, other) == min(len(self.shorter) - at, len(self.longer) - to, ahead)


def _common(a: Integers, b: Integers) -> int:
    size = min(len(a), len(b))
    different = (a[:size] != b[:size]).nonzero()[0]
    return int(different[0]) if len(different) else size


def extended(shorter: Table, longer: Sequence[Table], blocks: Sequence[int]) -> Extension | None:
    """Return the table of a model that has more blocks than that of `shorter`: of each kind as many as `blocks` says.

    Each of `longer` has one more of one kind. None where they do not align.
    """
    repetitions, growths = [], []
    for kind, table in enumerate(longer):
        segments = insertions(shorter.keys, table.keys)
        if segments is None:
            return None
        repetitions += [(segment.shorter, kind, segment) for segment in segments]
        growths.append(_growth(shorter, table, segments))
    repetitions.sort()
    for (at, kind, segment), (start, other, part) in product(repetitions, repeat=2):
        if kind != other and abs(at - start) < max(segment.length, part.length, 1):
            return None  # a segment of one kind of block begins inside of the neighbours of another kind's
    growth = sum(
        (growth * count for growth, count in zip(growths, blocks, strict=True)), np.zeros_like(shorter.numbers)
    )
    numbers, origin = [], []
    start, end = 0, len(shorter.keys)
    for at, kind, (_, to, length) in repetitions:
        before, behind = np.arange(at - length, at), np.arange(at, at + length)
        own = growths[kind]
        others = growth - own * blocks[kind]
        if (others[before] != others[behind]).any():
            return None
        numbers.append((shorter.numbers + growth)[start:at])
        origin += [np.arange(start, at), np.tile(before, blocks[kind])]
        # What a block more adds to the numbers of the repetition before, and to those of the one behind.
        first = longer[kind].numbers[to : to + length] + others[before] + own[before] * (blocks[kind] - 1)
        steps = np.arange(blocks[kind])[:, None, None] * (own[behind] - own[before])
        numbers.append((first + steps).reshape(blocks[kind] * length, first.shape[1]))
        start = at
    rows = np.concatenate([*origin, np.arange(start, end)])
    return Extension(shorter.keys[rows], np.concatenate([*numbers, (shorter.numbers + growth)[start:]]), rows)


def _growth(shorter: Table, longer: Table, segments: Sequence[Insertion]) -> Integers:
    inserted = np.zeros(len(shorter.keys) + 1, dtype=np.int64)
    for segment in segments:
        inserted[segment.shorter] += segment.length
    growth: Integers = longer.numbers[np.arange(len(shorter.keys)) + np.cumsum(inserted)[:-1]] - shorter.numbers
    return growth


def origins(
    shorter: Sequence[Hashable], longer: Sequence[Sequence[Hashable]], blocks: Sequence[int]
) -> list[int] | None:
    """Return which of the values of `shorter` each value of a model with more blocks is like, as `extended` does."""
    numbers: dict[Hashable, int] = {}
    first, *others = (
        Table(np.array([numbers.setdefault(value, len(numbers)) for value in values]), np.zeros((len(values), 0), int))
        for values in (shorter, *longer)
    )
    result = extended(first, others, blocks)
    return None if result is None else result.origin.tolist()
