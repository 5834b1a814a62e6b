"""An answer as a web page, or as a part of one for a notebook: one template, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from memsize.documents import Document
from memsize.documents.sections import Cell, Chart, Column, Label, Missing, Section, Signed, Table, Title
from memsize.render import plot
from memsize.render.cells import MODELLED, draw_cell, draw_failure, draw_phrases
from memsize.render.text import LEFT
from memsize.units import Bytes

if TYPE_CHECKING:
    from jinja2 import Template


def page(document: Document[Any], unit: str, width: int | None = None) -> str:
    """`document` as a page that stands on its own."""
    return _template().render(_context(document, unit), standalone=True) + "\n"


def fragment(document: Document[Any], unit: str, width: int | None = None) -> str:
    """`document` as a part of a page."""
    return _template().render(_context(document, unit), standalone=False)


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("memsize.render", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2")


def _context(document: Document[Any], unit: str) -> dict[str, object]:
    """What the template needs to draw a document."""
    sections = document.sections()
    first = sections[0]
    chart = next((section for section in sections if isinstance(section, Chart)), None)
    return {
        "divisions": list(_divisions(sections)),
        "name": first.name if isinstance(first, Title) else "",
        "picture": chart and plot.picture(chart.timeline, unit),
        "unit": unit,
        "phrases": draw_phrases,
        "stop": draw_failure,
        "modelled": MODELLED,
        "body": _body,
        "total": _total,
        "side": lambda column: "text" if column.kind in LEFT else "number",
    }


def _divisions(sections: Sequence[Section]) -> Iterator[list[tuple[str, Section]]]:
    """The sections with the names of their types. A chart ends a division: its colours are for that alone."""
    division: list[tuple[str, Section]] = []
    for section in sections:
        division.append((type(section).__name__, section))
        if isinstance(section, Chart):
            yield division
            division = []
    yield division


class _Cell(NamedTuple):
    """A drawn cell: its text, its class, a hint, and how long its bar is in percent of the column's largest."""

    text: str
    kind: str
    hint: str
    bar: float


def _body(table: Table, unit: str) -> Iterator[list[_Cell]]:
    largest = [_largest(table, place) for place in range(len(table.columns))]
    for row in table.rows:
        yield [_cell(cell, column, unit, most) for cell, column, most in zip(row, table.columns, largest, strict=True)]


def _total(table: Table, unit: str) -> list[_Cell]:
    return [_cell(cell, column, unit, 0) for cell, column in zip(table.total or (), table.columns, strict=True)]


def _largest(table: Table, place: int) -> int:
    return max((cell for cell in (row[place] for row in table.rows) if isinstance(cell, Bytes)), default=0)


def _cell(cell: Cell, column: Column, unit: str, largest: int) -> _Cell:
    bar = 100 * cell / largest if isinstance(cell, Bytes) and largest else 0
    return _Cell(draw_cell(cell, unit), column.kind, _hint(cell), round(bar, 1))


def _hint(cell: Cell) -> str:
    """What a pointer resting on the cell is told: exact bytes, what a scenario is, why a figure is missing."""
    match cell:
        case Missing():
            return cell.reason
        case Label():
            return cell.hint
        case Bytes() | Signed():
            return f"{cell:,} B" if cell else ""
    return ""
