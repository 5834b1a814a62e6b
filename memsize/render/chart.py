"""A timeline drawn with block characters: live bytes over a run, the phases below, and one line per role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from memsize.printable import printable
from memsize.records.roles import colour, noun
from memsize.records.timeline import Timeline
from memsize.render.cell_text import draw_bytes
from memsize.units import Unit, format_bytes, unit_for

WIDTH: Final = 100
"""How wide a chart is where nobody says."""
LEAST: Final = 10
"""Columns of a chart in a terminal that is narrower than its labels."""
HEIGHT: Final = 8
LEAST_HEIGHT: Final = 3
_FAINT: Final = 50
"""The part of the peak below which a role is hardly seen."""
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = len(_BLOCKS) - 1


def lines(timeline: Timeline, unit: str, width: int | None = None, height: int = HEIGHT) -> Iterator[Text]:
    """The chart of a timeline that has events, in at most `width` characters, with bars of `height` rows."""
    # A low chart has no line for what is hardly seen in it.
    least = 0 if height == HEIGHT else timeline.peak.bytes // _FAINT
    live = {role: column for role, column in timeline.live.items() if max(column) >= least}
    peaks = [format_bytes(max(column), unit) for column in live.values()]
    labels = [noun(role) for role in live]
    scale = unit_for(timeline.peak.bytes, unit)
    left = max(map(len, (*labels, draw_bytes(timeline.peak.bytes, scale)))) + 1
    right = max(map(len, (*peaks, "at most")))
    room = max((width or WIDTH) - left - 2 - right, LEAST)
    events = timeline.columns(room)
    spread = [events[column * len(events) // room] for column in range(room)]  # a short run is stretched
    steps = [(str(step), step.start) for step in timeline.steps]
    phases = [(phase.name, phase.start) for phase in timeline.phases]
    drawn = [
        _mark(timeline, spread, left, left + room + 2 + right, unit),
        *_bars([timeline.total[event] for event in spread], timeline.peak.bytes, height, left, scale),
        *(f"{'':<{left}} {_band(names, len(timeline), room)}" for names in (steps, phases) if names),
        f"{'':<{left}} {'each line to its own height'[:room]:<{room}} {'at most':>{right}}",
    ]
    yield from (Text(printable(line.rstrip())) for line in drawn)
    for label, (role, column), peak in zip(labels, live.items(), peaks, strict=True):
        most = max(column)
        sparks = "".join(_BLOCKS[_level(column[event], most, _EIGHTHS)] for event in spread)
        yield Text.assemble(f"{label:<{left}} ", (sparks, colour(role)), f" {peak:>{right}}")


def _mark(timeline: Timeline, spread: Sequence[int], left: int, width: int, unit: str) -> str:
    """A line that points down at the peak and says what it is."""
    peak = timeline.peak
    position = left + 1 + spread.index(peak.event)
    text = f"{format_bytes(peak.bytes, unit)} in {timeline.phase_at(peak.event)}"
    at = ", ".join(filter(None, (peak.layer, peak.op)))
    for words in (f"{text} ({at})" if at else text, text):
        if position + 2 + len(words) <= width:
            return f"{'':<{position}}▼ {words}"
        if len(words) < position:
            return f"{words:>{position - 1}} ▼"
    return f"{'':<{position}}▼"


def _bars(values: Sequence[int], most: int, height: int, left: int, unit: Unit) -> Iterator[str]:
    """`height` rows of bars, the highest value as high as they all."""
    levels = [_level(value, most, height * _EIGHTHS) for value in values]
    for row in reversed(range(height)):
        label = draw_bytes(most, unit) if row == height - 1 else unit.name if row == height - 2 else ""
        bars = (_BLOCKS[min(max(level - row * _EIGHTHS, 0), _EIGHTHS)] for level in levels)
        yield f"{label:>{left - 1}} │{''.join(bars)}"


def _level(value: int, most: int, levels: int) -> int:
    """`value` in eighths of a character; only nothing is 0."""
    return max(round(value * levels / most), 1) if value else 0


_SHORT: Final = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "zero_grad": "zero"}


def _band(names: Sequence[tuple[str, int]], events: int, room: int) -> str:
    """Where steps or phases begin, with the names that there is room for, whole or in the usual short form."""
    line = [" "] * room
    # Rounded up: the first column whose events all come after it.
    places = [-(-start * room // events) for _, start in names]
    for (name, _), position, end in zip(names, places, [*places[1:], room], strict=True):
        if position < end:
            shown = next((text for text in (name, _SHORT.get(name, "")) if len(text) < end - position), "")
            line[position:end] = f"│{shown:<{end - position - 1}}"
    return "".join(line)
