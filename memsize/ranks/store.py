"""A key-value store, as processes use it to find each other, for a single process without peers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import HashStore

from memsize.errors import InputError

_POLLS: Final = 1000
"""The number of identical reads in a row at which a program counts as waiting for another process."""


class LonelyStore(HashStore):
    """A store that no other process writes to. Waiting for another process's key raises instead of hanging."""

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
        """Return if all `keys` are set; raise `InputError` otherwise."""
        missing = [key for key in keys if not super(LonelyStore, self).check([key])]
        if missing:
            raise InputError(
                f"the program waits for {missing[0]!r}, which another process would put into the store that they "
                "share: set it in each process, or leave that out of this run"
            )

    def _check_polling(self, *read: object) -> None:
        """Raise `InputError` after `_POLLS` identical reads in a row: the program waits for another process."""
        self._times = self._times + 1 if read == self._latest else 1
        self._latest = read
        if self._times >= _POLLS:
            raise InputError(
                f"the program waits for another process to change {read[1]!r} in the store that they share, and there "
                "is none: leave that out of this run"
            )
