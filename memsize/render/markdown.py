"""An answer as GitHub-flavoured markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

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
from memsize.records.fields import Cell, Path, Specs, Words
from memsize.render import WHOLE, Screen, bars, chart
from memsize.render.cell_text import LEFT, draw_cell, draw_failure, draw_phrases, draw_title
from memsize.units import Unit

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#~"})


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """The sections of `document`, bytes in `unit`. Lines are never wrapped: `screen` is ignored."""
    sections = without_repeats(document.sections())
    opening = [section for section in sections if isinstance(section, Title | Verdict)] if document.folded else []
    rest = [section for section in sections if section not in opening]
    texts = ["\n".join(_block(section, unit)) for section in (*opening, *rest)]
    if opening and rest:
        texts = [*texts[: len(opening)], "<details><summary>Details</summary>", *texts[len(opening) :], "</details>"]
    return "\n\n".join(texts) + "\n"


def _block(section: Section, unit: str) -> Iterator[str]:
    match section:
        case Title():
            yield f"## {_escaped(section.name)}"
            yield ""
            yield _escaped(" · ".join(draw_phrases(section, unit)))
        case Verdict():
            yield from "\n\n".join(f"**{_escaped(f.in_brief(unit))}**" for f in section.findings).split("\n")
        case Bars():
            yield "```text"
            yield from (line.plain for line in bars.lines(section, unit))
            yield "```"
        case Chart():
            yield "```text"
            yield from (line.plain for line in chart.lines(section.timeline, unit))
            yield "```"
        case Stop():
            first, reason, reading = draw_failure(section.failure)
            yield f"**{_escaped(first)}**"
            yield ""
            yield from (f"> {_escaped(line)}" for line in reason.splitlines())
            yield ""
            yield _escaped(reading)
        case Table():
            yield f"### {_escaped(section.caption or section.title)}"
            yield ""
            yield from _table(section.usual(), unit)
        case Findings():
            yield f"### {section.title}"
            yield ""
            for number, finding in enumerate(section.findings, 1):
                yield f"{number}. {_escaped(finding.text(unit))}"
        case Notes():
            yield f"### {section.title}"
            yield ""
            yield from (f"- {_escaped(line)}" for line in section.lines)


def _table(table: Table, unit: str) -> Iterator[str]:
    units = table.units(unit)
    titles = [_escaped(draw_title(column, own)) for column, own in zip(table.columns, units, strict=True)]
    rows = [[*map(_cell, row, units)] for row in table.rows]
    if table.total:
        rows.append([f"**{text}**" if text else "" for text in map(_cell, table.total, units)])
    sides = ["left" if column.kind in LEFT else "right" for column in table.columns]
    yield tabulate(rows, titles, tablefmt="pipe", colalign=sides, disable_numparse=True)
    if table.remarks:
        yield ""
        yield from (f"- {_escaped(f'{remark.row}: {remark.status}: {remark.text}')}" for remark in table.remarks)


def _cell(cell: Cell, unit: Unit) -> str:
    text = draw_cell(cell, unit)
    if isinstance(cell, Path | Specs) and text:
        # A backtick would end the code that the name is drawn as.
        return _escaped(text) if "`" in text else f"`{text}`".replace("|", "\\|")
    if isinstance(cell, Words):
        return ", ".join(map(_escaped, cell))
    return _escaped(text)


def _escaped(text: str) -> str:
    return printable(text).translate(_SPECIAL)
