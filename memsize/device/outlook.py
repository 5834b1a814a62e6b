"""What a GPU would show of a trace: its peaks in the allocator's terms, and what is alive there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from memsize.device.allocator import Replay, replay
from memsize.device.config import AllocatorConfig
from memsize.device.context import Interval, context
from memsize.device.spread import requests, variants
from memsize.folds import alive, split_phase
from memsize.record import Role, Storage, Trace


class Living(NamedTuple):
    """One storage at the peak, the layer and the phase that it was made in."""

    bytes: int
    role: Role
    layer: str | None
    op: str
    phase: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """The peak of one run on a GPU, in bytes.

    `requested` is what tensors ask for, `allocated` the blocks that the caching allocator hands out for it, `reserved`
    its segments, each at its own peak; `device` is what `nvidia-smi` would show, an interval, since the CUDA context
    cannot be derived offline, nor cuDNN's workspaces where the library is not there to be asked. `roles` add up to
    `requested`; `storages` are the largest ones alive at that moment, which falls in `peak_phase` of step `peak_step`
    (0: the run has no steps) and in `peak_layer`. `fragmentation` is the part of `reserved` at its peak that no block
    uses.
    """

    requested: int
    allocated: int
    reserved: int
    device: Interval
    fragmentation: float
    peak_phase: str
    peak_step: int
    peak_layer: str
    peak_op: str
    roles: Mapping[Role, int]
    storages: tuple[Living, ...]


def outlook(
    trace: Trace, *, config: AllocatorConfig | None = None, cuda: str | None = None, largest: int = 20
) -> Outlook:
    """What a GPU would show of `trace`, whose allocator is set by `config` and whose context follows CUDA `cuda`."""
    settings = config or AllocatorConfig()
    replayed = replay(requests(trace), settings)
    index = replayed.requested.event
    living = alive(trace, index)
    event = trace.events[index] if index >= 0 else None
    phase, step = split_phase(trace.phases[event.phase]) if event else ("", 0)
    return Outlook(
        requested=replayed.requested.bytes,
        allocated=replayed.allocated.bytes,
        reserved=replayed.reserved.bytes,
        device=_device(trace, replayed, settings, context(cuda)),
        fragmentation=replayed.fragmentation,
        peak_phase=phase,
        peak_step=step,
        peak_layer=trace.layers[event.layer].path if event and event.layer >= 0 else "",
        peak_op=event.op if event else "",
        roles=_roles(trace, living),
        storages=_largest(trace, living, largest),
    )


def _device(trace: Trace, replayed: Replay, config: AllocatorConfig, outside: Interval) -> Interval:
    """Reserved and what is outside the allocator, from the least to the most that workspaces make of it."""
    others = (replay(each, config) for each in variants(trace)[1:])
    reserved = [each.reserved.bytes for each in (replayed, *others)]
    return Interval(min(reserved) + outside.low, max(reserved) + outside.high)


def _roles(trace: Trace, living: Mapping[int, int]) -> dict[Role, int]:
    roles: dict[Role, int] = {}
    for storage, size in living.items():
        role = trace.storages[storage].role
        roles[role] = roles.get(role, 0) + size
    return dict(sorted(roles.items(), key=lambda item: -item[1]))


def _largest(trace: Trace, living: Mapping[int, int], count: int) -> tuple[Living, ...]:
    born = {event.storage: event.phase for event in trace.events if event.delta > 0}
    ordered: Iterable[int] = sorted(living, key=lambda storage: (-living[storage], storage))
    return tuple(_living(trace, trace.storages[i], living[i], born[i]) for i in list(ordered)[:count])


def _living(trace: Trace, storage: Storage, size: int, phase: int) -> Living:
    layer = trace.layers[storage.layer].path if storage.layer >= 0 else None
    return Living(size, storage.role, layer, storage.op, trace.phases[phase], storage.dtype, storage.shape)
