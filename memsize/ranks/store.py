"""A store of keys and values, by which processes find each other, for a process that is alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import HashStore

from memsize.errors import InputError

_POLLS: Final = 1000
"""How often in a row a program may read the same of the store, and nothing else."""


class LonelyStore(HashStore):
    """A store in which no other process writes: whoever waits for one of their keys would wait for ever."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.set_timeout(timedelta(milliseconds=1))
        self._latest: tuple[object, ...] = ()
        self._times = 0

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = super().get(key)
        self._check_polling("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        value = super().add(key, amount)
        self._check_polling("add", key, value)
        return value

    def check(self, keys: list[str]) -> bool:
        exists = super().check(keys)
        self._check_polling("check", *keys, exists)
        return exists

    def wait(self, keys: list[str], *_: Any) -> None:
        """Return where all of `keys` are there; raises `InputError` otherwise."""
        missing = [key for key in keys if not super(LonelyStore, self).check([key])]
        if missing:
            raise InputError(
                f"the program waits for {missing[0]!r}, which another process would put into the store that they "
                "share: set it in each process, or leave that out of this run"
            )

    def _check_polling(self, *read: object) -> None:
        """Raises `InputError` where the same is read so often that the program waits for others to change it."""
        self._times = self._times + 1 if read == self._latest else 1
        self._latest = read
        if self._times >= _POLLS:
            raise InputError(
                f"the program waits for another process to change {read[1]!r} in the store that they share, and there "
                "is none: leave that out of this run"
            )
