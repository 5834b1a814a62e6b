"""The cells of a page's tables, each drawn only once: scenarios repeat most of each other's rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from markupsafe import Markup, escape

from memsize.documents.sections import Table
from memsize.printable import printable
from memsize.records.cells import Cell, Label, Missing, Path, Signed
from memsize.records.fields import Column
from memsize.records.roles import Role
from memsize.render.cell_text import draw_cell
from memsize.units import Bytes

KEPT: Final = 2**15
"""How many cells are kept drawn: those of some 2,000 layers, in about 10 MB."""


def body(table: Table, unit: str) -> Iterator[Markup]:
    """The rows of `table`, each as its cells."""
    largest = [_largest(table, position) for position in range(len(table.columns))]
    yield from (_row(table, row, largest, unit) for row in table.rows)


def total(table: Table, unit: str) -> Markup:
    """The cells of the row below the table. A total has no bar."""
    return _row(table, table.total or (), [0] * len(table.columns), unit) if table.total else Markup("")


def is_hidden(table: Table, column: Column) -> bool:
    """Whether the reader of a page must choose the column to see it."""
    return column.optional and not table.chosen


def _largest(table: Table, position: int) -> int:
    return max((cell for cell in (row[position] for row in table.rows) if isinstance(cell, Bytes)), default=0)


def _row(table: Table, row: tuple[Cell, ...], largest: list[int], unit: str) -> Markup:
    cells = zip(row, table.columns, largest, strict=True)
    drawn = (
        _drawn(cell, column.kind, column.role, most, unit, is_hidden(table, column)) for cell, column, most in cells
    )
    return Markup("".join(drawn))


# Equal numbers of different types are drawn differently: bytes, counts, shares.
@lru_cache(maxsize=KEPT, typed=True)
def _drawn(cell: Cell, kind: str, role: Role | None, largest: int, unit: str, hidden: bool) -> str:
    """A cell with its bar, which is as long as its share of the column's `largest`.

    Scripts sort and sum `data-value`, which cells of text lack; `data-path` is the module that the cell names.
    """
    bar = round(100 * cell / largest, 1) if isinstance(cell, Bytes) and largest else 0
    text = draw_cell(cell, unit)
    path = printable(cell) if isinstance(cell, Path) else None
    above = text[: text.rfind(".") + 1] if path else ""
    attributes = {
        "class": f"{kind} role-{role.replace(' ', '-')}" if bar and role else kind,
        "data-path": path,
        "data-label": (printable(cell.text) or None) if isinstance(cell, Label) else None,
        "data-value": cell if isinstance(cell, int | float) else None,
        "title": _hint(cell) or None,
        "style": f"--bar:{bar}%" if bar else None,
    }
    written = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value is not None)
    around = f'<span class="above">{escape(above)}</span>' if above else ""
    rest = escape(text.removeprefix(above))
    return f"<td{written}{' hidden' if hidden else ''}>{around}{rest}</td>"


def _hint(cell: Cell) -> str:
    """Return the tooltip of a cell: exact bytes, the hint of a label, or the reason why a figure is missing."""
    match cell:
        case Missing():
            return cell.reason
        case Label():
            return cell.hint
        case Bytes() | Signed():
            return f"{cell:,} B" if cell else ""
    return ""
