"""Synchronization of CUDA streams: work the host has waited for, and freed blocks that other streams may still use.

A block that `record_stream` handed to other streams is reused once these have done what was queued when it was freed.
When a GPU gets there is not known, only by when it must have: where the program waits for it. Each such block is
numbered in the queues of its streams, and streams wait for each other up to such a number, as by a vector clock.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (recordStream, free, insert_events, process_events).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from memsize.records.trace import DeferredFree
from memsize.virtual.device_assignment import devices

_aten = torch.ops.aten
_READS = frozenset(
    (
        _aten._local_scalar_dense.default,
        _aten.equal.default,
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_consecutive.default,
    )
)
"""Ops that return, or make as much as says, a number that the GPU computes."""

_STREAMS: Final = 32
"""How many streams a process really has beside the default one (c10/cuda/CUDAStream.cpp)."""
Queue = tuple[int, int]
"""A stream of a GPU: the numbers of both."""
Moment = Mapping[Queue, int]
"""How far the work in each queue is done at some point of another; none of it where a queue is missing."""


class _Waiting(NamedTuple):
    """A block that was freed at `event`, and the moment at which it can be reused."""

    event: int
    moment: Moment


class StreamOrder:
    """The streams of a run, what each waits for, and the blocks that were freed while other streams might use them."""

    def __init__(self, now: Callable[[], int] = lambda: 0) -> None:
        self.numbers: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.cycle(range(1, _STREAMS + 1)))
        """The numbers of new streams: each GPU has a pool of them, handed out in turn."""
        self._now = now
        """How many events there are."""
        self.used: dict[int, set[Queue]] = {}
        """The streams that each live storage was handed to."""
        self._queues: defaultdict[Queue, dict[Queue, int]] = defaultdict(dict)
        """For each stream, the moment at which all that is queued on it is done."""
        self._done: dict[Queue, int] = {}
        self.waiting: list[_Waiting] = []
        """Blocks that may not be free yet."""
        self._until: dict[int, int] = {}

    def use(self, storage: int, queue: Queue) -> None:
        """`record_stream` handed a storage to a stream."""
        self.used.setdefault(storage, set()).add(queue)

    def free(self, storage: int, own: Queue) -> None:
        """The next event frees a storage whose memory is of stream `own`."""
        moment = {queue: self._queue_up(queue) for queue in self.used.pop(storage, set()) - {own}}
        if moment:
            self.waiting.append(_Waiting(self._now(), moment))

    def _queue_up(self, queue: Queue) -> int:
        work = self._queues[queue]
        work[queue] = work.get(queue, 0) + 1
        return work[queue]

    def moment(self, queue: Queue) -> Moment:
        """The moment at which what is queued on a stream by now is done."""
        return dict(self._queues[queue])

    def wait(self, queue: Queue, moment: Moment) -> None:
        """Let work that is queued on a stream from now on begin after `moment`."""
        _advance(self._queues[queue], moment)

    def synchronize(self, moment: Moment) -> None:
        """Before the next event, the program waits until `moment` has come."""
        _advance(self._done, moment)
        waiting, self.waiting = self.waiting, []
        for block in waiting:
            if all(self._done.get(queue, 0) >= number for queue, number in block.moment.items()):
                self._until[block.event] = self._now()
            else:
                self.waiting.append(block)

    def synchronize_all(self) -> None:
        """Before the next event, the program waits for all that is queued."""
        for work in tuple(self._queues.values()):
            self.synchronize(work)

    def deferred(self, events: int) -> tuple[DeferredFree, ...]:
        """Return the frees among the first `events` events whose blocks other streams may still use, in order."""
        freed = sorted({**self._until, **{block.event: -1 for block in self.waiting}}.items())
        return tuple(DeferredFree(*block) for block in freed if block[0] < events)


def _advance(moments: dict[Queue, int], moment: Moment) -> None:
    for queue, number in moment.items():
        moments[queue] = max(moments.get(queue, 0), number)


def host_waits(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the program waits for the stream of an op: it reads a number, or copies between CPU and GPU and is not
    told to go on meanwhile.
    """
    if func is _aten._to_copy.default:
        device = kwargs.get("device")
        crosses = device is not None and (device.type == "cpu") != devices().is_on_host(args[0])
        return crosses and not kwargs.get("non_blocking")
    if func is _aten.copy_.default:
        crosses = devices().is_on_host(args[0]) != devices().is_on_host(args[1])
        return crosses and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return func in _READS and not devices().is_on_host(args[0])
