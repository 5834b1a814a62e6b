"""The memory of one run at one size: whether it fits a capacity, and the smallest capacity that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator_config import SEGMENT_STEP, AllocatorConfig
from memsize.device.replay import Replay, replay
from memsize.records.fit import Alike, Bind
from memsize.records.roles import Role
from memsize.records.trace import TensorSpec, Trace

_VOCABULARY: Final = 1000
"""From this many classes on, what the model returns is called logits."""
_LOOKS_AT_LACKS: Final = 6
"""How often the shortfall of a replay is followed before the rest is bisected: several small ones may add up."""


Replays = dict[int | None, Replay]
"""The replays of one list of events, by the bytes that the allocator may have (None: as many as it asks for)."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """The run of one size (a batch, a length) and the settings of the allocator that serves it.

    `of` is its record, or what makes that anew each time, with `given`, the events of it: what is asked of a run is
    mostly in these. `replays` are those made so far, for all runs that make the same events.
    """

    size: int
    of: Trace | Callable[[], Trace]
    config: AllocatorConfig
    replays: Replays = field(default_factory=dict)
    given: AllocationEvents | None = None

    @property
    def trace(self) -> Trace:
        """Its record."""
        return self.of if isinstance(self.of, Trace) else self.of()

    @cached_property
    def flow(self) -> AllocationEvents:
        """The events as the allocator takes them."""
        return self.given or flow_of(self.trace)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The events one by one: a storage, and the bytes that it gains or loses."""
        return tuple(self.flow)

    @cached_property
    def shape(self) -> int:
        """A number that runs share where they make the same events, apart from the bytes."""
        import numpy as np

        storages = self.flow.storages
        return hash(np.where(self.flow.deltas > 0, storages, ~storages).tobytes())

    @cached_property
    def requested(self) -> int:
        """The most bytes that tensors ask for at one moment."""
        return max(int(self.flow.deltas.cumsum().max(initial=0)), 0)

    def live(self, event: int) -> int:
        """The bytes that tensors hold after an event."""
        return int(self.flow.deltas[: event + 1].sum())

    def most(self, phase: str) -> int | None:
        """The most bytes that tensors hold in a phase such as ``"optimizer 2"``; None where the run has no such one."""
        trace = self.trace
        label = trace.phases.index(phase) if phase in trace.phases else None
        live = zip(trace.events, self.flow.deltas.cumsum().tolist(), strict=True)
        return max((held for event, held in live if event.phase == label), default=None)

    @property
    def unbounded(self) -> Replay:
        """The replay on a GPU with unlimited memory, where cached blocks are never given back."""
        return self.bounded(None)

    def bounded(self, capacity: int | None) -> Replay:
        """The replay with `capacity` bytes available: cached blocks are given back before it fails."""
        if capacity not in self.replays:
            self.replays[capacity] = self._known(capacity) or self._replayed(capacity)
        return self.replays[capacity]

    def _known(self, capacity: int | None) -> Replay | None:
        """A replay with another capacity that is the same with this one."""
        if capacity is None or self.config.expandable_segments or self.config.memory_fraction < 1:
            return None
        return next((made for made in self.replays.values() if made.holds_with(capacity)), None)

    def _replayed(self, capacity: int | None) -> Replay:
        # A budget is what a fraction of the card leaves already.
        total = None if capacity is None else self.config.card_of(capacity)
        flow = self.flow
        return replay(flow, self.config, capacity=capacity, total=total, streams=flow.streams, emptied=flow.emptied)

    def fits(self, capacity: int) -> bool:
        """Whether the run ends well with `capacity` bytes for the allocator."""
        return self.takes(capacity) is not None

    def takes(self, capacity: int) -> int | None:
        """The most that is reserved with `capacity` bytes available; None where the run runs out of memory."""
        if self.requested > capacity:
            return None
        if self.unbounded.reserved.bytes <= capacity:
            return self.unbounded.reserved.bytes
        if self.unbounded.allocated.bytes > capacity:
            return None
        replayed = self.bounded(capacity)
        return None if replayed.out_of_memory else replayed.reserved.bytes

    def needs(self, capacity: int | None = None) -> int:
        """The smallest capacity with which the run completes, between its blocks' peak and its segments' peak.

        In steps of 2 MiB, the granularity of segments. A replay that runs out of memory says how much was missing: that
        is where to look next, and one step below what fits there. Otherwise the range is bisected. A `capacity` that
        was tried before narrows it.

        Known limit: where a run that completes with some capacity fails with a little more, because its segments are
        split differently, the answer fits and one step less does not, but an even smaller capacity may fit.
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
        """How much the request that fails with `capacity` was short of, in whole steps; 0 where that isn't known."""
        if self.unbounded.allocated.bytes > capacity or (failure := self.bounded(capacity).out_of_memory) is None:
            return 0
        return -(-(failure.levels.reserved + failure.segment) // SEGMENT_STEP) * SEGMENT_STEP


def bind(run: Footprint, capacity: int | None) -> Bind:
    """What limits a run: where it runs out of `capacity`, or its peak where it doesn't or none is given."""
    failure = None if capacity is None else run.bounded(capacity).out_of_memory
    event = failure.event if failure else run.unbounded.requested.event
    trace = run.trace
    roles: dict[Role, int] = {}
    held = run.flow.alive(event)
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
    """The last dimensions of the model's outputs that are large enough to be those of a vocabulary."""
    widths = {out.spec.shape[-1] for layer in trace.layers[:1] for out in layer.outputs if out.spec.shape}
    return {width for width in widths if width and width >= _VOCABULARY}


def phase_name(label: str) -> str:
    """A phase without its step: ``"backward 2"`` → ``"backward"``."""
    name, _, step = label.rpartition(" ")
    return name if name and step.isdecimal() else label
