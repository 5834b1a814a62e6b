"""A report as a web page, or as a fragment for a notebook: one template, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from memsize.documents.sections import Cell, Column, Heading, Label, Missing, Section, Signed, Table, Title
from memsize.render.cells import MODELLED, draw, draw_failure, draw_heading, draw_phrases
from memsize.render.text import LEFT
from memsize.units import Bytes

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def render(parts: Iterable[Section], unit: str) -> str:
    """`parts` as a page that stands on its own."""
    return _template().render(**context(parts, unit), standalone=True) + "\n"


def embedded(parts: Iterable[Section], unit: str = "MiB") -> str:
    """`parts` as a part of a page."""
    return _template().render(**context(parts, unit), standalone=False)


@cache
def environment() -> Environment:
    """Where the templates of pages are found, and how they are read."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("memsize.render", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _template() -> Template:
    return environment().get_template("report.html.j2")


def context(parts: Iterable[Section], unit: str) -> dict[str, object]:
    """What the template of a report needs to draw `parts`."""
    parts = tuple(parts)
    heading = next(iter(parts), None)
    return {
        "parts": [(type(part).__name__, part) for part in parts],
        "name": heading.model if isinstance(heading, Heading) else heading.name if isinstance(heading, Title) else "",
        "unit": unit,
        "phrases": draw_heading,
        "words": draw_phrases,
        "stop": draw_failure,
        "modelled": MODELLED,
        "body": _body,
        "total": _total,
        "side": lambda column: "text" if column.kind in LEFT else "number",
    }


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
    return _Cell(draw(cell, unit), column.kind, _hint(cell), round(bar, 1))


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
