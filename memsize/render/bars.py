"""Bars drawn with block characters: a line for each, with the sizes of its parts before it and its total behind."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from memsize.documents.sections import Bar, Bars, Limit
from memsize.printable import printable
from memsize.render.cell_text import columns_of, draw_bytes, draw_cell, shorten
from memsize.render.screen import styled
from memsize.units import Unit, format_bytes, unit_for

WIDTH: Final = 100
"""How wide bars and their figures are where nobody says."""
LEAST: Final = 10
"""How long the longest bar is at least, before a part loses its figures to the column of the others."""
MOST: Final = 60
LABEL: Final = 22
"""How wide the names of what a bar stands for may be, beside the figures of its parts."""
_END: Final = 8
"""How many letters of a longer name's end are kept."""
_TITLE: Final = 10
"""How wide a title may be above narrower figures."""
_GAP: Final = "  "
_MARKS: Final = "█░▒▓▚▞▖▘▄▀▌▐▙▜▟"
"""One for each role: without colours nothing else tells parts apart."""
_OTHER: Final = "·"
_LIMIT: Final = "┃"
_SPLINTERS: Final = 50
"""A part below this fraction of the longest bar needs no mark of its own where it has no column."""
_REACH: Final = 2
"""A limit this many times as long as the longest bar is worth drawing beside it."""


class _Column(NamedTuple):
    """The figures of a part, or of all parts that have no column of their own."""

    title: tuple[str, ...]
    figures: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(map(len, (*self.title, *self.figures)))


