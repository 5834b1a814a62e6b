"""An open file that is read by position, within its bounds, and never as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from memsize.checkpoint.texts import printable
from memsize.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Source:
    """A file of `size` bytes; `name` is what messages call it."""

    file: BinaryIO
    name: str
    size: int

    def read(self, offset: int, count: int, what: str) -> bytes:
        """`count` bytes from `offset`; raises `CheckpointError` that the file ends within `what`."""
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

    def damaged(self, why: str) -> CheckpointError:
        """The error of a file that contradicts its own format."""
        return CheckpointError(f"{self.name} is damaged: {why}")


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """The file at `path` while it is open. Raises `CheckpointError` when it is not a file that can be read."""
    try:
        # Not blocking, so that a pipe which nobody writes to is refused and not waited for.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    with os.fdopen(handle, "rb", buffering=1 << 16) as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a file")
        yield Source(file, printable(path.name), status.st_size)
