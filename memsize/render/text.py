"""An answer as plain text: complete, or fitted to a terminal's width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

from rich.cells import cell_len
from rich.text import Text
from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate

from memsize.documents import Document
from memsize.documents.sections import (
    Bars,
    Chart,
    Findings,
    Notes,
    Section,
    Stop,
    Table,
    Title,
    Verdict,
    without_repeats,
)
from memsize.printable import printable
from memsize.records.fields import Column
from memsize.render import WHOLE, Screen, bars, chart, painted
from memsize.render.cell_text import (
    LEFT,
    draw_cell,
    draw_failure,
    draw_phrases,
    draw_title,
    shorten,
    shorten_path,
    shorten_text,
    wrapped,
)
from memsize.units import Unit

_BESIDE: Final = 2
"""Lines of a screen that are not the answer's: the one of the command above it, and the prompt below."""
_SHORT_TABLE: Final = 8
"""The lines that the main table gets of a screen before the verdict has more than a sentence: two rows, a total."""
_ALARMS: Final = frozenset(
    ("out-of-memory", "run-out-of-memory", "run-child-out-of-memory", "fit-exceeds", "fit-none", "fit-fixed-cost")
)
"""Findings that say that something does not fit."""

_MOST_LINES: Final = 40
"""The lines of an answer in brief."""

_GAP: Final = "  "
_GRID: Final = TableFormat(
    None, Line("", "-", _GAP, ""), None, None, DataRow("", _GAP, ""), DataRow("", _GAP, ""), 0, None
)
"""Columns with a gap between them, and rules of hyphens."""

LEAST = {"name": 18, "text": 12, "specs": 20, "words": 14}
"""How far a column of texts may be shortened before a column is left out instead."""


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """Draw the sections of `document`, with bytes in `unit`; lines are no wider than the screen if possible.

    With a screen height, only as much is drawn as has room, the title and the start of the verdict in any case.
    """
    if screen.height is None:
        blocks = [[*_block(section, unit, screen)] for section in without_repeats(document.sections())]
    else:
        blocks = _screenful(document, unit, screen, screen.height)
    end = Text("\n")
    text = Text("\n\n").join(end.join(block) for block in blocks) + end
    return painted(text) if screen.colour else text.plain


