"""The memory of one run at one size: whether it fits a capacity, and the smallest capacity that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator_config import SEGMENT_STEP, AllocatorConfig
from memsize.device.gpu_estimate import roles_of
from memsize.device.replay import Replay, replay
from memsize.records.columns import rows_at
from memsize.records.fit import Alike, Bind
from memsize.records.trace import TensorSpec, Trace

_VOCABULARY: Final = 1000
"""From this many classes on, what the model returns is called logits."""
_MOST_GUESSES: Final = 6
"""How many guesses are checked before the rest is bisected: several small shortfalls may add up."""


ReplaysByCapacity = dict[int | None, Replay]
"""The replays of one list of events, by the bytes that the allocator may have (None: as many as it asks for)."""


def replay_with_capacity(flow: AllocationEvents, config: AllocatorConfig, capacity: int | None) -> Replay:
    """Replay events with `capacity` bytes for the allocator, which is what a fraction of the card leaves already; None
    for as many as it asks for.
    """
    total = None if capacity is None else config.card_of(capacity)
    return replay(flow, config, capacity=capacity, total=total, streams=flow.streams, emptied=flow.emptied)


@dataclass(frozen=True, eq=False)
class Footprint:
    """The run of one size (a batch, a length) and the settings of the allocator that serves it.

    `source` is its trace, or a function that builds the trace anew each time; then `events` are its events, which
    answer most questions. `replays` are those made so far; runs that make the same events share them.
    """

    size: int
    source: Trace | Callable[[], Trace]
    config: AllocatorConfig
    replays: ReplaysByCapacity = field(default_factory=dict)
    events: AllocationEvents | None = None

    @property
    def trace(self) -> Trace:
        """The trace of the run."""
        return self.source if isinstance(self.source, Trace) else self.source()

    @cached_property
    def flow(self) -> AllocationEvents:
        """The events of the run as the allocator takes them."""
        return self.events or flow_of(self.trace)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The events one by one: storages, and the bytes that they gain or lose."""
        return tuple(self.flow)

    @cached_property
    def shape(self) -> int:
        """A hash of the events without their bytes: runs of one shape make the same events."""
        import numpy as np

        storages = self.flow.storages
        return hash(np.where(self.flow.deltas > 0, storages, ~storages).tobytes())

    @cached_property
    def requested(self) -> int:
        """The most bytes that tensors request at one moment."""
        return max(int(self.flow.deltas.cumsum().max(initial=0)), 0)

    def live(self, event: int) -> int:
        """Return the bytes of all tensors after an event."""
        return int(self.flow.deltas[: event + 1].sum())

    def most(self, phase: str) -> int | None:
        """Return the most bytes of tensors in a phase such as ``"optimizer 2"``; None if the run has no such phase."""
        trace = self.trace
        label = trace.phases.index(phase) if phase in trace.phases else None
        live = zip(trace.events, self.flow.deltas.cumsum().tolist(), strict=True)
        return max((size for event, size in live if event.phase == label), default=None)

    @property
    def unbounded(self) -> Replay:
        """The replay on a GPU with unlimited memory, where cached blocks are never given back."""
        return self.bounded(None)

    def bounded(self, capacity: int | None) -> Replay:
        """Replay with `capacity` bytes available: cached blocks are given back before it fails."""
        if capacity not in self.replays:
            equal = self._equal_replay(capacity)
            self.replays[capacity] = equal or replay_with_capacity(self.flow, self.config, capacity)
        return self.replays[capacity]

    def _equal_replay(self, capacity: int | None) -> Replay | None:
        """Return a replay with another capacity that is the same with this one."""
        if capacity is None or self.config.expandable_segments or self.config.memory_fraction < 1:
            return None
        return next((replay for replay in self.replays.values() if replay.holds_with(capacity)), None)

    def fits(self, capacity: int) -> bool:
        """Whether the run ends well with `capacity` bytes for the allocator."""
        return self.reserved_within(capacity) is not None

    def reserved_within(self, capacity: int) -> int | None:
        """Return the most bytes reserved with `capacity` bytes available; None where the run runs out of memory."""
        if self.requested > capacity:
            return None
        if self.unbounded.reserved.bytes <= capacity:
            return self.unbounded.reserved.bytes
        if self.unbounded.allocated.bytes > capacity:
            return None
        replayed = self.bounded(capacity)
        return None if replayed.out_of_memory else replayed.reserved.bytes

    def needs(self, capacity: int | None = None) -> int:
        """Find the smallest capacity with which the run completes: at least its blocks' peak, at most its segments'.

        In steps of 2 MiB, the granularity of segments. A replay that runs out of memory says how much was missing: that
        gives the next guess, and a replay that completes gives one step less. Then the rest is bisected. A `capacity`
        that was tried before narrows the range.

        Known limit: where a run that completes with some capacity fails with a little more, because its segments are
        split differently, the answer fits and one step less does not, but an even smaller capacity may fit.
        """
        high = self.unbounded.reserved.bytes
        low = (self.unbounded.allocated.bytes - 1) // SEGMENT_STEP * SEGMENT_STEP
        guesses = [low + SEGMENT_STEP]
        if capacity is not None:
            reserved = self.reserved_within(capacity)
            high, low = (high, max(low, capacity)) if reserved is None else (min(high, reserved), low)
            guesses += [self._enough_for_failure(capacity)] if reserved is None else []
        for _ in range(_MOST_GUESSES):
            guess = next((guess for guess in reversed(guesses) if low < guess < high), None)
            if guess is None:
                break
            reserved = self.reserved_within(guess)
            high, low = (high, guess) if reserved is None else (reserved, low)
            guesses.append(self._enough_for_failure(guess) if reserved is None else high - SEGMENT_STEP)
        return self._bisect(low, high)

    def _bisect(self, low: int, high: int) -> int:
        """Find the smallest sufficient capacity above `low`, which is not enough, up to `high`, which is."""
        while high - low > SEGMENT_STEP:
            middle = (low + (high - low) // 2) // SEGMENT_STEP * SEGMENT_STEP
            middle = middle if middle > low else high - SEGMENT_STEP
            reserved = self.reserved_within(middle)
            high, low = (high, middle) if reserved is None else (reserved, low)
        return high

    def _enough_for_failure(self, capacity: int) -> int:
        """Return the capacity with which the request that fails with `capacity` would succeed; 0 where unknown."""
        if self.unbounded.allocated.bytes > capacity or (failure := self.bounded(capacity).out_of_memory) is None:
            return 0
        return -(-(failure.levels.reserved + failure.segment) // SEGMENT_STEP) * SEGMENT_STEP


def limit_of(run: Footprint, capacity: int | None) -> Bind:
    """Describe what limits a run: the request that fails with `capacity`, else the peak of its tensors."""
    failure = None if capacity is None else run.bounded(capacity).out_of_memory
    number = failure.event if failure else run.unbounded.requested.event
    trace = run.trace
    alive = run.flow.alive(number)
    roles = roles_of(trace, alive)
    event = trace.events[number]
    return Bind(
        phase=phase_name(trace.phases[event.phase]),
        layer=trace.layers[event.layer].path if event.layer >= 0 else "",
        op=event.op,
        role=next(iter(roles)),
        request=failure.request if failure else 0,
        roles=roles,
        largest=_largest_group(trace, alive),
    )


def _largest_group(trace: Trace, alive: Mapping[int, int]) -> Alike | None:
    """Return the tensors of one shape and dtype with most bytes; None where nothing is `alive`."""
    groups: dict[TensorSpec, Alike] = {}
    for storage, size in zip(rows_at(trace.storages, alive), alive.values(), strict=True):
        spec = TensorSpec(storage.dtype, storage.shape)
        group = groups.get(spec, Alike(0, spec, 0))
        groups[spec] = Alike(group.tensors + 1, spec, group.bytes + size)
    most = max(groups.values(), key=lambda group: group.bytes, default=None)
    widths = {out.spec.shape[-1] for layer in trace.layers[:1] for out in layer.outputs if out.spec.shape}
    vocabularies = {width for width in widths if width and width >= _VOCABULARY}
    return most and most._replace(logits=bool(most.spec.shape) and most.spec.shape[-1] in vocabularies)


def phase_name(label: str) -> str:
    """Drop the step from a phase: ``"backward 2"`` → ``"backward"``."""
    name, _, step = label.rpartition(" ")
    return name if name and step.isdecimal() else label
