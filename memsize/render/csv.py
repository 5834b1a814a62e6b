"""The layer table as comma-separated values, for spreadsheets and scripts: one header row, exact bytes, no total row.

A csv file holds one table; scenarios, tensors and findings are in the json format. Several values in one cell are
separated by a semicolon and a space.
"""

from __future__ import annotations

from collections.abc import Sequence

from memsize.documents.data import as_csv
from memsize.documents.layers import COLUMNS, layer_table
from memsize.documents.sections import Cell, Path, Specs, Words
from memsize.records.report import Report

SEPARATOR = "; "

NAMES = {
    "layer": "path",
    "type": "type",
    "output": "outputs",
    "calls": "calls",
    "parameters": "parameters",
    "dtype": "stored_as",
    "stored": "parameter_bytes",
    "buffers": "buffer_bytes",
    "unregistered": "attribute_bytes",
    "cast": "cast_bytes",
    "new": "output_bytes",
    "saved": "saved_bytes",
    "notes": "marks",
}
"""What each column is called in a file: the names that the json format has for the same figures."""


def render(report: Report, depth: int | None = None, columns: Sequence[str] | None = None) -> str:
    """The layer table of `report`, all its columns unless some are chosen."""
    table = layer_table(report, depth, columns or COLUMNS)
    names = [NAMES[column.key] for column in table.columns]
    return as_csv(names, ([_value(cell) for cell in row] for row in table.rows))


def _value(cell: Cell) -> str | int:
    if cell is None:
        return ""
    if isinstance(cell, Words | Specs):
        return SEPARATOR.join(map(str, cell))
    if isinstance(cell, Path):
        return str(cell)
    if isinstance(cell, int):
        return int(cell)
    return str(cell)
