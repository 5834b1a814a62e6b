"""The events of a run as the allocator takes them, in columns: a run of a million events then takes 16 MB.

The workspaces of cuDNN's convolutions may be estimates: then there are other versions of the events, with a lower and
an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from memsize.records.columns import numbers, places
from memsize.records.trace import Trace

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.int64]]


OMITTED: Final = -1, 0
"""Replaces an event that is left out, so that the events after it keep their numbers."""
CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
"""Ops that cuDNN computes with a workspace."""
DOUBLED: Final = 2
"""An estimated workspace may be up to this many times as large (`python -m benchmarks.workspaces` says how often it
is).
"""


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

    def __getitem__(self, part: slice) -> AllocationEvents:
        """A part of the events, with what is known of all."""
        return replace(self, storages=self.storages[part], deltas=self.deltas[part])

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


def requests(trace: Trace, factor: int = 1, doubt: int = 0) -> AllocationEvents:
    """The events of a trace, with the workspaces of its convolutions `factor` times as large, as far as `Storage.doubt`
    is at least `doubt`; 0 leaves them out.
    """
    import numpy as np

    flow = flow_of(trace)
    if factor == 1:
        return flow
    doubts = numbers(trace.storages, "doubt")
    scaled = np.isin(flow.storages, [index for index in dispensable(trace) if doubts[index] >= doubt])
    storages = flow.storages if factor else np.where(scaled, OMITTED[0], flow.storages)
    return replace(flow, storages=storages, deltas=np.where(scaled, factor * flow.deltas, flow.deltas))


def is_estimated(trace: Trace) -> bool:
    """Whether any convolution workspace in the trace is an estimate."""
    workspaces = dispensable(trace) if trace.cudnn is None else frozenset()
    return bool(workspaces) and any(event.storage in workspaces for event in trace.events)


def variants(trace: Trace) -> list[AllocationEvents]:
    """The events as they are; where workspaces are estimates, or in doubt, also without those and with twice as much
    (`DOUBLED`).
    """
    in_doubt = {trace.storages[index].doubt for index in dispensable(trace)} - {0}
    doubts = [0] if is_estimated(trace) else sorted(in_doubt)
    return [requests(trace), *(requests(trace, factor, doubt) for doubt in doubts for factor in (0, DOUBLED))]


def dispensable(trace: Trace) -> frozenset[int]:
    """The workspaces that a run can do without: most convolutions have another plan of cuDNN's that needs little."""
    storages = trace.storages
    return frozenset(index for index in places(storages, "role", {"workspace"}) if storages[index].op in CONVOLUTIONS)
