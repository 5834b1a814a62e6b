"""Synchronization of CUDA streams: work the host has waited for, and freed blocks that other streams may still use.

A block that `record_stream` handed to other streams is reused once these have done what was queued when it was freed.
When a GPU gets there is not known, only by when it must have: where the program waits for it, or has launched so much
more that the launch itself waits. The work of each stream is numbered, and streams wait for each other up to such a
number, as by a vector clock.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (recordStream, free, insert_events, process_events).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

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
AHEAD: Final = 1024
"""How many launches a stream queues; the next waits for the first of them. "About 1,000 kernels" for each stream, as
measured in https://forums.developer.nvidia.com/t/68937 and https://stackoverflow.com/q/53970187."""
Queue = tuple[int, int]
"""A stream of a GPU: the numbers of both."""
Moment = Counter[Queue]
"""How far the work in each queue is done at some point of another; none of it where a queue is missing."""


class StreamOrder:
    """The streams of a run, what each waits for, and the blocks that were freed while other streams might use them."""

    def __init__(self, now: Callable[[], int] = lambda: 0) -> None:
        self.numbers: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.cycle(range(1, _STREAMS + 1)))
        """The numbers of new streams: each GPU has a pool of them, handed out in turn."""
        self._now = now
        """How many events there are."""
        self.used: dict[int, set[Queue]] = {}
        """The streams that each live storage was handed to."""
        self.hands_over = False
        """Whether any storage was: before, nobody needs to count launches."""
        self._queues: defaultdict[Queue, Counter[Queue]] = defaultdict(Counter)
        """For each stream, the moment at which all that is queued on it is done."""
        self._waits: defaultdict[Queue, deque[tuple[int, Moment]]] = defaultdict(deque)
        """What each stream waits for that is not known to be done, after how many launches."""
        self._done = Counter[Queue]()
        self.waiting: dict[int, int] = {}
        """The events that freed blocks which may not be free yet, each with the number of streams that it waits for."""
        self._freed: defaultdict[Queue, deque[tuple[int, int]]] = defaultdict(deque)
        """Those that wait for each stream, after its work of which number."""
        self._until: dict[int, int] = {}

    def use(self, storage: int, queue: Queue) -> None:
        """`record_stream` handed a storage to a stream, whose work uses it."""
        self.hands_over = True
        self.used.setdefault(storage, set()).add(queue)
        self._queues[queue][queue] += 1

    def launch(self, queue: Queue) -> None:
        """Queue a kernel on a stream, which waits until there is room for it."""
        number = self._queues[queue][queue] = self._queues[queue][queue] + 1
        if number > AHEAD:
            waits, done = self._waits[queue], Counter({queue: number - AHEAD})
            while waits and waits[0][0] < number - AHEAD:
                done |= waits.popleft()[1]
            self.synchronize(done)

    def free(self, storage: int, own: Queue) -> None:
        """The next event frees a storage whose memory is of stream `own`."""
        event = self._now()
        for queue in self.used.pop(storage, set()) - {own}:
            number = self._queues[queue][queue]
            if number > self._done[queue]:
                self._freed[queue].append((number, event))
                self.waiting[event] = self.waiting.get(event, 0) + 1

    def moment(self, queue: Queue) -> Moment:
        """The moment at which what is queued on a stream by now is done."""
        return self._queues[queue].copy()

    def wait(self, queue: Queue, moment: Moment) -> None:
        """Let work that is queued on a stream from now on begin after `moment`."""
        self._queues[queue] |= moment
        if self.hands_over:
            self._waits[queue].append((self._queues[queue][queue], moment))

    def synchronize(self, moment: Moment) -> None:
        """Let the program wait, before the next event, until `moment` has come."""
        for queue, number in moment.items():
            if number > self._done[queue]:
                self._done[queue] = number
                freed = self._freed[queue]
                while freed and freed[0][0] <= number:
                    self._let_go(freed.popleft()[1])

    def _let_go(self, event: int) -> None:
        self.waiting[event] -= 1
        if not self.waiting[event]:
            del self.waiting[event]
            self._until[event] = self._now()

    def synchronize_all(self) -> None:
        """Let the program wait, before the next event, for all that is queued."""
        for work in tuple(self._queues.values()):
            self.synchronize(work)

    def deferred(self, events: int) -> tuple[DeferredFree, ...]:
        """Return the frees among the first `events` events whose blocks other streams may still use, in order."""
        freed = sorted((self._until | dict.fromkeys(self.waiting, -1)).items())
        return tuple(DeferredFree(*block) for block in freed if block[0] < events)


def host_waits(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the program waits for the stream of an op: it reads a number, or copies between CPU and GPU at once."""
    if func is _aten._to_copy.default:
        device = kwargs.get("device")
        crosses = device is not None and (device.type == "cpu") != devices().is_on_host(args[0])
        return crosses and not kwargs.get("non_blocking")
    if func is _aten.copy_.default:
        crosses = devices().is_on_host(args[0]) != devices().is_on_host(args[1])
        return crosses and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return func in _READS and not devices().is_on_host(args[0])
