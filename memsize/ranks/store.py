"""A store of keys and values, by which processes find each other, for a process that is alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore

from memsize.errors import InputError


class LonelyStore(HashStore):
    """A store in which no other process writes: whoever waits for one of their keys would wait for ever."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.set_timeout(timedelta(milliseconds=1))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], *_: Any) -> None:
        """Return where all of `keys` are there; raises `InputError` otherwise."""
        missing = [key for key in keys if not self.check([key])]
        if missing:
            raise InputError(
                f"the program waits for {missing[0]!r}, which another process would put into the store that they "
                "share: set it in each process, or leave that out of this run"
            )
