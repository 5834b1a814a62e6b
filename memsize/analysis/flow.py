"""The events of a run as the allocator takes them, in columns: a run of a million events then takes 16 MB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from memsize.records.trace import Trace

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Flow:
    """For each event the storage that it is about and the bytes that this gains or loses; `streams` and `emptied` are
    those of the run's record.
    """

    storages: Column
    deltas: Column
    streams: Mapping[int, int]
    emptied: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.storages.tolist(), self.deltas.tolist(), strict=True)

    @cached_property
    def digest(self) -> object:
        """What is equal for runs that the allocator serves alike."""
        found = blake2b(self.storages.tobytes())
        found.update(self.deltas.tobytes())
        return found.digest(), tuple(self.streams.items()), self.emptied


def flow_of(trace: Trace) -> Flow:
    """The events of a record."""
    import numpy as np

    columns = np.array([event[:2] for event in trace.events], dtype=np.int64).reshape(-1, 2)
    storages, deltas = columns.T.copy()
    return Flow(storages, deltas, trace.streams, trace.emptied)
