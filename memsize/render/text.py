"""An answer as plain text: complete, or fitted to a terminal's width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memsize.documents import Document
from memsize.documents.sections import Bars, Chart, Column, Findings, Notes, Section, Stop, Table, Title, Verdict
from memsize.printable import printable
from memsize.render import bars, chart
from memsize.render.cells import (
    MODELLED,
    draw_cell,
    draw_failure,
    draw_phrases,
    draw_title,
    shorten,
    shorten_path,
)

GAP = "  "
"""What stands between columns."""

LEFT = ("name", "text", "specs", "words")
"""The kinds of cell that stand at the left of their column; numbers stand at the right."""

LEAST = {"name": 18, "text": 12, "specs": 20, "words": 14}
"""How far a column of texts may be shortened before a column is left out instead."""


def draw(document: Document[Any], unit: str, width: int | None = None) -> str:
    """The sections of `document`, with bytes in `unit`; no line is longer than `width` where that can be."""
    blocks = ("\n".join(_block(section, unit, width)) for section in document.sections())
    return "\n\n".join(blocks) + "\n"


def _block(section: Section, unit: str, width: int | None) -> Iterator[str]:
    match section:
        case Title():
            yield from _heading(printable(section.name), draw_phrases(section, unit), width)
        case Verdict():
            for finding in section.findings:
                yield from _wrapped(finding.in_brief(unit), width)
        case Bars():
            yield from bars.lines(section, unit, width)
        case Chart():
            yield from chart.lines(section.timeline, unit, width)
        case Stop():
            first, reason, reading = draw_failure(section.failure)
            yield from _wrapped(first, width)
            yield from (line for part in reason.splitlines() for line in _wrapped(part, width, "  ", "  "))
            yield from _wrapped(reading, width)
        case Table():
            yield from _table(section, unit, width)
        case Findings():
            yield section.title
            for number, finding in enumerate(section.findings, 1):
                bullet = f"{number:>2}. "
                yield from _wrapped(finding.text(unit), width, bullet, " " * len(bullet))
        case Notes():
            yield section.title
            for line in section.lines:
                yield from _wrapped(line, width, "  - ", "    ")


def _heading(name: str, parts: Sequence[str], width: int | None) -> Iterator[str]:
    """One line where it fits, else as many phrases in each as fit."""
    line = printable(name)
    for part in parts:
        if width is None or len(line) + 3 + len(part) <= width:
            line += f"   {part}"
        else:
            yield from _wrapped(line, width, "", "    ")
            line = f"  {part}"
    yield from _wrapped(line, width, "", "    ")


def _wrapped(text: str, width: int | None, first: str = "", rest: str = "") -> list[str]:
    text = printable(text)
    if width is None:
        return [first + text]
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One column as text: its title's lines, its body and the total below it."""

    column: Column
    title: tuple[str, ...]
    body: tuple[str, ...]
    total: str

    @property
    def width(self) -> int:
        return max(map(len, (*self.title, *self.body, self.total)))

    @property
    def least(self) -> int:
        floor = LEAST.get(self.column.kind)
        return self.width if floor is None else min(self.width, max(floor, *map(len, self.title)))

    def fitted(self, width: int) -> _Drawn:
        """The column in at most `width` characters: paths lose their middle, other texts their end."""
        cut = shorten_path if self.column.kind == "name" else shorten
        return _Drawn(self.column, self.title, tuple(cut(text, width) for text in self.body), cut(self.total, width))


def _table(table: Table, unit: str, width: int | None) -> Iterator[str]:
    if table.caption:
        yield printable(table.caption)
    drawn = _columns(table, unit)
    kept = drawn if width is None else _fit(drawn, width, table.chosen)
    yield _grid(kept, table.total is not None)
    left_out = _left_out(drawn, kept)
    if left_out:
        yield from _wrapped(f"Left out at this width: {left_out}. {table.hint}", width)
    if table.modelled:
        yield from _wrapped(MODELLED, width)
    for remark in table.remarks:
        yield from _wrapped(f"{remark.row}: {remark.status}: {remark.text}", width, "", "  ")


def _columns(table: Table, unit: str) -> list[_Drawn]:
    totals: Sequence[str] = (
        [draw_cell(cell, unit) for cell in table.total] if table.total else [""] * len(table.columns)
    )
    bodies = [tuple(draw_cell(row[place], unit) for row in table.rows) for place in range(len(table.columns))]
    return [
        _Drawn(column, _title(column, unit, body, total), body, total)
        for column, body, total in zip(table.columns, bodies, totals, strict=True)
    ]


def _title(column: Column, unit: str, body: Sequence[str], total: str) -> tuple[str, ...]:
    """A title on as many lines as the numbers below it are wide, the unit of bytes on a line of its own."""
    unit_line = (unit,) if column.kind == "bytes" else ()
    if column.kind in LEFT:
        return (draw_title(column, unit), *unit_line)
    room = max(map(len, (*column.title.split(), *body, total)), default=1)
    return (*textwrap.wrap(column.title, room), *unit_line)


def _fit(columns: Sequence[_Drawn], width: int, chosen: bool) -> list[_Drawn]:
    """The columns that matter most in `width`: texts are shortened first, then the least of them left out."""
    kept = list(columns)
    while not chosen and len(kept) > 2 and _span([column.least for column in kept]) > width:
        kept.remove(min(kept, key=lambda column: column.column.weight))
    room = max(0, width - _span([column.least for column in kept]))
    widths = {}
    # Those that need little come first: no column is cut for a neighbour that is cut all the same.
    for left, column in zip(range(len(kept), 0, -1), sorted(kept, key=_need), strict=True):
        extra = min(_need(column), room if left == 1 else max(room // left, 0))
        widths[column.column.key] = column.least + extra
        room -= extra
    return [column.fitted(widths[column.column.key]) for column in kept]


def _need(column: _Drawn) -> int:
    """By how many characters a column would be shortened at most."""
    return column.width - column.least


def _span(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _left_out(columns: Sequence[_Drawn], kept: Sequence[_Drawn]) -> str:
    """The titles of the columns that are not among `kept`. A share stands behind its figure, and is named with it."""
    keys = {column.column.key for column in kept}
    figures, shares = [], []
    for before, column in zip((columns[0], *columns), columns, strict=False):
        if column.column.key in keys:
            continue
        if column.column.kind == "share":
            shares.append(before.column.title)
        else:
            figures.append(column.column.title)
    parts = [", ".join(figures)] if figures else []
    return "; ".join([*parts, f"percentages of {', '.join(shares)}"] if shares else parts)


def _grid(columns: Sequence[_Drawn], total: bool) -> str:
    from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate

    # Titles go in as rows: tabulate makes a column at least two characters wider than a header.
    row, line = DataRow("", GAP, ""), Line("", "-", GAP, "")
    plain = TableFormat(None, line, None, None, row, row, 0, None)
    height = max(len(column.title) for column in columns)
    titles = [("",) * (height - len(column.title)) + column.title for column in columns]
    rows: list[Any] = [*map(list, zip(*titles, strict=True)), SEPARATING_LINE]
    rows += map(list, zip(*(column.body for column in columns), strict=True))
    if total:
        rows += [SEPARATING_LINE, [column.total for column in columns]]
    aligned = ["left" if column.column.kind in LEFT else "right" for column in columns]
    grid = tabulate(rows, headers=(), tablefmt=plain, disable_numparse=True, colalign=aligned)
    return "\n".join(line.rstrip() for line in grid.splitlines())
