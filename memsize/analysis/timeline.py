"""Live memory over a run, from its `Trace` and the replay through the caching allocator: as a timeline, which has the
bytes by role after each event, its phase and layer, and what the allocator holds; and as a PyTorch memory snapshot.

Events stand in for time, which a run that computes nothing does not have.

A snapshot is what `torch.cuda.memory._snapshot()` returns on a GPU, for the same viewers: plain dictionaries, lists,
texts and integers, so that neither making nor reading one needs torch. Sources: PyTorch's
torch/csrc/cuda/memory_snapshot.cpp for the fields, torch/cuda/_memory_viz.py and torch/utils/viz/MemoryViz.js for how
they are read.

The frames of an allocation are the op, the line of the program that led to it, the modules around it and the phase.
`category` (which the viewer colours by) is the role, `time_us` the number of the event. Known limits: one device; the
replay has no bound on memory, so that segments are never given back; of a line, the function and the folder are not
known.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from memsize.analysis.findings.unfinished_runs import lagging, out_of_memory
from memsize.device.allocation_events import flow_of
from memsize.device.allocator import Segment
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.gpu_estimate import Replays, lag, replay_on, stream_shares
from memsize.device.replay import replay
from memsize.records.aggregates import split_phase, traffic
from memsize.records.gpu import Card
from memsize.records.roles import in_order
from memsize.records.timeline import AROUND, Phase, Segment as SegmentChange, Timeline
from memsize.records.trace import Event, Trace

# -- the timeline ------------------------------------------------------------------------------------------------------

_FEW: Final = 4
"""How many events outside every phase are no phase of their own."""


def timeline(
    trace: Trace, config: AllocatorConfig | None = None, where: Card | None = None, *, few: int = _FEW
) -> Timeline:
    """The timeline of `trace` on the card `where` (None: one whose memory never ends), with the caching allocator set
    by `config`. Up to `few` events outside every phase are part of the one that follows.
    """
    events, storages = trace.events, tuple(trace.storages)
    flow = flow_of(trace)
    replayed, shortage = replay_on(trace, flow, where, Replays(config, timeline=True))
    levels = replayed.timeline
    assert levels is not None
    lags = lag(trace, where, Replays(config))
    delta = tuple(0 if event.storage in replayed.skipped else event.delta for event in events)
    role = [storages[event.storage].role for event in events]
    return Timeline(
        model=trace.model,
        scenario=trace.scenario,
        layers=tuple(layer.path for layer in trace.layers),
        phases=tuple(phases(trace, few)),
        op=tuple(event.op for event in events),
        layer=tuple(event.layer for event in events),
        delta=delta,
        live={
            name: tuple(accumulate(change if of == name else 0 for of, change in zip(role, delta, strict=True)))
            for name in in_order(role)
        },
        allocated=tuple(levels.allocated.tolist()),
        reserved=tuple(levels.reserved.tolist()),
        assumptions=trace.assumptions,
        notes=(
            *trace.notes,
            *([out_of_memory(shortage, "the run", where.name).text()] if shortage and where else []),
            *([lagging(lags, replayed.reserved.bytes).text()] if lags else []),
        ),
        stack=trace.stack,
        torch=trace.torch,
        card=where,
        lines=trace.lines,
        world=trace.world,
        collectives=traffic(trace),
        streams=stream_shares(trace, flow, replayed),
        storage=tuple(event.storage for event in events),
        address=tuple(levels.address.tolist()),
        storages=storages,
        segments=tuple(SegmentChange(*segment) for segment in levels.segments),
    )


def phases(trace: Trace, few: int = _FEW) -> Iterator[Phase]:
    """Runs of events of the same phase; up to `few` outside every phase (the seed of a backward) belong to the next."""
    start = stop = 0
    for index, events in groupby(trace.events, key=attrgetter("phase")):
        stop += sum(1 for _ in events)
        name, step = split_phase(trace.phases[index])
        between = start > 0 and stop - start <= few and (index == 0 or name == AROUND)
        if not between or stop == len(trace.events):
            yield Phase(name, step, start, stop)
            start = stop


# -- the snapshot ------------------------------------------------------------------------------------------------------

PROTOCOL: Final = 4
"""The newest pickle protocol that the viewer reads: its own unpickler refuses anything above."""

_LINE: Final = re.compile(r"(.+?):(\d+)(?: > |$)")
_PACKAGES: Final = "site-packages"
_NO_LIMIT: Final = -1
"""How a snapshot represents a `max_split_size` that is not set."""

Fields = dict[str, Any]


def pickled(trace: Trace, config: AllocatorConfig | None = None) -> bytes:
    """The snapshot of `trace`, as the file that https://pytorch.org/memory_viz opens."""
    return pickle.dumps(snapshot(trace, config), protocol=PROTOCOL)