def lines(bars: Bars, unit_name: str, width: int | None = None, *, colour: bool = False) -> Iterator[str]:
    """Draw `bars` in at most `width` characters if possible, with bytes in the unit called `unit_name`. The smallest
    parts share a column to save room.

    Marks distinguish the parts, or with `colour` the colours of their roles.
    """
    label = max(LABEL, (width or WIDTH) * 2 // 5) if _plain(bars) else LABEL
    scale = longest_drawn(bars)
    unit = unit_for(scale, unit_name)
    title = printable(f"{bars.title}, {unit.name}" if bars.kind == "bytes" else bars.title)
    names = _Column(tuple(textwrap.wrap(title, label)), tuple(_names(bar, label) for bar in bars.bars))
    totals = _Column((), tuple(_draw(bars, bar.total, unit) for bar in bars.bars))
    shown = _shown(bars, unit, (width or WIDTH) - names.width - totals.width - 2 * len(_GAP) - LEAST)
    marks = _marks(bars, shown)
    columns = [_figures(bars, position, unit, f"{marks[position]} ") for position in shown]
    if shown and len(shown) < len(bars.parts):
        columns.append(_others(bars, shown, unit))
    used = sum(column.width + len(_GAP) for column in (names, *columns, totals))
    room = min(max((width or WIDTH) - used, LEAST), MOST)
    drawn = [_limited(_bar(bar, marks, scale, room), bars, scale, room) for bar in bars.bars]
    texts = [*_rows([names, *columns], drawn, totals, room)]
    if not _plain(bars):
        texts += _key(
            bars, [position for position in marks if position not in shown], marks, width or WIDTH, bool(shown)
        )
    yield from (_inked(line, bars, marks, colour) for line in texts)
    if bars.limit:
        text = f"{printable(bars.limit.title)}: {limit_text(bars, bars.limit, unit_name)}"
        yield f"{_LIMIT} {text}" if bars.limit.size <= scale else text + taken(bars, bars.limit)


def _key(bars: Bars, places: Sequence[int], marks: dict[int, str], width: int, others: bool) -> list[str]:
    """Wrap the legend of the marks of `places`, keeping each mark on one line with its name; `others`: they share a
    column.
    """
    parts = [f"{marks[position]} {printable(bars.parts[position].title)}" for position in places]
    key = _GAP.join(part.replace(" ", "\xa0") for part in (*(["other:"] if others and parts else []), *parts))
    return [line.replace("\xa0", " ") for line in textwrap.wrap(key, width)]


def _marks(bars: Bars, shown: Sequence[int]) -> dict[int, str]:
    """Choose the parts with marks of their own: a private-use character for each, which `_inked` replaces later.

    Parts with figures come first, then parts that share a column but are not too small beside the longest bar.
    """
    least = max(bar.total for bar in bars.bars) / _SPLINTERS
    seen = (position for position in range(len(bars.parts)) if max(bar.sizes[position] for bar in bars.bars) >= least)
    places = dict.fromkeys((*shown, *seen)) if shown else range(len(bars.parts))
    return {position: chr(0xE800 + position) for position in places}


def _inked(line: str, bars: Bars, marks: dict[int, str], colour: bool) -> str:
    """`line` with the marks of the parts, or full blocks in the colours of their roles."""
    for count, (position, mark) in enumerate(marks.items()):
        ink = _MARKS[0] if colour or _plain(bars) else _MARKS[count % len(_MARKS)]
        for run in sorted(set(re.findall(f"{mark}+", line)), key=len, reverse=True):
            line = line.replace(run, styled(ink * len(run), bars.parts[position].role, colour))
    return line


def _names(bar: Bar, width: int) -> str:
    """Join the names that a bar stands for in at most `width` characters; a count stands for names without room."""
    names = [draw_cell(label, unit_for(0)) for label in bar.labels]
    for count in range(len(names), 0, -1):
        more = f" +{len(names) - count}" if count < len(names) else ""
        text = f"{', '.join(names[:count])}{more}"
        if len(text) <= width:
            return text
    # Bars of one model differ in how their names end.
    end = names[0][-_END:]
    return names[0] if columns_of(names[0]) <= width else shorten(names[0], width - columns_of(end)) + end


def _draw(bars: Bars, size: int, unit: Unit) -> str:
    """Format a size without its unit, which the title has; an empty text for 0."""
    if not size:
        return ""
    return draw_bytes(size, unit) if bars.kind == "bytes" else f"{size:,}"


def _shown(bars: Bars, unit: Unit, room: int) -> list[int]:
    """Return the indices of the parts whose figures fit in `room` characters, in their order.

    Bars of a single part have none: their only figure is the total at their end.
    """
    if _plain(bars):
        return []
    weights = [max(bar.sizes[position] for bar in bars.bars) for position in range(len(bars.parts))]
    ends = list(range(len(bars.parts)))
    while ends:
        columns = [_figures(bars, position, unit, "  ") for position in ends]
        columns += [_others(bars, ends, unit)] if len(ends) < len(bars.parts) else []
        if sum(column.width + len(_GAP) for column in columns) <= room:
            return ends
        ends.remove(min(ends, key=weights.__getitem__))
    return []


def _plain(bars: Bars) -> bool:
    """Whether no bar has more than one part."""
    return all(sum(map(bool, bar.sizes)) < 2 for bar in bars.bars)


def _figures(bars: Bars, position: int, unit: Unit, mark: str) -> _Column:
    figures = tuple(_draw(bars, bar.sizes[position], unit) for bar in bars.bars)
    return _Column(_wrapped(mark + bars.parts[position].title, figures), figures)


def _others(bars: Bars, shown: Sequence[int], unit: Unit) -> _Column:
    """The column of all parts without one of their own, even if it is one part: its name is too long for a column."""
    rest = [position for position in range(len(bars.parts)) if position not in shown]
    figures = tuple(_draw(bars, sum(bar.sizes[position] for position in rest), unit) for bar in bars.bars)
    mark = "" if set(rest) <= _marks(bars, shown).keys() else f"{_OTHER} "
    return _Column((f"{mark}other",), figures)


def _wrapped(title: str, figures: Sequence[str]) -> tuple[str, ...]:
    """Wrap a title to the width of its longest word or figure; its mark stays with its first word."""
    mark, words = title[:2], title[2:].split()
    room = max(len(words[0]) + 2, _TITLE, *map(len, (*words, *figures)))
    return tuple(textwrap.wrap(mark + " ".join(words), room))


def longest_drawn(bars: Bars) -> int:
    """Return the size that fills the whole width: the longest bar, or the limit where it is longer but still near."""
    most = max(bar.total for bar in bars.bars)
    return max(most, bars.limit.size) if bars.limit and bars.limit.size <= _REACH * most else most


def _bar(bar: Bar, marks: dict[int, str], scale: int, room: int) -> str:
    """A bar of at most `room` characters; the parts without a mark come last."""
    order = [*marks, *(position for position in range(len(bar.sizes)) if position not in marks)]
    ends = [round(end * room / scale) if scale else 0 for end in accumulate(bar.sizes[position] for position in order)]
    lengths = (end - start for start, end in zip([0, *ends], ends, strict=False))
    drawn = "".join(marks.get(position, _OTHER) * length for position, length in zip(order, lengths, strict=True))
    return drawn or (marks.get(order[0], _OTHER) if bar.total else "")


def limit_text(bars: Bars, limit: Limit, unit_name: str) -> str:
    """The size of a limit, which may be far longer than the bars."""
    return format_bytes(limit.size, unit_name) if bars.kind == "bytes" else f"{limit.size:,}"


def taken(bars: Bars, limit: Limit) -> str:
    """Describe the longest bar as a share of a limit that is too far away to be drawn."""
    return f", of which the longest bar is {max(bar.total for bar in bars.bars) / limit.size:.1%}"


def _limited(drawn: str, bars: Bars, scale: int, room: int) -> str:
    """A bar with the limit marked in it or behind it."""
    if bars.limit is None or bars.limit.size > scale:
        return drawn
    position = min(round(bars.limit.size * room / scale), room - 1)
    return f"{drawn[:position]:<{position}}{_LIMIT}{drawn[position + 1 :]}"


def _rows(columns: Sequence[_Column], drawn: Sequence[str], totals: _Column, room: int) -> Iterator[str]:
    height = max(len(column.title) for column in columns)
    titles = [("",) * (height - len(column.title)) + column.title for column in columns]
    for words in zip(*titles, strict=True):
        yield _line(columns, words, "", room, "")
    for position, bar in enumerate(drawn):
        figures = [column.figures[position] for column in columns]
        yield _line(columns, figures, bar, room, totals.figures[position].rjust(totals.width))


def _line(columns: Sequence[_Column], texts: Sequence[str], bar: str, room: int, total: str) -> str:
    name, *figures = (text.rjust(column.width) for column, text in zip(columns, texts, strict=True))
    return _GAP.join((texts[0].ljust(len(name)), *figures, bar.ljust(room), total)).rstrip()
