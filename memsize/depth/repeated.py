"""`RepeatedBlocks`: where a model holds blocks that are alike, one after the other, and how their names count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

WITHOUT_NUMBER = -1


class FoldedPath(NamedTuple):
    """A path without the number of its block: `kind` is which block of a period it is in, counted from the end behind
    the last period; None outside of the blocks, where `rest` is the whole path.
    """

    kind: int | None
    rest: str


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

    def with_count(self, count: int) -> RepeatedBlocks:
        """Return these blocks in a model that has `count` periods of them."""
        return replace(self, count=count)

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
            return FoldedPath(None, path), WITHOUT_NUMBER
        kind = (number - self.start) % self.period if number < self.stop else self.stop - number - 1
        return FoldedPath(kind, path[len(self.stem) + len(str(number)) :]), number

    def unfold(self, path: FoldedPath, number: int) -> str:
        """Return the path of which `fold` makes `path` and `number`."""
        return path.rest if path.kind is None else f"{self.stem}{number}{path.rest}"
