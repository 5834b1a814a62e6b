"""The memory of one run at one size: whether it fits a capacity, and the smallest capacity that it needs; and the
memory forecast for sizes that were not run, from up to three runs of other sizes.

Runs of different sizes usually make the same events with other numbers of bytes. A forecast extends each event along
the line, or the parabola, through the available runs, and replays the whole like a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Final

from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator_config import SEGMENT_STEP, AllocatorConfig
from memsize.device.gpu_estimate import roles_of
from memsize.device.replay import Prefixes, Replay, replay
from memsize.errors import InputError
from memsize.records.aggregates import attention_scores, split_phase, totals
from memsize.records.columns import rows_at
from memsize.records.fit import Alike, Bind
from memsize.records.roles import FIXED
from memsize.records.trace import Storage, TensorSpec, Trace

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int], np.dtype[np.float64]]


# -- runs --------------------------------------------------------------------------------------------------------------

_VOCABULARY: Final = 1000
"""From this many classes on, what the model returns is called logits."""
_ENDLESS: Final = 1 << 62
_MOST_GUESSES: Final = 6
"""How many guesses are checked before the rest is bisected: several small shortfalls may add up."""

ReplaysByCapacity = dict[int | None, Replay]
"""The replays of one list of events, by the bytes that the allocator may have (None: as many as it asks for)."""
SharedReplays = dict[tuple[object, AllocatorConfig], ReplaysByCapacity]
"""The replays of several runs, by the digest of their events and the settings of the allocator."""


def replay_with_capacity(
    flow: AllocationEvents, config: AllocatorConfig, capacity: int | None, prefixes: Prefixes | None = None
) -> Replay:
    """Replay events with `capacity` bytes for the allocator, which is what a fraction of the card leaves already; None
    for as many as it asks for. `prefixes` are those of other capacities.
    """
    total = None if capacity is None else config.card_of(capacity)
    streams, emptied = flow.streams, flow.emptied
    return replay(flow, config, capacity=capacity, total=total, streams=streams, emptied=emptied, prefixes=prefixes)


@dataclass(frozen=True, eq=False)
class Footprint:
    """The run of one size (a batch, a length) and the settings of the allocator that serves it.

    `source` is its trace, or a function that builds the trace anew each time; then `events` are its events, which
    answer most questions. Runs that make the same events find their replays in `shared`: float16 and bfloat16 often do.
    """

    size: int
    source: Trace | Callable[[], Trace]
    config: AllocatorConfig
    events: AllocationEvents | None = None
    shared: SharedReplays = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        return self.source if isinstance(self.source, Trace) else self.source()

    @cached_property
    def flow(self) -> AllocationEvents:
        """The events of the run as the allocator takes them."""
        return self.events or flow_of(self.trace)

    @cached_property
    def replays(self) -> ReplaysByCapacity:
        return self.shared.setdefault((self.flow.digest, self.config), {})

    @cached_property
    def shape(self) -> int:
        """A hash of the events without their bytes: runs of one shape make the same events."""
        import numpy as np

        storages = self.flow.storages
        return hash(np.where(self.flow.deltas > 0, storages, ~storages).tobytes())

    @cached_property
    def requested(self) -> int:
        """The most bytes that tensors request at one moment."""
        return max(self.live(self.peak), 0)

    @cached_property
    def peak(self) -> int:
        """The first event after which tensors request the most bytes; -1 where there is none."""
        return int(self.flow.deltas.cumsum().argmax()) if len(self.flow) else -1

    def live(self, event: int) -> int:
        """Return the bytes of all tensors after an event."""
        return int(self.flow.deltas[: event + 1].sum())

    def most(self, phase: str) -> int | None:
        """Return the most bytes of tensors in a phase such as ``"optimizer 2"``; None if the run has no such phase."""
        trace = self.trace
        label = trace.phases.index(phase) if phase in trace.phases else None
        live = zip(trace.events, self.flow.deltas.cumsum().tolist(), strict=True)
        return max((size for event, size in live if event.phase == label), default=None)

    @cached_property
    def _prefixes(self) -> Prefixes:
        return Prefixes(self.requested)

    @property
    def unbounded(self) -> Replay:
        """The replay on a GPU with unlimited memory, where cached blocks are never given back."""
        return self.bounded(None)

    def bounded(self, capacity: int | None) -> Replay:
        """Replay with `capacity` bytes available: cached blocks are given back before it fails."""
        if capacity not in self.replays:
            equal = None
            if not self.config.depends_on_card:
                equal = next((replay for replay in self.replays.values() if replay.holds_with(capacity)), None)
            self.replays[capacity] = equal or replay_with_capacity(self.flow, self.config, capacity, self._prefixes)
        return self.replays[capacity]

    @property
    def last_change(self) -> int | None:
        """The last event at which a replay so far got memory from CUDA or gave some back; None without replays."""
        return max((replay.last_change for replay in self.replays.values()), default=None)

    def fits(self, capacity: int) -> bool:
        """Whether the run ends well with `capacity` bytes for the allocator."""
        return self.reserved_within(capacity) is not None

    def reserved_within(self, capacity: int) -> int | None:
        """Return the most bytes reserved with `capacity` bytes available; None where the run runs out of memory."""
        if self.requested > capacity:
            return None
        if None in self.replays or self.config.depends_on_card:
            if self.unbounded.reserved.bytes <= capacity:
                return self.unbounded.reserved.bytes
            if self.unbounded.allocated.bytes > capacity:
                return None
        replayed = self.bounded(capacity)
        return None if replayed.out_of_memory else replayed.reserved.bytes

    def needs(self, capacity: int | None = None) -> int:
        """Find the smallest capacity with which the run completes: at least its tensors' peak, at most its segments'.

        In steps of 2 MiB, the granularity of segments. A replay that runs out of memory says how much was missing: that
        gives the next guess, and a replay that completes gives one step less. Then the rest is bisected. A `capacity`
        that was tried before narrows the range.

        Known limit: where a run that completes with some capacity fails with a little more, because its segments are
        split differently, the answer fits and one step less does not, but an even smaller capacity may fit.
        """
        low, high = (self.requested - 1) // SEGMENT_STEP * SEGMENT_STEP, _ENDLESS
        guesses = [low + SEGMENT_STEP]
        if capacity is not None:
            reserved = self.reserved_within(capacity)
            high, low = (high, max(low, capacity)) if reserved is None else (reserved, low)
            guesses += [self._enough_for_failure(capacity)] if reserved is None else []
        for _ in range(_MOST_GUESSES):
            guess = next((guess for guess in reversed(guesses) if low < guess < high), None)
            if guess is None:
                break
            reserved = self.reserved_within(guess)
            high, low = (high, guess) if reserved is None else (reserved, low)
            guesses.append(self._enough_for_failure(guess) if reserved is None else high - SEGMENT_STEP)
        if high == _ENDLESS:
            high = self.unbounded.reserved.bytes
        while high - low > SEGMENT_STEP:
            middle = (low + (high - low) // 2) // SEGMENT_STEP * SEGMENT_STEP
            middle = middle if middle > low else high - SEGMENT_STEP
            reserved = self.reserved_within(middle)
            high, low = (high, middle) if reserved is None else (reserved, low)
        return high

    def _enough_for_failure(self, capacity: int) -> int:
        """Return the capacity with which the request that fails with `capacity` would succeed; 0 where unknown."""
        if self.requested > capacity or (failure := self.bounded(capacity).out_of_memory) is None:
            return 0
        return -(-(failure.levels.reserved + failure.segment) // SEGMENT_STEP) * SEGMENT_STEP


def limit_of(run: Footprint, capacity: int | None) -> Bind:
    """Describe what limits a run: the request that fails with `capacity`, else the peak of its tensors."""
    failure = None if capacity is None else run.bounded(capacity).out_of_memory
    number = failure.event if failure else run.peak
    trace = run.trace
    alive = run.flow.alive(number)
    roles = roles_of(trace, alive)
    event = trace.events[number]
    groups: dict[TensorSpec, Alike] = {}
    for storage, size in zip(rows_at(trace.storages, alive), alive.values(), strict=True):
        spec = TensorSpec(storage.dtype, storage.shape)
        group = groups.get(spec, Alike(0, spec, 0))
        groups[spec] = Alike(group.tensors + 1, spec, group.bytes + size)
    most = max(groups.values(), key=lambda group: group.bytes, default=None)
    # An image ends with its width.
    widths = {out.spec.shape[-1] for layer in trace.layers[:1] for out in layer.outputs if 0 < len(out.spec.shape) < 4}
    vocabularies = {width for width in widths if width and width >= _VOCABULARY}
    scores, score_dtypes = attention_scores(trace, lambda number, _: number in alive)
    return Bind(
        phase=split_phase(trace.phases[event.phase])[0],
        layer=trace.layers[event.layer].path if event.layer >= 0 else "",
        op=event.op,
        role=next(iter(roles)),
        request=failure.request if failure else 0,
        roles=roles,
        largest=most and most._replace(logits=bool(most.spec.shape) and most.spec.shape[-1] in vocabularies),
        frozen=totals(trace).frozen,
        scores=scores,
        score_dtypes=score_dtypes,
    )


# -- forecasts ---------------------------------------------------------------------------------------------------------

_MOST_EVENTS: Final = 50_000
"""How many events may be replayed to check every size: about a tenth of a second's worth."""
_MOST_REPLAYS: Final = 8
"""How many sizes are replayed otherwise, below the limit of the tensors alone, and beyond the edge: fewer for runs of
so many events that these exceed `_MOST_EVENTS`.
"""


