"""Buckets of `DistributedDataParallel` in the run of a deep model, from one in which each tensor has its own.

A bucket is filled up to a size and ends anywhere in a block, so that the buckets of two depths are not alike. Short
models are run with a bucket for each tensor, which does repeat; those of the deep model are then joined from them, as
PyTorch's own function assigns them. Source: PyTorch's torch/nn/parallel/distributed.py and, in
torch/csrc/distributed/c10d, reducer.cpp (rebuild_buckets, sync_bucket_indices) and comm.cpp (broadcast_coalesced).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch

from memsize.depth.trace_extension import NotRepeatedError
from memsize.records.trace import DeferredFree, Event, Storage, Trace
from memsize.records.world import Collective

_CHUNK: Final = 250 << 20
"""Bytes of parameters and buffers that are sent together when a model is wrapped."""
_IN_FLIGHT: Final = 2
"""How many such chunks are sent at a time."""
_LIMITS: Final = [1 << 20, 25 << 20]
"""Bytes that close the first bucket, and each of the others."""
_INDICES: Final = "int32"
"""The dtype of the buckets' indices, on which the processes agree before the buckets are made anew."""
_REDUCTION: Final = "allreduce_"
_COPY: Final = "mul"
"""The op that copies a gradient to its bucket, divided by the number of processes (mark_variable_ready_dense)."""

Bucket = Sequence[int]
"""The positions of its tensors among all that have buckets."""


class _Communication:
    """The storages of a run that `DistributedDataParallel` communicates with, each kind in order of appearance."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events: dict[int, list[int]] = {}
        """The positions of the events of each."""
        roles = [storage.role for storage in trace.storages]
        for position, event in enumerate(trace.events):
            if roles[event.storage] == "communication":
                self.events.setdefault(event.storage, []).append(position)
        self.chunks: list[int] = []
        self.first: list[int] = []
        self.rebuilt: list[int] = []
        self.indices: list[int] = []
        for storage, positions in list(self.events.items()):
            event = trace.events[positions[0]]
            if trace.phases[event.phase] == "setup":
                kind = self.chunks if event.op == "cat" else self.first
            elif event.op == "empty":
                kind = self.indices if trace.storages[storage].dtype == _INDICES else self.rebuilt
            else:  # buffers that are sent before a forward
                del self.events[storage]
                continue
            kind.append(storage)

    @property
    def of_indices(self) -> list[int]:
        return sorted(position for storage in self.indices for position in self.events[storage])

    def event(self, storage: int, number: int) -> Event:
        """One of a storage's events; -1 is the last."""
        return self.trace.events[self.events[storage][number]]

    def sent(self) -> list[Collective]:
        events = {position + 1 for position in self.of_indices}
        return [one for one in self.trace.collectives if one.kind == "broadcast" and one.event in events]


def without_indices(trace: Trace) -> Trace:
    """Return a run without the buckets' indices, whose sizes grow with the number of parameters."""
    communication = _Communication(trace)
    storages, events = set(communication.indices), set(communication.of_indices)
    numbers = list(accumulate((index not in storages for index in range(len(trace.storages))), initial=0))
    positions = list(accumulate((position not in events for position in range(len(trace.events))), initial=0))
    sent = communication.sent()
    return replace(
        trace,
        storages=tuple(row for index, row in enumerate(trace.storages) if index not in storages),
        events=tuple(
            event._replace(storage=numbers[event.storage])
            for position, event in enumerate(trace.events)
            if position not in events
        ),
        collectives=tuple(one._replace(event=positions[one.event]) for one in trace.collectives if one not in sent),
        **_moved(trace, positions),
    )


def joined(apart: Trace, like: Trace) -> Trace:
    """Return the run that `apart` is with PyTorch's buckets in place of one for each tensor. `like` is a run of any
    depth with such buckets, in which each kind of row is seen.

    Raises `NotRepeatedError` where buckets are not made and sent in the usual way.
    """
    return _Joining(apart, like).trace()


def _moved(trace: Trace, positions: Sequence[int]) -> dict[str, Any]:
    """The parts of a trace that refer to events, whose new positions are given."""
    deferred = (
        DeferredFree(positions[block.event], positions[block.until] if block.until >= 0 else block.until)
        for block in trace.deferred
    )
    return {"deferred": tuple(deferred), "emptied": tuple(positions[event] for event in trace.emptied)}


