"""`Repetition`: where a model holds blocks that are alike, one after the other, and how their names count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

WITHOUT_NUMBER = -1


class FoldedPath(NamedTuple):
    """A path without the number of its block: `stem` is what comes before the number, `kind` is which block of a period
    it is in, counted from the end behind the last period; None outside of the blocks, where `rest` is the whole path.
    """

    stem: str
    kind: int | None
    rest: str

    def unfold(self, number: int) -> str:
        """Return the path in the block of this number."""
        return self.rest if self.kind is None else f"{self.stem}{number}{self.rest}"


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """`count` periods of `period` blocks each, the children of one module from number `start` on.

    Their paths are `stem` and a number (``"model.layers."``, 7). `behind` are the children that follow the last period.
    """

    stem: str
    start: int
    period: int
    count: int
    behind: int = 0

    @property
    def stop(self) -> int:
        """The number behind the last period."""
        return self.start + self.period * self.count

    def number(self, path: str) -> int:
        """Return the number of the child that `path` is in; -1 where it is in none."""
        if not path.startswith(self.stem):
            return WITHOUT_NUMBER
        number = path[len(self.stem) :].partition(".")[0]
        return int(number) if number.isdigit() else WITHOUT_NUMBER

    def fold(self, path: str) -> tuple[FoldedPath, int]:
        """Return `path` without the number of its child, and that number; children before the first period keep it."""
        number = self.number(path)
        if number < self.start:
            return FoldedPath("", None, path), WITHOUT_NUMBER
        kind = (number - self.start) % self.period if number < self.stop else self.stop - number - 1
        return FoldedPath(self.stem, kind, path[len(self.stem) + len(str(number)) :]), number


@dataclass(frozen=True, slots=True)
class Repetition:
    """The blocks of a model that repeat. The stacks of one of the `groups` have equally many periods."""

    groups: tuple[tuple[RepeatedBlocks, ...], ...]

    def __iter__(self) -> Iterator[RepeatedBlocks]:
        return (stack for group in self.groups for stack in group)

    @property
    def counts(self) -> tuple[int, ...]:
        """The periods in each group."""
        return tuple(group[0].count for group in self.groups)

    def with_counts(self, counts: Sequence[int]) -> Repetition:
        """Return these blocks in a model that has as many periods of each group."""
        groups = zip(self.groups, counts, strict=True)
        return Repetition(tuple(tuple(replace(stack, count=count) for stack in group) for group, count in groups))

    def fold(self, path: str) -> tuple[FoldedPath, int]:
        """Return `path` without the number of its block, and that number, -1 outside of the stacks."""
        folded = (stack.fold(path) for stack in self if path.startswith(stack.stem))
        return next(folded, (FoldedPath("", None, path), WITHOUT_NUMBER))


def one_more(counts: Sequence[int], group: int) -> tuple[int, ...]:
    """Return the counts of the periods with one more in a group."""
    return tuple(count + (number == group) for number, count in enumerate(counts))