class Forecast:
    """The events of other sizes, from one to three runs that made the same events."""

    def __init__(self, runs: Sequence[Footprint], *, powers: bool = False) -> None:
        import numpy as np

        self.runs = tuple(sorted(runs, key=lambda run: run.size))
        self._flow = runs[0].flow
        self._signs = np.sign(self._flow.deltas.astype(np.float64))
        self._amounts = [np.abs(run.flow.deltas.astype(np.float64)) for run in self.runs]
        self._exponents = _exponents(runs[0], powers) if len(runs) == 1 else None
        changes = [change for run in runs if (change := run.last_change) is not None]
        decisive = 2 * max(changes) + 1 if changes else len(self._flow)
        self._decisive = decisive if decisive < len(self._flow) else None
        """How many events decide whether a size fits. Where memory stopped growing early in all runs, as it does in a
        generation after the prompt, other sizes are replayed twice as far: a run that is short of memory later shows
        it itself. None for all events.
        """

    def flow(self, size: int) -> AllocationEvents:
        """Return the events of `size` as the allocator takes them."""
        return replace(self._flow, deltas=self._deltas(size).astype(int))

    def requested(self, size: int) -> int:
        """Return the most bytes that tensors of `size` request at one moment."""
        return int(self._deltas(size).cumsum().max(initial=0))

    def fits(self, size: int, capacity: int) -> bool:
        run = self._as_far_as_decisive(size, self.flow(size))
        try:
            fits = run.requested <= capacity and run.bounded(capacity).out_of_memory is None
        except InputError:  # rounding broke a storage that is resized in place
            fits = False
        if not fits or self._decisive is not None:  # the run of this size is seldom made, or makes further events
            run.shared.pop((run.flow.digest, run.config), None)
        return fits

    def _as_far_as_decisive(self, size: int, flow: AllocationEvents) -> Footprint:
        """Return the run of `size`, which shares its replays with others that make the same events."""
        return replace(self.runs[0], size=size, events=flow[: self._decisive])

    def largest(self, capacity: int, most: int, step: int = 1, least: int = 0) -> int:
        """Return the largest multiple of `step` up to `most` that would fit, or `least`, which fits, if none would.

        The bytes that tensors request give an upper limit. Below it sizes are replayed: all where that is quick, else a
        few, and then the edge is found by bisection around a guess.
        """

        @cache
        def fits(multiple: int) -> bool:
            return self.fits(multiple * step, capacity)

        low = least // step
        top = _last(lambda multiple: self.requested(multiple * step) <= capacity, low, most // step)
        events = len(self._flow.storages)
        replays = max(1, min(_MOST_REPLAYS, _MOST_EVENTS // events))
        if (top - low) * events <= _MOST_EVENTS:
            replays = top - low
        below = max(top - replays, low)
        if near := next(filter(fits, range(top, below, -1)), None):
            return near * step
        about = min(max(self._about(capacity, top * step) // step, low), below)
        if about == low or fits(about):
            edge = _last(fits, about, below)
        else:
            edge = about - 1 - _last(lambda down: not fits(about - down), 0, about - low - 1)
        # Rows that are padded waste the least at every eighth, so others as far apart may fit as well.
        beyond = range(min(edge + _MOST_REPLAYS, below), edge, -1)[:replays]
        apart = next(filter(fits, beyond), edge) - edge
        times = 1 if apart < 2 else _last(lambda steps: fits(edge + steps * apart), 1, (below - edge) // apart)
        return (edge + apart * times) * step

    def _about(self, capacity: int, top: int) -> int:
        near = min(self.runs, key=lambda run: abs(run.requested - capacity))
        if near.size == top:
            return top
        slope = (self.requested(top) - near.requested) / (top - near.size)
        reserved = self._as_far_as_decisive(near.size, near.flow).unbounded.reserved.bytes
        return near.size + int((capacity - reserved) / slope) if slope > 0 else top

    def _deltas(self, size: int) -> Array:
        sizes, amounts = [run.size for run in self.runs], self._amounts
        if self._exponents is not None:
            at_size = amounts[0] * (size / sizes[0]) ** self._exponents
        else:
            at_size = amounts[0] + (amounts[-1] - amounts[0]) * ((size - sizes[0]) / (sizes[-1] - sizes[0]))
        if len(sizes) == 3:
            # Newton's form: what the middle run shows beyond the line of the other two, as a parabola through both.
            middle = amounts[0] + (amounts[-1] - amounts[0]) * ((sizes[1] - sizes[0]) / (sizes[-1] - sizes[0]))
            # Only upwards: memory grows faster than its input, in steps, or not at all, and steps are no parabola.
            bend = ((amounts[1] - middle) / ((sizes[1] - sizes[0]) * (sizes[1] - sizes[-1]))).clip(min=0)
            at_size = at_size + bend * ((size - sizes[0]) * (size - sizes[-1]))
        return at_size.round().clip(min=1) * self._signs


def _exponents(run: Footprint, powers: bool) -> Array:
    """Guess from one run how the bytes of each event grow with the size: dimensions that the size divides vary.

    With `powers`, two such dimensions grow as the square: the scores of an attention.
    """
    import numpy as np

    size = run.size

    def exponent(storage: Storage) -> int:
        if storage.role in FIXED:
            return 0
        dims = sum(1 for dim in storage.shape if dim and dim % size == 0)
        return dims if powers else min(dims, 1)

    return np.fromiter(map(exponent, run.trace.storages), dtype=np.float64)[run.flow.storages]


def _last(holds: Callable[[int], bool], least: int, most: int) -> int:
    """Bisect for the largest number up to `most` for which `holds`, if it holds from `least` up to some number."""
    if most <= least or holds(most):
        return most
    low, high = least, least + 1
    while high < most and holds(high):
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def forecast(runs: Mapping[int, Footprint], capacity: int, *, powers: bool = False) -> Forecast | None:
    """Make the best forecast that `runs` allow near `capacity`; None where there is no run."""
    groups: dict[int, list[Footprint]] = {}
    for run in runs.values():
        groups.setdefault(run.shape, []).append(run)
    if not groups:
        return None

    def distance(run: Footprint) -> int:
        return abs(run.requested - capacity)

    ordered = [sorted(_edges(group), key=distance) for group in groups.values()]
    best = min(ordered, key=lambda group: (len(group) < 2, distance(group[0])))[:3]
    if len(best) == 3:
        import numpy as np

        first, middle, last = sorted(best, key=lambda run: run.size)
        off = np.abs(Forecast([first, last]).flow(middle.size).deltas - middle.flow.deltas)
        if off.max(initial=0) <= 1:  # all on one line, which rounding must not bend
            best = best[:2]
    return Forecast(best, powers=powers)


def _edges(runs: list[Footprint]) -> list[Footprint]:
    """Select the largest run of each need: where memory grows in steps, two runs of one step would point nowhere.

    Two runs are selected where all need the same, which shows that nothing grows.
    """
    ascending = sorted(runs, key=lambda run: run.size)
    edges = list({run.requested: run for run in ascending}.values())
    return edges if len(edges) > 1 or len(runs) < 2 else [ascending[0], ascending[-1]]
