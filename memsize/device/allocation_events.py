"""The events of a run as the allocator takes them, in columns: a run of a million events then takes 16 MB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from memsize.records.columns import numbers
from memsize.records.trace import Trace

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class AllocationEvents:
    """For each event the storage that it is about and the bytes that this gains or loses; `streams` and `emptied` are
    those of the run's record. `deferred` maps each event that frees what other streams may still use to the event
    before which the program has waited for them.
    """

    storages: Column
    deltas: Column
    streams: Mapping[int, int]
    emptied: tuple[int, ...] = ()
    deferred: Mapping[int, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.storages.tolist(), self.deltas.tolist(), strict=True)

    def __len__(self) -> int:
        return len(self.storages)

    @cached_property
    def digest(self) -> object:
        """A key that is equal for runs that the allocator serves alike."""
        digest = blake2b(self.storages.tobytes())
        digest.update(self.deltas.tobytes())
        return digest.digest(), tuple(self.streams.items()), self.emptied, tuple(self.deferred.items())

    def alive(self, event: int) -> dict[int, int]:
        """The bytes of each storage that is alive after an event."""
        import numpy as np

        storages, deltas = self.storages[: event + 1], self.deltas[: event + 1]
        live_bytes = np.zeros(int(storages.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(live_bytes, storages, deltas)
        alive = np.flatnonzero(live_bytes)
        return dict(zip(alive.tolist(), live_bytes[alive].tolist(), strict=True))

    def born(self, storage: int) -> int:
        """The last event that gave a storage bytes."""
        import numpy as np

        return int(np.flatnonzero((self.storages == storage) & (self.deltas > 0))[-1])


def flow_of(trace: Trace) -> AllocationEvents:
    """The events of a record."""
    import numpy as np

    streams = numbers(trace.storages, "stream")
    elsewhere = np.flatnonzero(streams)
    return AllocationEvents(
        numbers(trace.events, "storage").astype(np.int64, copy=False),
        numbers(trace.events, "delta").astype(np.int64, copy=False),
        dict(zip(elsewhere.tolist(), streams[elsewhere].tolist(), strict=True)),
        trace.emptied,
        {block.event: len(trace.events) if block.until < 0 else block.until for block in trace.deferred},
    )
