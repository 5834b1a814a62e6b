"""A timeline as a picture in a web page: areas stacked by role.

Phases, stretches of events in a layer, and roles have tooltips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from memsize.documents.sections import Overlay
from memsize.records.roles import Role, noun
from memsize.records.timeline import Timeline
from memsize.render.cell_text import MODEL, draw_bytes, shorten_path
from memsize.units import Unit, format_bytes, unit_for

POINTS: Final = 900
"""How many moments are drawn: about one for each pixel."""
MARKS: Final = 120
"""How many stretches of layers are marked below the plot."""
NEAR: Final = 2.5
"""How many times the largest reserved memory a card may have to be part of the picture."""
STRETCHES: Final = 400
"""How many a pointer can tell apart."""


class Box(NamedTuple):
    """A rectangle, its label where there is room for one, and its tooltip."""

    x: float
    width: float
    label: str
    hint: str


class Frame(NamedTuple):
    """Where the plot lies in the picture, in its units, and how events and bytes map to it."""

    events: int
    most: int
    left: float = 78
    right: float = 1188
    top: float = 48
    bottom: float = 400

    def x(self, event: float) -> float:
        return round(self.left + (self.right - self.left) * event / self.events, 1)

    def y(self, size: float) -> float:
        return round(self.bottom - (self.bottom - self.top) * size / self.most, 1)


def picture(timeline: Timeline, unit: str, other: Overlay | None = None) -> dict[str, Any]:
    """Everything that the template draws of a timeline that has events, in the picture's units."""
    card = timeline.card if timeline.card and timeline.card.bytes <= NEAR * max(timeline.reserved) else None
    frame = Frame(len(timeline), max((*timeline.reserved, *(other.levels if other else ()), card.bytes if card else 0)))
    scale = unit_for(frame.most, unit)
    moments = timeline.columns(POINTS)
    edges = [frame.x(position * len(timeline) / len(moments)) for position in range(len(moments) + 1)]
    lines = {"allocated": timeline.allocated, "reserved": timeline.reserved}
    if other:
        lines = {"other": other.levels, **lines}
    return {
        "frame": frame,
        "areas": list(_areas(timeline, frame, moments, edges, unit)),
        "lines": {
            name: _points(_outline(edges, [frame.y(column[event]) for event in moments]))
            for name, column in lines.items()
        },
        "ticks": ticks(frame, scale),
        "unit": scale.name,
        "other": other and f"{other.name}: at most {format_bytes(max(other.levels), unit)}",
        "steps": [_box(frame, step.start, step.stop, str(step), str(step)) for step in timeline.steps],
        "phases": list(_phases(timeline, frame, unit)),
        "layers": list(_layers(timeline, frame, unit, MARKS)),
        "stretches": list(_layers(timeline, frame, unit, STRETCHES)),
        "peak": _peak(timeline, frame, unit),
        "limit": (frame.y(card.bytes), f"{card.name}: {format_bytes(card.bytes, unit)}") if card else None,
    }


def _areas(
    timeline: Timeline, frame: Frame, moments: Sequence[int], edges: Sequence[float], unit: str
) -> Iterator[tuple[Role, str, str]]:
    """Stack one area per role: its role, its polygon and its tooltip."""
    levels = accumulate(
        ([column[event] for event in moments] for column in timeline.live.values()),
        lambda below, own: [a + b for a, b in zip(below, own, strict=True)],
        initial=[0] * len(moments),
    )
    below = next(levels)
    for role, above in zip(timeline.live, levels, strict=True):
        low, high = ([frame.y(size) for size in sizes] for sizes in (below, above))
        polygon = [*_outline(edges, high), *reversed(_outline(edges, low))]
        yield role, _points(polygon), f"{noun(role)}: at most {format_bytes(max(timeline.live[role]), unit)}"
        below = above


def _outline(edges: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a line that stays at each height from one edge to the next."""
    corners: list[tuple[float, float]] = []
    for start, stop, height in zip(edges, edges[1:], heights, strict=False):
        if corners and corners[-1][1] == height:
            corners[-1] = (stop, height)
        else:
            corners += [(start, height), (stop, height)]
    return corners


def _points(corners: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in corners)


def ticks(frame: Frame, scale: Unit) -> list[tuple[float, str]]:
    """The heights of round sizes, and what stands beside them: without decimals that say nothing."""
    sizes = {size: draw_bytes(size, scale) for size in round_ticks(frame.most, scale.bytes)}
    return [(frame.y(size), text.rstrip("0").rstrip(".") if "." in text else text) for size, text in sizes.items()]


def round_ticks(most: int, scale: int) -> list[int]:
    """Four to nine round sizes from nothing to `most`."""
    step = 10.0 ** (len(str(int(most / scale))) - 1) if most >= scale else scale and most / scale / 5
    for finer in (1, 2, 5, 10):
        if most / scale / (step / finer) >= 4:
            step /= finer
            break
    return [round(position * step * scale) for position in range(int(most / scale / step) + 1)]


def _phases(timeline: Timeline, frame: Frame, unit: str) -> Iterator[Box]:
    for phase in timeline.phases:
        highest = format_bytes(timeline.summit(phase.start, phase.stop).bytes, unit)
        hint = f"{phase}: at most {highest}, events {phase.start} to {phase.stop - 1}"
        yield _box(frame, phase.start, phase.stop, phase.name, hint)


def _layers(timeline: Timeline, frame: Frame, unit: str, most: int) -> Iterator[Box]:
    """The stretches in which a layer runs; those outside the model are left open."""
    for layer, start, stop in timeline.stretches(most):
        if layer is not None:
            summit = timeline.moment(max(range(start, stop), key=timeline.total.__getitem__))
            roles = "".join(f"\n{noun(role)} {format_bytes(size, unit)}" for role, size in summit.roles.items())
            highest = f"at most {format_bytes(summit.bytes, unit)}{roles}"
            yield _box(frame, start, stop, layer or MODEL, f"{layer or MODEL} in {timeline.phase_at(start)}: {highest}")


def _box(frame: Frame, start: int, stop: int, label: str, hint: str) -> Box:
    x, width = frame.x(start), round(frame.x(stop) - frame.x(start), 1)
    room = int((width - 6) / 6.2)
    text = label if len(label) <= room else shorten_path(label, room) if room >= 4 and "." in label else ""
    return Box(x, width, text, hint)


def _peak(timeline: Timeline, frame: Frame, unit: str) -> dict[str, Any]:
    peak = timeline.peak
    x = frame.x(peak.event + 0.5)
    where = ", ".join(filter(None, (str(timeline.phase_at(peak.event)), peak.layer, peak.op)))
    return {
        "x": x,
        "y": frame.y(peak.bytes),
        "text": f"{format_bytes(peak.bytes, unit)} live in {where}",
        "anchor": "start" if x < (frame.left + frame.right) / 2 else "end",
    }
