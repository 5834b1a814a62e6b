"""An open file that is read by position and within its bounds, never as a whole, and the uses of its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from memsize import files
from memsize.checkpoints.contents import USES, Use
from memsize.checkpoints.work_budget import LONGEST_NAME, WorkBudget
from memsize.errors import CheckpointError
from memsize.printable import printable as text_printable, shortened


def printable(text: str, longest: int = LONGEST_NAME) -> str:
    """Return a text of the file as records keep it: in one line, escaped and cut."""
    return text_printable(text, longest)


@dataclass(slots=True)
class Source:
    """An open file of `size` bytes, called `name` in messages, and the `budget` of work for reading it."""

    file: BinaryIO
    name: str
    size: int
    budget: WorkBudget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = WorkBudget(self.name, self.size)

    def read(self, offset: int, count: int, what: str) -> bytes:
        """Read `count` bytes from `offset`, called `what`. Raises `CheckpointError` if the file ends within them."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.cut_off(what, offset + count)
        self.file.seek(offset)
        data = self.file.read(count)
        if len(data) != count:
            raise self.cut_off(what, offset + count)
        return data

    def cut_off(self, what: str, end: int | None = None) -> CheckpointError:
        """The error of a file that ends before it should."""
        should = "" if end is None or end < self.size else f", which should end at byte {end:,}"
        return CheckpointError(
            f"{self.name} is cut off or damaged: it has {self.size:,} bytes and ends within {what}{should}"
        )

    def check_count(self, tensors: int) -> None:
        """Raise `CheckpointError` if the file claims more `tensors` than are read in a file of its size."""
        if tensors > (most := self.budget.most("tensors")):
            why = f"it describes {tensors:,} tensors, more than memsize reads in a file of this size ({most:,})"
            raise self.damaged(why)

    def damaged(self, why: str) -> CheckpointError:
        """The error of a file that contradicts its own format."""
        return CheckpointError(f"{self.name} is damaged: {why}")


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open the file at `path`. Raises `CheckpointError` when it is not a file that can be read."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(files.opened(path))
        except OSError as error:
            raise CheckpointError(f"cannot read {shortened(str(path), 200)}: {error.strerror}") from error
        yield Source(file, printable(path.name), os.fstat(file.fileno()).st_size)


@dataclass(slots=True)
class Claims:
    """The uses of byte ranges of a file of `size` bytes, as its reader finds them. Their sums add up to `size`.

    A byte counts for the claim that starts first; a byte without a claim is `unclaimed`.
    """

    size: int
    _claims: list[tuple[int, int, Use]] = field(default_factory=list)

    def claim(self, start: int, length: int, use: Use) -> None:
        """Claim `length` bytes from `start` for `use`."""
        if length > 0:
            self._claims.append((start, start + length, use))

    def claim_around(self, start: int, length: int, use: Use, holes: Iterable[tuple[int, int]]) -> None:
        """Claim `length` bytes from `start` for `use`, without `holes`: the starts and lengths of other claims."""
        position, end = start, start + length
        for hole, size in sorted(holes):
            if start <= hole < end:
                self.claim(position, hole - position, use)
                position = max(position, hole + size)
        self.claim(position, end - position, use)

    def pad_gaps(self, start: int, end: int) -> None:
        """Claim the bytes between `start` and `end` that no claim covers as padding."""
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
