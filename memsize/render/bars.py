"""Bars drawn with block characters, as long as there is room: a line for each, with its total behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from memsize.documents.sections import Bar, Bars, Limit, Part
from memsize.printable import printable
from memsize.records import roles
from memsize.render import aligned
from memsize.render.cell_text import draw_bytes, draw_cell, shorten, wrapped
from memsize.units import Unit, format_bytes, unit_for

WIDTH: Final = 100
"""How wide bars and their figures are where nobody says."""
LEAST: Final = 10
"""How long the longest bar is at least."""
_END: Final = 8
"""How many letters of a longer name's end are kept."""
_GAP: Final = "  "
_FULL: Final = "█"
_LIMIT: Final = "┃"
_SPLINTERS: Final = 50
"""Parts below this fraction of the longest bar share a mark."""
_REACH: Final = 2
"""A limit this many times as long as the longest bar is worth drawing beside it."""


def lines(bars: Bars, unit_name: str, width: int | None = None, *, colour: bool = False) -> Iterator[Text]:
    """Draw `bars` in at most `width` characters if possible, with bytes in the unit called `unit_name`.

    The marks of their roles distinguish the parts, or with `colour` the colours.
    """
    bars, width, scale = _lumped(bars), width or WIDTH, longest_drawn(bars)
    unit = unit_for(scale, unit_name)
    names, totals = ([*texts] for texts in zip(*(_ends(bars, bar, unit, width) for bar in bars.bars), strict=True))
    left, right = max(map(cell_len, names)), max(map(len, totals))
    room = max(width - left - right - 2 * len(_GAP), LEAST)
    lengths = [_lengths(bar, scale, room) for bar in bars.bars]
    drawn = [position for position in range(len(bars.parts)) if any(bar[position] for bar in lengths)]
    is_plain = colour or _is_plain(bars)
    inks = {position: _FULL if is_plain else roles.mark(bars.parts[position].role) for position in drawn}
    yield from wrapped(_title(bars, unit, unit_name), width, style="bold")
    for name, bar, total in zip(names, lengths, totals, strict=True):
        parts = ((inks[n] * bar[n], roles.colour(bars.parts[n].role)) for n in drawn)
        line = aligned(Text.assemble(*parts), room)
        if bars.limit and bars.limit.size <= scale:
            position = min(round(bars.limit.size * room / scale), room - 1)
            line = Text.assemble(line[:position], _LIMIT, line[position + 1 :])
        yield Text.assemble(aligned(Text(name), left), _GAP, line, _GAP, total.rjust(right))
    if not _is_plain(bars):
        yield from _key(bars, inks, unit, width)


def legend(bars: Bars) -> tuple[Part, ...]:
    """The parts that a legend has to explain: those drawn, unless there is one or the bars have their names."""
    used = tuple(part for n, part in enumerate(bars.parts) if any(bar.sizes[n] for bar in bars.bars))
    names = {label.text for bar in bars.bars for label in bar.labels}
    return () if len(used) < 2 or all(part.title in names for part in used) else used


def longest_drawn(bars: Bars) -> int:
    """Return the size that fills the whole width: the longest bar, or the limit where it is longer but still near."""
    most = max(bar.total for bar in bars.bars)
    return max(most, bars.limit.size) if bars.limit and bars.limit.size <= _REACH * most else most


def limit_text(bars: Bars, limit: Limit, unit_name: str) -> str:
    """The size of a limit, which may be far longer than the bars."""
    return format_bytes(limit.size, unit_name) if bars.kind == "bytes" else draw_size(bars, limit.size, unit_for(0))


def taken(bars: Bars, limit: Limit) -> str:
    """Describe the longest bar as a share of a limit that is too far away to be drawn."""
    return f", of which the longest bar is {max(bar.total for bar in bars.bars) / limit.size:.1%}"


def _lumped(bars: Bars) -> Bars:
    """`bars` with one part for all that are below a fiftieth of the longest bar, if there are several."""
    most = max(bar.total for bar in bars.bars)
    longest = [max(bar.sizes[n] for bar in bars.bars) for n in range(len(bars.parts))]
    small = [n for n, size in enumerate(longest) if 0 < size * _SPLINTERS < most]
    if len(small) < 2 or _is_plain(bars):
        return bars
    large = [n for n in range(len(bars.parts)) if n not in small]
    other = Part("other", "other", "elsewhere")
    merged = (
        replace(bar, sizes=(*(bar.sizes[n] for n in large), sum(bar.sizes[n] for n in small))) for bar in bars.bars
    )
    return replace(bars, parts=(*(bars.parts[n] for n in large), other), bars=tuple(merged))


def _title(bars: Bars, unit: Unit, unit_name: str) -> str:
    """The quantity that the bars measure, its unit, and the limit beside it."""
    title = f"{bars.title}, {unit.name}" if bars.kind == "bytes" else bars.title
    if bars.limit and bars.kind != "percent":
        title += f", and in % of {bars.limit.title} ({limit_text(bars, bars.limit, unit_name)})"
    return printable(title)


def _ends(bars: Bars, bar: Bar, unit: Unit, width: int) -> tuple[str, str]:
    """The names before a bar, and the total behind it."""
    total = draw_size(bars, bar.total, unit)
    if bars.limit and bars.kind != "percent":
        share = bar.total / bars.limit.size
        total += f"  {share:4.0%}" if share >= 0.0995 else f"  {share:4.1%}"
    return _names(bar, width // 3), total


def _names(bar: Bar, width: int) -> str:
    """Join the names that a bar stands for in at most `width` characters; a count stands for names without room."""
    names = [draw_cell(label, unit_for(0)) for label in bar.labels]
    for count in range(len(names), 0, -1):
        more = f" +{len(names) - count}" if count < len(names) else ""
        text = f"{', '.join(names[:count])}{more}"
        if cell_len(text) <= width:
            return text
    # Bars of one model differ in how their names end.
    end = names[0][-_END:]
    return names[0] if cell_len(names[0]) <= width else shorten(names[0], width - cell_len(end)) + end


def draw_size(bars: Bars, size: int, unit: Unit) -> str:
    """Format a size without its unit, which the title has."""
    return draw_bytes(size, unit) if bars.kind == "bytes" else f"{size:,}{'%' if bars.kind == 'percent' else ''}"


def _lengths(bar: Bar, scale: int, room: int) -> list[int]:
    """The characters of each part, at least one of a bar that is not empty."""
    ends = [round(end * room / scale) if scale else 0 for end in accumulate(bar.sizes)]
    if bar.total and not ends[-1]:
        ends = [int(end > 0) for end in accumulate(bar.sizes)]
    return [end - start for start, end in pairwise((0, *ends))]


def _is_plain(bars: Bars) -> bool:
    """Whether no bar has more than one part."""
    return all(sum(map(bool, bar.sizes)) < 2 for bar in bars.bars)


def _key(bars: Bars, inks: dict[int, str], unit: Unit, width: int) -> Iterator[Text]:
    """The legend, with sizes where there is one bar. A mark stays on one line with its name."""
    line = Text()
    for position, ink in inks.items():
        part = bars.parts[position]
        figure = f" {draw_size(bars, bars.bars[0].sizes[position], unit)}" if len(bars.bars) == 1 else ""
        entry = Text.assemble((ink, roles.colour(part.role)), f" {printable(part.title)}{figure}")
        if line and line.cell_len + len(_GAP) + entry.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, _GAP, entry) if line else entry
    yield line
