"""The peaks of a pipeline's phases on a GPU, and the weights that each holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memsize.device.allocation_events import flow_of
from memsize.device.gpu_estimate import Replays, replay_on
from memsize.records.columns import numbers, rows_at
from memsize.records.gpu import Card, PhasePeak
from memsize.records.trace import Trace

_WEIGHTS = ("parameter", "buffer")


def phase_peaks(trace: Trace, where: Card | None, replays: Replays, phases: Mapping[str, str]) -> Iterator[PhasePeak]:
    """Yield the peak of each phase of `trace`, in the order in which they begin; `phases` has that of each part.

    `replays` have timelines.
    """
    import numpy as np

    flow = flow_of(trace)
    replayed, _ = replay_on(trace, flow, where, replays)
    levels, phase_of = replayed.timeline, numbers(trace.events, "phase")
    assert levels is not None
    tops = [layer.path.partition(".")[0] for layer in trace.layers]
    for number, phase in enumerate(trace.phases):
        inside = np.flatnonzero(phase_of == number)
        parts = tuple(name for name, of in phases.items() if of == phase)
        if not len(inside) or not parts:
            continue
        peak = int(inside[levels.requested[inside].argmax()])
        live = {storage: size for storage, size in flow.alive(peak).items() if storage not in replayed.skipped}
        alive = zip(rows_at(trace.storages, live), live.values(), strict=True)
        stored = [(tops[storage.layer], size) for storage, size in alive if storage.role in _WEIGHTS]
        weights = sum(size for top, size in stored if top in parts)
        other_weights = sum(size for _, size in stored) - weights
        requested, layer = int(levels.requested[peak]), trace.events[peak].layer
        yield PhasePeak(
            phase,
            parts,
            requested,
            int(levels.allocated[inside].max()),
            int(levels.reserved[inside].max()),
            weights,
            other_weights,
            requested - weights - other_weights,
            trace.layers[layer].path if layer >= 0 else "",
        )
