"""`Timeline`: live bytes by role after each event of a run, its phases, and what the allocator holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from memsize.records.answer import Renderable
from memsize.records.fields import Fields, FlatTable, Missing, field
from memsize.records.gpu import Card, StreamShare
from memsize.records.roles import Role
from memsize.records.trace import Storage
from memsize.records.world import ALONE, Traffic, World
from memsize.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCHEMA: Final = "memsize.timeline/1"
AROUND: Final = "step"
"""The record's name for events of a step outside its phases; events outside every step are in the run's first phase."""


class Phase(NamedTuple):
    """The events from `start` up to `stop`, which happen in one phase of a step (0: the run has no steps)."""

    name: str
    step: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name} {self.step}" if self.step else self.name


class Stretch(NamedTuple):
    """The events from `start` up to `stop`, which happen in one layer (None: outside the model)."""

    layer: str | None
    start: int
    stop: int


class Segment(NamedTuple):
    """After `event`, CUDA has given (bytes > 0) or got back a stretch of memory that starts at `address`."""

    event: int
    address: int
    bytes: int


class PeakMoment(NamedTuple):
    """The moment of most live bytes: after which event (-1: before any), where that is, and what is alive by role."""

    event: int
    bytes: int
    layer: str | None
    op: str
    roles: Mapping[Role, int]


class LengthRow(NamedTuple):
    """The bytes reserved under one setting by a training whose texts vary in length: in a random order, and in the
    worst of the orders that were tried; None where it runs out of memory. `requested` is the most that is alive.
    """

    setting: str
    requested: int
    expected: int | None
    worst: int | None


LENGTH_FIELDS: Final = Fields[LengthRow](
    field("setting", "batches", "text", 100, "batching method, or a setting of the allocator"),
    field("requested", "tensors", "bytes", 97, "live bytes at the peak"),
    field("expected", "reserved", "bytes", 99, "the allocator's segments at their peak, for batches in a random order"),
    field("worst", "worst order", "bytes", 98, "the same for the worst of five orders, two of them made to fragment"),
    nullable=("expected", "worst"),
    missing=lambda _: Missing("runs out of memory"),
)


@dataclass(frozen=True, repr=False)
class Timeline(Renderable):
    """One value per event in each of its columns; `live` has a column for each role that occurs, in order of `ROLES`.

    `layer` indexes `layers`, the paths of modules; -1 is outside the model. `delta` is what the event itself changes.
    `allocated` and `reserved` are the caching allocator's blocks and segments. Phases follow each other without a gap.
    """

    kind: ClassVar = "timeline"

    model: str
    scenario: str
    layers: tuple[str, ...]
    phases: tuple[Phase, ...]
    op: tuple[str, ...]
    layer: tuple[int, ...]
    delta: tuple[int, ...]
    live: Mapping[Role, tuple[int, ...]]
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was taken for granted, and how the run was made: as the trace says."""
    stack: str = ""
    """The PyTorch and CUDA on the GPU; empty for the installed ones."""
    storage: tuple[int, ...] = ()
    """Which of `storages` each event makes, resizes or frees."""
    address: tuple[int, ...] = ()
    """Where the allocator's block of that storage begins, by the addresses of a simulated GPU."""
    storages: tuple[Storage, ...] = ()
    segments: tuple[Segment, ...] = ()
    """The stretches of memory that the allocator got from CUDA and gave back, in order."""
    lines: tuple[str, ...] = ()
    """The lines that storages come from: what `Storage.line` and `Storage.saved_at` index."""
    world: World = ALONE
    """Which process of a distributed job it is."""
    collectives: tuple[Traffic, ...] = ()
    """Those of a step of that process."""
    streams: tuple[StreamShare, ...] = ()
    """What each CUDA stream takes, where the run allocates on several."""
    torch: str = ""
    """The release of PyTorch that ran; empty where the file is from before it was kept."""
    card: Card | None = None
    """The simulated GPU; None for one whose memory never ends."""
    lengths: tuple[LengthRow, ...] = ()
    """What the allocator reserves if the lengths of texts vary; empty for texts of one length."""

    def __len__(self) -> int:
        return len(self.delta)

    def __str__(self) -> str:
        return self._drawn("text").rstrip("\n")

    def __repr__(self) -> str:
        return f"<memsize.Timeline {self.model}: {len(self):,} events, peak {format_bytes(self.peak.bytes)}>"

    @cached_property
    def total(self) -> tuple[int, ...]:
        """All live bytes after each event."""
        return tuple(accumulate(self.delta))

    @cached_property
    def peak(self) -> PeakMoment:
        """The first moment of most live bytes."""
        return self.summit(0, len(self))

    @property
    def steps(self) -> tuple[Phase, ...]:
        """The steps, each with all its events; none in a run without steps."""
        runs = [(step, list(phases)) for step, phases in groupby(self.phases, key=lambda phase: phase.step)]
        return tuple(Phase("step", step, phases[0].start, phases[-1].stop) for step, phases in runs if step)

    def summit(self, start: int, stop: int) -> PeakMoment:
        """Return the first moment of most live bytes, from just before event `start` up to, not including, `stop`."""
        first = max(start - 1, 0)
        if first >= stop:
            return PeakMoment(-1, 0, None, "", {})
        return self.moment(max(range(first, stop), key=self.total.__getitem__))

    def moment(self, event: int) -> PeakMoment:
        """Return the moment after `event`: its live bytes by role, its layer and its op."""
        roles = {role: column[event] for role, column in self.live.items() if column[event]}
        return PeakMoment(event, self.total[event], self.path(event), self.op[event], roles)

    def phase_at(self, event: int) -> Phase:
        """The phase that `event` happens in."""
        return next(phase for phase in self.phases if event < phase.stop)

    def before(self, event: int) -> int:
        """The live bytes before `event`."""
        return self.total[event - 1] if event else 0

    def columns(self, count: int) -> list[int]:
        """Sample at most `count` events: the one with most live bytes from each of `count` equal parts of the run."""
        events = len(self)
        bounds = [position * events // count for position in range(count + 1)] if events > count else range(events + 1)
        return [max(range(start, stop), key=self.total.__getitem__) for start, stop in pairwise(bounds)]

    def stretches(self, most: int) -> tuple[Stretch, ...]:
        """Split the run into stretches of one layer each, at the greatest depth that gives at most `most` of them.

        Frees of a module between two of its children count as the end of the first child's stretch.
        """
        depth = max((path.count(".") + 1 for path in self.layers if path), default=0)
        while (timeline := self._stretches(depth)) and len(timeline) > most and depth > 0:
            depth -= 1
        return timeline

    def plot(self, unit: str | None = None) -> Figure:
        """Live bytes by role over the run's events as a figure of plotly, in `unit`; what the allocator holds as lines.

        Raises `OutputError` without plotly, and where the run has no events.
        """
        return self._plotted("overview", unit)

    def tables(self) -> dict[str, FlatTable]:
        """`events`: one row per event. Its layer is None outside the model, its step where the run has none."""
        spans = [(phase, phase.stop - phase.start) for phase in self.phases]
        sizes = {
            "delta": self.delta,
            "live": self.total,
            **{role.replace(" ", "_"): column for role, column in self.live.items()},
            "allocated": self.allocated,
            "reserved": self.reserved,
        }
        columns = {
            "event": tuple(range(len(self))),
            "phase": tuple(phase.name for phase, count in spans for _ in range(count)),
            "step": tuple(phase.step or None for phase, count in spans for _ in range(count)),
            "layer": tuple(self.path(event) for event in range(len(self))),
            "op": self.op,
            **sizes,
        }
        return {"events": FlatTable(tuple(columns), zip(*columns.values(), strict=True), sizes)}

    def _stretches(self, depth: int) -> tuple[Stretch, ...]:
        cut: list[str | None] = [".".join(path.split(".")[:depth]) for path in self.layers]
        cut.append(None)
        timeline: list[Stretch] = []
        for event, (index, change) in enumerate(zip(self.layer, self.delta, strict=True)):
            path, last = cut[index], timeline[-1].layer if timeline else None
            is_free_around = change < 0 and path is not None and last is not None
            if timeline and (path == last or (is_free_around and (not path or str(last).startswith(f"{path}.")))):
                timeline[-1] = timeline[-1]._replace(stop=event + 1)
            else:
                timeline.append(Stretch(path, event, event + 1))
        return tuple(timeline)

    def path(self, event: int) -> str | None:
        """The layer of `event`; None outside the model."""
        index = self.layer[event]
        return self.layers[index] if index >= 0 else None


class PhaseSummary(NamedTuple):
    """A phase in one or several steps that run alike: the live bytes before it and its highest moment.

    A phase that only frees is highest before its first event: then no layer or op of its own is at its summit.
    """

    name: str
    steps: tuple[int, ...]
    before: int
    summit: PeakMoment
    allocated: int
    reserved: int


PHASE_FIELDS: Final = Fields[PhaseSummary](
    field("name", "phase", "words", 100, "phase of the step", get=lambda row: [row.name], key="phase"),
    field("steps", "step", "words", 99, "steps with the same figures"),
    field("before", "starts with", "bytes", 90, "live bytes before its first event"),
    field("peak", "at most", "bytes", 98, "live bytes at its highest moment", get="summit.bytes"),
    field("allocated", "allocated", "bytes", 70, "the allocator's blocks at that moment"),
    field("reserved", "reserved", "bytes", 72, "the allocator's segments at that moment"),
    field("layer", "at", "path", 95, "the layer that runs at that moment", alone="layer", get="summit.layer"),
    field("op", "op", "text", 85, "the op that runs at that moment", get=lambda row: row.summit.op or None),
    get={"steps": lambda row: [str(step) for step in row.steps if step]},
)


def courses(timeline: Timeline) -> tuple[PhaseSummary, ...]:
    """Summarize the phases of a run in order; equal phases of several steps share one summary."""
    courses = []
    for phase in timeline.phases:
        course = _course(timeline, phase)
        # The same but for the step and for where in the run it is.
        summit = course.summit
        key = (course.name, course.before, course.allocated, course.reserved, summit[1:4], *summit.roles.items())
        courses.append((key, course))
    return _shared(courses)


def step_courses(timeline: Timeline) -> tuple[PhaseSummary, ...]:
    """Summarize the phases of a program, which may recur within a step: each phase of a step is one summary.

    Events outside all phases belong to the forward before them (the loss), or else to the phase after them (batches
    going to the GPU, gradients being clipped). Steps whose phases have equal peaks share a summary, with the largest
    `allocated` and `reserved` of them.
    """
    courses = []
    for (name, step), phases in _settled(timeline.phases).items():
        course = max((_course(timeline, phase) for phase in phases), key=lambda entry: entry.summit.bytes)
        course = course._replace(name=name, steps=(step,), before=timeline.before(phases[0].start))
        courses.append(((name, course.before, course.summit.bytes, *course.summit.roles.items()), course))
    return _shared(courses)


def _shared(courses: Iterable[tuple[object, PhaseSummary]]) -> tuple[PhaseSummary, ...]:
    """One summary for all courses of a key: the first, with the steps of all and their largest levels."""
    summaries: dict[object, PhaseSummary] = {}
    for key, course in courses:
        earlier = summaries.get(key, course)
        steps = tuple(dict.fromkeys((*earlier.steps, *course.steps)))
        levels = max(earlier.allocated, course.allocated), max(earlier.reserved, course.reserved)
        summaries[key] = earlier._replace(steps=steps, allocated=levels[0], reserved=levels[1])
    return tuple(summaries.values())


def _settled(phases: Sequence[Phase]) -> dict[tuple[str, int], list[Phase]]:
    """Group the phases by name and step; a phase without a name joins one of its neighbours."""
    timeline: dict[tuple[str, int], list[Phase]] = {}
    waiting: list[Phase] = []
    last: Phase | None = None
    for phase in phases:
        if phase.name != AROUND:
            last = phase
        elif last is None or last.name != "forward" or last.step != phase.step:
            waiting.append(phase)
            continue
        timeline.setdefault((last.name, last.step), []).extend((*waiting, phase))
        waiting = []
    if last is not None:
        timeline[last.name, last.step] += waiting
    return timeline


def _course(timeline: Timeline, phase: Phase) -> PhaseSummary:
    summit = timeline.summit(phase.start, phase.stop)
    levels = timeline.allocated[summit.event], timeline.reserved[summit.event]
    if summit.event < phase.start:
        summit = summit._replace(layer=None, op="")
    return PhaseSummary(phase.name, (phase.step,), timeline.before(phase.start), summit, *levels)


def to_data(timeline: Timeline) -> dict[str, Any]:
    """The timeline as data that JSON can hold; `peak` is there for readers who look for nothing else."""
    columns = {field.name: getattr(timeline, field.name) for field in fields(timeline)}
    peak = timeline.peak._asdict() | {"phase": str(timeline.phase_at(timeline.peak.event)) if len(timeline) else None}
    rows = ("phases", "storages", "segments", "streams", "lengths")
    parts = {name: [part._asdict() for part in columns[name]] for name in rows}
    card = {"card": asdict(timeline.card) if timeline.card else None}
    between = {"world": asdict(timeline.world), "collectives": [asdict(entry) for entry in timeline.collectives]}
    return {"schema": SCHEMA, "peak": peak, **columns, **parts, **between, **card}