def draw_brief(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """Draw the title, verdict and findings in at most `_MOST_LINES` lines, for programs that read text; no tables."""
    sections = without_repeats(document.sections())
    chosen = [section for section in sections if isinstance(section, (Title, Stop, Verdict, Findings, Notes))]
    lines = [line.plain for section in chosen for line in _block(section, unit, screen)]
    if len(lines) > _MOST_LINES:
        rest = len(lines) - _MOST_LINES + 1
        lines[_MOST_LINES - 1 :] = [f"{rest} more lines, and all tables: -f json, or without -f"]
    return "\n".join(lines) + "\n"


def _screenful(document: Document[Any], unit: str, screen: Screen, height: int) -> list[list[Text]]:
    """The sections that a screen has room for, some in a shorter version, and a line that names the others.

    Room goes first to the title, then to the verdict, the picture and the main table, for which some is reserved.
    """
    sections, main = without_repeats(document.sections()), document.main_table()
    whole = [[*_block(section, unit, screen)] for section in sections]
    room = height - _BESIDE
    if sum(len(block) + 1 for block in whole) - 1 <= room:
        return whole
    ranks = [1 if document.is_verdict(section) else _rank(section, main) for section in sections]
    reserved = {n: len(whole[n]) if rank == 2 else min(len(whole[n]), _SHORT_TABLE) for n, rank in enumerate(ranks)}
    room -= len(_more(sections, screen))
    blocks: dict[int, list[Text]] = {}
    for position in sorted(range(len(sections)), key=ranks.__getitem__):
        rank = ranks[position]
        later = sum(lines + 1 for n, lines in reserved.items() if rank < ranks[n] < 4)
        # What is not on every screen is there as a whole, or not at all.
        shorter = _shorter(document, sections[position], unit, screen) if rank < 4 else iter(())
        for lines in chain((whole[position],), shorter):
            if len(lines) + 1 <= room - later:
                break
        if rank < 2 or len(lines) + 1 <= room - later:
            blocks[position] = lines
            room -= len(lines) + (rank > 1)
    left_out = [section for n, section in enumerate(sections) if blocks.get(n) is not whole[n]]
    spare = height - _BESIDE - len(_more(left_out, screen)) - sum(len(blocks[n]) + (ranks[n] > 1) for n in blocks)
    for position in (n for n, rank in enumerate(ranks) if rank == 1):
        # What was reserved and is not needed lengthens the verdict.
        longer = chain((whole[position],), _shorter(document, sections[position], unit, screen))
        most = len(blocks[position]) + max(spare, 0)
        blocks[position] = next((lines for lines in longer if len(lines) <= most), blocks[position])
    drawn = [blocks[n] for n in sorted(blocks)]
    opening = sum(rank < 2 for rank in ranks)
    # Without blank lines between what every screen has.
    together = [[line for block in drawn[:opening] for line in block], *drawn[opening:]]
    together[-1] = [*together[-1], *_more(left_out, screen)]
    return together


def _shorter(document: Document[Any], section: Section, unit: str, screen: Screen) -> Iterator[list[Text]]:
    """Shorter and shorter versions of `section`: a chart becomes lower."""
    if isinstance(section, Chart):
        for height in range(chart.HEIGHT - 1, chart.LEAST_HEIGHT - 1, -1):
            yield [*chart.lines(section.timeline, unit, screen.width, height)]
    for version in document.shorter(section):
        yield [*_block(version, unit, screen)]


def _rank(section: Section, main: str) -> int:
    """The importance of a section on a screen without room for all; 0 is the highest, and 1 that of a verdict."""
    match section:
        case Title() | Stop():
            return 0
        case Bars() | Chart():
            return 2
        case Table() if section.name == main:
            return 3
    return 4


def _more(left_out: Sequence[Section], screen: Screen) -> list[Text]:
    """Return the lines that name the sections without room on the screen."""
    names, findings = [], 0
    for section in left_out:
        match section:
            case Findings():
                findings += len(section.findings)
            case Bars():
                names.append("bars")
            case Table() | Notes():
                title = section.title
                names.append(title if title[:2].isupper() else title[:1].lower() + title[1:])
    names += [f"{findings} finding{'' if findings == 1 else 's'}"] if findings else []
    for count in range(len(names), 0, -1):
        more = f" and {len(names) - count} more" if count < len(names) else ""
        text = f"More with --full: {', '.join(names[:count])}{more}"
        if screen.width is None or len(text) <= screen.width:
            break
    return wrapped(text, screen.width, style="dim")


def _block(section: Section, unit: str, screen: Screen) -> Iterator[Text]:
    width = screen.width
    match section:
        case Title():
            yield from _heading(printable(section.name), draw_phrases(section, unit), width)
        case Verdict():
            for finding in section.findings:
                yield from wrapped(finding.in_brief(unit), width, style="bold red" if finding.code in _ALARMS else "")
        case Bars():
            yield from bars.lines(section, unit, width, colour=screen.colour)
        case Chart():
            yield from chart.lines(section.timeline, unit, width)
        case Stop():
            first, reason, reading = draw_failure(section.failure)
            yield from wrapped(first, width)
            yield from (line for part in reason.splitlines() for line in wrapped(part.strip(), width, "  ", "    "))
            yield from wrapped(reading, width)
        case Table():
            yield from _table(section, unit, width)
        case Findings():
            yield Text(section.title, "bold")
            for number, finding in enumerate(section.findings, 1):
                bullet = f"{number:>2}. "
                yield from wrapped(finding.text(unit), width, bullet, " " * len(bullet))
        case Notes():
            yield Text(section.title, "bold")
            for line in section.lines:
                yield from wrapped(line, width, "  - ", "    ")


def _heading(name: str, parts: Sequence[str], width: int | None) -> Iterator[Text]:
    """Put the heading on one line where it fits, else on several, each with as many phrases as fit."""
    texts = [name]
    for part in parts:
        if width is None or len(texts[-1]) + 3 + len(part) <= width:
            texts[-1] += f"   {part}"
        else:
            texts.append(f"  {part}" if width is None or len(part) + 2 <= width else part)
    first, *others = (line for text in texts for line in wrapped(text, width, "", "    "))
    first.stylize("bold", 0, len(name))
    yield from (first, *others)


@dataclass(frozen=True)
class _Drawn:
    """One column as text: its title's lines, its body and the total below it."""

    column: Column
    title: tuple[str, ...]
    body: tuple[str, ...]
    total: str

    @classmethod
    def of(cls, table: Table, position: int, unit: Unit) -> _Drawn:
        """The column of `table` at `position`, with bytes in `unit`."""
        column = table.columns[position]
        body = tuple(draw_cell(row[position], unit) for row in table.rows)
        total = draw_cell(table.total[position], unit) if table.total else ""
        return cls(column, _title(column, unit, body, total), body, total)

    @cached_property
    def width(self) -> int:
        return max(map(cell_len, (*self.title, *self.body, self.total)))

    @property
    def least(self) -> int:
        floor = LEAST.get(self.column.kind)
        return self.width if floor is None else min(self.width, max(floor, *map(len, self.title)))

    @property
    def slack(self) -> int:
        """The number of characters by which it can be shortened."""
        return self.width - self.least

    def fitted(self, width: int) -> _Drawn:
        """The column in at most `width` characters: paths lose their middle, other texts their end."""
        cut = {"name": shorten_path, "text": shorten_text}.get(self.column.kind, shorten)
        return _Drawn(self.column, self.title, tuple(cut(text, width) for text in self.body), cut(self.total, width))


def _table(table: Table, unit: str, width: int | None) -> Iterator[Text]:
    table = table.usual()
    if table.caption:
        yield from wrapped(table.caption, width, style="bold")
    drawn = [_Drawn.of(table, position, own_unit) for position, own_unit in enumerate(table.units(unit))]
    columns_shown = drawn if width is None else _fit(drawn, width, table.chosen)
    for line in _grid(columns_shown, table.total is not None):
        yield Text(line, "" if line.strip("- ") else "dim")
    if table.hint and (left_out := _left_out(drawn, columns_shown)):
        yield from wrapped(f"Hidden at this width: {left_out}. {table.hint}", width)
    for remark in table.remarks:
        yield from wrapped(f"{remark.row}: {remark.status}: {remark.text}", width, "", "  ")


def _title(column: Column, unit: Unit, body: Sequence[str], total: str) -> tuple[str, ...]:
    """Wrap a title to the width of the numbers below it, with the unit of bytes on a line of its own."""
    unit_line = (unit.name,) if column.kind == "bytes" else ()
    if column.kind in LEFT:
        return (draw_title(column, unit), *unit_line)
    room = max(map(len, (*column.title.split(), *body, total)), default=1)
    return (*textwrap.wrap(column.title, room), *unit_line)


def _fit(columns: Sequence[_Drawn], width: int, chosen: bool) -> list[_Drawn]:
    """Fit columns into `width`: texts are shortened first, then the columns of least weight are left out."""
    columns_shown = list(columns)
    while not chosen and len(columns_shown) > 2 and _span([column.least for column in columns_shown]) > width:
        least = min(columns_shown, key=lambda column: column.column.weight).column.key
        columns_shown = [column for column in columns_shown if least not in (column.column.key, column.column.beside)]
    room = max(0, width - _span([column.least for column in columns_shown]))
    widths = {}
    # Those that need little come first: no column is cut for a neighbour that is cut all the same.
    by_slack = sorted(columns_shown, key=lambda column: column.slack)
    for left, column in zip(range(len(by_slack), 0, -1), by_slack, strict=True):
        extra = min(column.slack, room if left == 1 else max(room // left, 0))
        widths[column.column.key] = column.least + extra
        room -= extra
    return [column.fitted(widths[column.column.key]) for column in columns_shown]


def _span(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _left_out(columns: Sequence[_Drawn], columns_shown: Sequence[_Drawn]) -> str:
    """Name the columns that are not among `columns_shown`. A column beside another is named with it."""
    keys = {column.column.key for column in columns_shown}
    figures: list[str] = []
    shares: list[str] = []
    for before, column in zip((columns[0], *columns), columns, strict=False):
        if column.column.key in keys:
            continue
        if column.column.kind == "share":
            if before.column.key in keys:
                shares.append(before.column.title)
        elif column.column.beside and column.column.beside not in keys:
            figures[-1] += f" … {column.column.title}"
        else:
            figures.append(column.column.alone or column.column.title)
    parts = [", ".join(figures)] if figures else []
    return "; ".join([*parts, f"percentages of {', '.join(shares)}"] if shares else parts)


def _grid(columns: Sequence[_Drawn], total: bool) -> list[str]:
    """The lines of a table whose titles stand above a rule, and its total below another."""
    height = max(len(column.title) for column in columns)
    titles = [("",) * (height - len(column.title)) + column.title for column in columns]
    rows: list[Sequence[str] | str] = [*zip(*titles, strict=True), SEPARATING_LINE]
    rows += zip(*(column.body for column in columns), strict=True)
    if total:
        rows += [SEPARATING_LINE, [column.total for column in columns]]
    sides = ["left" if column.column.kind in LEFT else "right" for column in columns]
    drawn = tabulate(rows, tablefmt=_GRID, colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in drawn.splitlines()]