def snapshot(trace: Trace, config: AllocatorConfig | None = None) -> Fields:
    """The snapshot after the last event of `trace`, with everything that led to it."""
    config = config or AllocatorConfig()
    replayed = replay(flow_of(trace), config, streams=trace.streams, emptied=trace.emptied, timeline=True)
    assert replayed.timeline is not None
    history = _History(trace, replayed.timeline.segments, config.expandable_segments)
    for index, (event, address) in enumerate(zip(trace.events, replayed.timeline.address.tolist(), strict=True)):
        history.add(index, event, address)
    # The viewer fails on a trace that has categories unless one is called "unknown".
    history.write("snapshot", 0, 0, stream=0, index=len(trace.events), frames=[], category="unknown")
    return {
        "segments": list(history.segments(replayed.segments)),
        "device_traces": [history.entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": _NO_LIMIT if config.max_split_size is None else config.max_split_size,
            "garbage_collection_threshold": config.garbage_collection_threshold,
            "expandable_segments": config.expandable_segments,
            "roundup_power2_divisions": {str(1 << n): count for n, count in enumerate(config.roundup_divisions)},
        },
        # Where phases begin and end, as `torch.profiler.record_function` would have noted them.
        "external_annotations": [
            {"name": str(phase), "stage": stage, "device": 0, "time_us": event}
            for phase in phases(trace)
            for stage, event in (("START", phase.start), ("END", phase.stop))
        ],
    }


class _Live(NamedTuple):
    address: int
    bytes: int
    frames: list[Fields]


class _History:
    def __init__(self, trace: Trace, changes: Iterable[tuple[int, int, int]], expandable: bool) -> None:
        self.trace = trace
        self.expandable = expandable
        self.entries: list[Fields] = []
        self._changes = deque(changes)
        self._requests: dict[int, tuple[int, list[Fields]]] = {}
        self._live: dict[int, _Live] = {}
        self._frames: dict[tuple[int, int, str, str | None], list[Fields]] = {}
        self._modules: dict[int, list[Fields]] = {}
        self._types = {layer.path: layer.type for layer in trace.layers}

    def add(self, index: int, event: Event, address: int) -> None:
        """Add the entries that the allocator makes for `event`, and for what CUDA gave and got back until then."""
        frames = self._frames_of(event)
        storage = self.trace.storages[event.storage]
        freed = self._live.pop(event.storage, None)
        left = event.delta if freed is None else freed.bytes + event.delta
        while self._changes and self._changes[0][0] <= index:
            _, start, size = self._changes.popleft()
            if size > 0:
                self._requests[start] = storage.stream, frames
            stream, _ = self._request_for(start)
            action = ("map" if size > 0 else "unmap") if self.expandable else ("alloc" if size > 0 else "free")
            self.write(f"segment_{action}", start, abs(size), stream, index, frames)
        if left:
            self._live[event.storage] = _Live(address, left, frames)
            about = f"{storage.role}, {storage.dtype}[{','.join(map(str, storage.shape))}]"
            more = {"category": storage.role, "user_metadata": about}
            self.write("alloc", address, left, storage.stream, index, frames, **more)
        if freed is not None:
            self.write("free_requested", freed.address, freed.bytes, storage.stream, index, frames)
            self.write("free_completed", freed.address, freed.bytes, storage.stream, index, frames)

    def _request_for(self, address: int) -> tuple[int, list[Fields]]:
        """The stream and the frames of the request that CUDA last gave the memory at `address` for."""
        return self._requests[max(start for start in self._requests if start <= address)]

    def write(
        self, action: str, address: int, size: int, stream: int, index: int, frames: list[Fields], **more: str
    ) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": index, "frames": frames}
        self.entries.append({**entry, "compile_context": "N/A", "user_metadata": "", **more})

    def _frames_of(self, event: Event) -> list[Fields]:
        """The frames of an event, innermost first; events of the same op share one list, which keeps files small."""
        line = self.trace.line_of(event.storage) if event.delta > 0 else None
        key = (event.phase, event.layer, event.op, line)
        frames = self._frames.get(key)
        if frames is None:
            name, step = split_phase(self.trace.phases[event.phase])
            op = [_frame("aten", event.op)] if event.op else []
            modules = self._modules_of(event.layer) if event.layer >= 0 else []
            phase = _frame(f"step {step}" if step else "run", name)
            # ``"train.py:12 > trainer.py:80"``: the second is of a package, which readers recognise by its folder.
            lines = [*enumerate(_LINE.findall(line or ""))][::-1]
            files = (_frame(f"{_PACKAGES}/{file}" if n else file, "", int(number)) for n, (file, number) in lines)
            frames = self._frames[key] = [*op, *files, *modules, phase]
        return frames

    def _modules_of(self, index: int) -> list[Fields]:
        """The frames of a module and of those around it, innermost first. Events share the dictionaries of a module."""
        if index not in self._modules:
            path = self.trace.layers[index].path
            steps = path.split(".") if path else []
            paths = (".".join(steps[:depth]) for depth in range(len(steps), -1, -1))
            self._modules[index] = [
                _frame(path or "(model)", self._types[path]) for path in paths if path in self._types
            ]
        return self._modules[index]

    def segments(self, at_end: Iterable[Segment]) -> Iterator[Fields]:
        """Each segment with its blocks, and the frames of the request that it was taken from CUDA for."""
        for segment in at_end:
            blocks = [self._block(*block) for block in segment.blocks]
            used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
            yield {
                "device": 0,
                "address": segment.address,
                "total_size": segment.bytes,
                "allocated_size": used,
                "active_size": used,
                "requested_size": sum(block["requested_size"] for block in blocks),
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": self.expandable,
                "frames": self._request_for(segment.address)[1],
                "blocks": blocks,
            }

    def _block(self, address: int, size: int, storage: int | None) -> Fields:
        live = None if storage is None else self._live[storage]
        return {
            "address": address,
            "size": size,
            "requested_size": live.bytes if live else 0,
            "state": "active_allocated" if live else "inactive",
            "frames": live.frames if live else [],
        }


def _frame(filename: str, name: str, line: int = 0) -> Fields:
    return {"filename": filename, "line": line, "name": name}
