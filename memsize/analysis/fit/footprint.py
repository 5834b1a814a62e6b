"""The memory of one run of one size: whether it fits a capacity, and the least capacity that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

from memsize.device.allocator import Replay, replay
from memsize.device.config import SEGMENT_STEP, AllocatorConfig
from memsize.records.aggregates import alive
from memsize.records.fit import Alike, Bind
from memsize.records.roles import Role
from memsize.records.trace import TensorSpec, Trace


class Replays:
    """What an allocator makes of one list of events. Each replay is made once, for all runs that make these events."""

    def __init__(self, pairs: Sequence[tuple[int, int]], config: AllocatorConfig) -> None:
        self.pairs = pairs
        self.config = config
        self._bounded: dict[int, Replay] = {}

    @cached_property
    def requested(self) -> int:
        """The most bytes that tensors ask for at one moment."""
        return max(accumulate((delta for _, delta in self.pairs), initial=0))

    @cached_property
    def unbounded(self) -> Replay:
        """The replay on a GPU without end, where cached blocks are never given back."""
        return replay(self.pairs, self.config)

    def bounded(self, capacity: int) -> Replay:
        """The replay with `capacity` bytes to have: cached blocks are given back before it fails."""
        if capacity not in self._bounded:
            self._bounded[capacity] = replay(self.pairs, self.config, capacity=capacity)
        return self._bounded[capacity]


_VOCABULARY: Final = 1000
"""Classes from which on what the model returns is called logits."""
_LOOKS_AT_LACKS: Final = 6
"""How often what a replay lacked is followed before the rest is halved: several small lacks may add up."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """The run of one size (a batch, a length) and the settings of the allocator that serves it.

    `shared` are replays of the same events, where a run that makes them was replayed already.
    """

    size: int
    trace: Trace
    config: AllocatorConfig
    shared: Replays | None = None

    @cached_property
    def replays(self) -> Replays:
        """The allocator's part."""
        return self.shared or Replays(pairs_of(self.trace), self.config)

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """The events as the allocator takes them: a storage, and the bytes that it gains or loses."""
        return self.replays.pairs

    @cached_property
    def shape(self) -> int:
        """A number that runs share where they make the same events, apart from the bytes."""
        return hash(tuple(storage if delta > 0 else ~storage for storage, delta in self.pairs))

    @property
    def requested(self) -> int:
        """The most bytes that tensors ask for at one moment."""
        return self.replays.requested

    @property
    def unbounded(self) -> Replay:
        """The replay on a GPU without end, where cached blocks are never given back."""
        return self.replays.unbounded

    def bounded(self, capacity: int) -> Replay:
        """The replay with `capacity` bytes to have: cached blocks are given back before it fails."""
        return self.replays.bounded(capacity)

    def fits(self, capacity: int) -> bool:
        """Whether the run ends well with `capacity` bytes for the allocator."""
        return self.takes(capacity) is not None

    def takes(self, capacity: int) -> int | None:
        """The most that is reserved when there are `capacity` bytes; None where the run ends without memory."""
        if self.requested > capacity:
            return None
        if self.unbounded.reserved.bytes <= capacity:
            return self.unbounded.reserved.bytes
        if self.unbounded.allocated.bytes > capacity:
            return None
        replayed = self.bounded(capacity)
        return None if replayed.out_of_memory else replayed.reserved.bytes

    def needs(self, capacity: int | None = None) -> int:
        """The least capacity that the run ends well with, between its blocks' peak and its segments'.

        In steps of 2 MiB, the grain of segments. Where a replay runs out of memory it says how much it lacks: that is
        where to look next, and one step below what fits there. Else the rest is halved. A `capacity` that was looked at
        saves half of it.

        Known limit: where a run that ends well with some capacity fails with a little more, because its segments are
        split otherwise, the answer fits and a step less does not; there may be a lesser one.
        """
        high = self.unbounded.reserved.bytes
        low = (self.unbounded.allocated.bytes - 1) // SEGMENT_STEP * SEGMENT_STEP
        guesses = [low + SEGMENT_STEP]
        if capacity is not None:
            taken = self.takes(capacity)
            high, low = (high, max(low, capacity)) if taken is None else (min(high, taken), low)
            guesses += [self._lacks(capacity)] if taken is None else []
        for _ in range(_LOOKS_AT_LACKS):
            looked = next((guess for guess in reversed(guesses) if low < guess < high), None)
            if looked is None:
                break
            taken = self.takes(looked)
            high, low = (high, looked) if taken is None else (taken, low)
            guesses.append(self._lacks(looked) if taken is None else high - SEGMENT_STEP)
        while high - low > SEGMENT_STEP:
            middle = (low + (high - low) // 2) // SEGMENT_STEP * SEGMENT_STEP
            middle = middle if middle > low else high - SEGMENT_STEP
            taken = self.takes(middle)
            high, low = (high, middle) if taken is None else (taken, low)
        return high

    def _lacks(self, capacity: int) -> int:
        """What the request that fails with `capacity` would have needed, in whole steps; 0 where that isn't known."""
        if self.unbounded.allocated.bytes > capacity or (failure := self.bounded(capacity).out_of_memory) is None:
            return 0
        return -(-(failure.held.reserved + failure.segment) // SEGMENT_STEP) * SEGMENT_STEP


def pairs_of(trace: Trace) -> tuple[tuple[int, int], ...]:
    """The events of a trace as the allocator takes them."""
    return tuple((event.storage, event.delta) for event in trace.events)


def bind(run: Footprint, capacity: int | None) -> Bind:
    """What binds a run: where it runs out of `capacity`, or its peak where it doesn't or none is given."""
    failure = None if capacity is None else run.bounded(capacity).out_of_memory
    event = failure.event if failure else run.unbounded.requested.event
    trace = run.trace
    roles: dict[Role, int] = {}
    held = alive(trace, event)
    for storage, size in held.items():
        roles[trace.storages[storage].role] = roles.get(trace.storages[storage].role, 0) + size
    what = trace.events[event]
    most = max(roles, key=lambda role: roles[role])
    return Bind(
        phase=phase_name(trace.phases[what.phase]),
        layer=trace.layers[what.layer].path if what.layer >= 0 else "",
        op=what.op,
        role=most,
        request=failure.request if failure else 0,
        roles=dict(sorted(roles.items(), key=lambda item: -item[1])),
        largest=_most_alike(trace, held),
    )


def _most_alike(trace: Trace, held: Mapping[int, int]) -> Alike | None:
    """The tensors of one shape that hold most bytes; None where nothing is held."""
    found: dict[TensorSpec, Alike] = {}
    for index, size in held.items():
        storage = trace.storages[index]
        spec = TensorSpec(storage.dtype, storage.shape)
        seen = found.get(spec, Alike(0, spec, 0))
        found[spec] = Alike(seen.tensors + 1, spec, seen.bytes + size)
    most = max(found.values(), key=lambda alike: alike.bytes, default=None)
    return most and most._replace(logits=bool(most.spec.shape) and most.spec.shape[-1] in _vocabularies(trace))


def _vocabularies(trace: Trace) -> set[int]:
    """The last dimensions of what the model returns, as far as they are those of a vocabulary."""
    widths = {out.spec.shape[-1] for layer in trace.layers[:1] for out in layer.outputs if out.spec.shape}
    return {width for width in widths if width >= _VOCABULARY}


def phase_name(label: str) -> str:
    """A phase without its step: ``"backward 2"`` → ``"backward"``."""
    name, _, step = label.rpartition(" ")
    return name if name and step.isdecimal() else label
