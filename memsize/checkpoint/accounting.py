"""What each byte of a file is for: the claims that a reader makes on it, swept into sums that add up to its size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from memsize.checkpoint.record import USES, Use


@dataclass(slots=True)
class Claims:
    """The claims on a file of `size` bytes. A byte counts for the claim that starts first; one that nobody claims is
    `unclaimed`.
    """

    size: int
    _claims: list[tuple[int, int, Use]] = field(default_factory=list)

    def claim(self, start: int, length: int, use: Use) -> None:
        """`length` bytes from `start` are for `use`."""
        if length > 0:
            self._claims.append((start, start + length, use))

    def claim_around(self, start: int, length: int, use: Use, holes: Iterable[tuple[int, int]]) -> None:
        """`length` bytes from `start` are for `use`, except `holes`: starts and lengths that others claim."""
        position = start
        for hole, size in sorted(holes):
            self.claim(position, hole - position, use)
            position = max(position, hole + size)
        self.claim(position, start + length - position, use)

    def pad_gaps(self, start: int, end: int) -> None:
        """What no claim covers between `start` and `end` is padding."""
        position = start
        for first, last, _ in sorted(self._claims, key=itemgetter(0, 1)):
            if last <= position:
                continue
            if first >= end:
                break
            self.claim(position, first - position, "padding")
            position = last
        self.claim(position, end - position, "padding")

    def sums(self) -> tuple[int, ...]:
        """The bytes of each of `USES`: together they are the file's size."""
        sums = dict.fromkeys(USES, 0)
        position = 0
        for start, end, use in sorted(self._claims, key=itemgetter(0, 1)):
            start, end = max(start, position), min(end, self.size)
            if end <= start:
                continue
            sums["unclaimed"] += start - position
            sums[use] += end - start
            position = end
        sums["unclaimed"] += self.size - position
        return tuple(sums.values())