class _Joining:
    """The rows of the joined run as they are written."""

    def __init__(self, apart: Trace, like: Trace) -> None:
        self.apart = apart
        self.single, self.template = _Communication(apart), _Communication(like)
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.collectives: list[Collective] = []
        first, rebuilt = self.single.first, self.single.rebuilt
        if not first or len(first) != len(rebuilt) or len(self.template.indices) != 2 or not self.template.sent():
            raise NotRepeatedError("buckets are not made in the usual way")
        last = len(first) - 1  # parameters fill buckets from the last to the first
        self.first: list[Bucket] = [
            [last - at for at in bucket] for bucket in reversed(self._assigned(first[::-1], [sys.maxsize]))
        ]
        self.rebuilt = self._assigned(rebuilt, _LIMITS, list(range(len(rebuilt))))

    def _assigned(self, storages: Sequence[int], limits: list[int], order: Sequence[int] = ()) -> list[Bucket]:
        """Assign tensors to buckets, which come in the order of their first tensors, or as they are filled."""
        rows = [self.apart.storages[storage] for storage in storages]
        tensors = [torch.empty(row.shape, dtype=getattr(torch, row.dtype), device="meta") for row in rows]
        assign: Any = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        buckets: list[Bucket] = assign(tensors, limits, [False] * len(tensors), list(order))[0]
        return buckets

    def trace(self) -> Trace:
        apart, single = self.apart, self.single
        first, rebuilt = single.first[0], single.rebuilt[0]
        self._send_chunks()
        numbers = self._number_storages()
        positions: list[int] = []
        reductions = self._reductions()
        reduced = {one.event for one in reductions}
        of_one = {one.event for one in apart.collectives if one.kind == "all-reduce"}
        copied = False  # since the last tensor's reduction, which is none of a bucket
        for position, event in enumerate(apart.events):
            positions.append(len(self.events))
            storage = event.storage
            if position in of_one:
                copied = position not in reduced
            if copied and event.op == _REDUCTION:
                event = event._replace(op=_COPY)
            if storage == first and event.delta < 0:
                self._agree_on_indices(numbers[rebuilt].start)
            if storage in (first, rebuilt) or storage not in single.events:
                for number in numbers[storage]:
                    size = self.storages[number].bytes
                    delta = event.delta if storage not in single.events else size if event.delta > 0 else -size
                    self.events.append(event._replace(storage=number, delta=delta))
        positions.append(len(self.events))
        others = [one for one in apart.collectives[len(single.chunks) :] if one.kind != "all-reduce"]
        self.collectives += [one._replace(event=positions[one.event]) for one in (*reductions, *others)]
        return replace(
            apart,
            storages=tuple(self.storages),
            events=tuple(self.events),
            collectives=tuple(sorted(self.collectives, key=lambda one: one.event)),
            **_moved(apart, positions),
        )

    def _number_storages(self) -> dict[int, range]:
        """Add all storages but the chunks; return their new numbers, those of buckets by their first tensor's own."""
        numbers: dict[int, range] = {}
        buckets = {
            self.single.first[0]: (self.single.first, self.first),
            self.single.rebuilt[0]: (self.single.rebuilt, self.rebuilt),
        }
        for storage, row in enumerate(self.apart.storages):
            if storage == self.single.rebuilt[0]:
                self.storages += self._indices()
            start = len(self.storages)
            if storage in buckets:
                of, assigned = buckets[storage]
                rows = ([self.apart.storages[of[at]] for at in bucket] for bucket in assigned)
                self.storages += [_together(of_bucket, of_bucket[0]) for of_bucket in rows]
            elif storage not in self.single.events:
                self.storages.append(row)
            numbers[storage] = range(start, len(self.storages))
        return numbers

    def _send_chunks(self) -> None:
        """Send parameters and buffers to the other processes. Several tensors are copied into one, which is freed once
        it was received: before the next chunk but one is sent.
        """
        template, chunks = self.template, self.single.chunks
        in_flight: deque[int | None] = deque()

        def receive() -> None:
            if (number := in_flight.popleft()) is not None:
                event = template.event(template.chunks[0], -1)
                self.events.append(event._replace(storage=number, delta=-self.storages[number].bytes))

        for chunk in self._assigned(chunks, [_CHUNK]):
            if len(in_flight) == _IN_FLIGHT:
                receive()
            rows = [self.apart.storages[chunks[at]] for at in chunk]
            size = sum(row.bytes for row in rows)
            if len(rows) == 1:
                in_flight.append(None)
            elif template.chunks:
                shown = template.chunks[0]
                in_flight.append(len(self.storages))
                self.storages.append(_together(rows, template.trace.storages[shown]))
                event = template.event(shown, 0)
                self.events.append(event._replace(storage=len(self.storages) - 1, delta=size))
            else:
                raise NotRepeatedError("the tensors of a short model are not sent together")
            sent = template.trace.collectives[0]
            self.collectives.append(sent._replace(bytes=size, event=len(self.events)))
        while in_flight:
            receive()

    def _indices(self) -> list[Storage]:
        """The numbers of all parameters and of buckets, with the number of these, and then their sizes."""
        counts = len(self.single.first) + 1, len(self.rebuilt)
        rows = (self.template.trace.storages[storage] for storage in self.template.indices)
        return [row._replace(bytes=4 * count, shape=(count,)) for row, count in zip(rows, counts, strict=True)]

    def _agree_on_indices(self, end: int) -> None:
        """Send the indices, whose storages are the last before `end`."""
        template, start, positions = self.template, len(self.events), self.template.of_indices
        numbers = dict(zip(template.indices, range(end - len(template.indices), end), strict=True))
        for position in positions:
            event = template.trace.events[position]
            number = numbers[event.storage]
            size = self.storages[number].bytes
            self.events.append(event._replace(storage=number, delta=size if event.delta > 0 else -size))
        for one, number in zip(template.sent(), numbers.values(), strict=True):
            size = self.storages[number].bytes
            self.collectives.append(one._replace(bytes=size, event=start + one.event - positions[0]))

    def _reductions(self) -> list[Collective]:
        """Return the reductions of buckets: of each as soon as the gradients of all its tensors and of those before it
        are complete.
        """
        count, reductions = len(self.single.first), []
        single = [one for one in self.apart.collectives if one.kind == "all-reduce"]
        for start in range(0, len(single), count):
            complete, last = single[start : start + count], 0
            if len(complete) < count:
                raise NotRepeatedError("not all gradients are reduced in each backward")
            for bucket in self.rebuilt if start else self.first:
                last = max(last, *bucket)
                reductions.append(complete[last]._replace(bytes=sum(complete[at].bytes for at in bucket)))
        return reductions


def _together(rows: Sequence[Storage], like: Storage) -> Storage:
    """A row for the contents of several, which looks like another."""
    count = sum(row.shape[0] for row in rows)
    return like._replace(bytes=sum(row.bytes for row in rows), dtype=rows[0].dtype, shape=(count,))
