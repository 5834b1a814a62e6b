"""The first table of an answer as comma-separated values: one header row, exact bytes, no total row.

What else the answer holds is in the json format. Several values in one cell are separated by a semicolon and a space.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from memsize.documents import Document

SEPARATOR = "; "


def draw(document: Document[Any], unit: str, width: int | None = None) -> str:
    """The first of the flat tables of `document`, whatever `unit` says."""
    table = next(iter(document.tables().values()))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(map(_value, row) for row in table.rows)
    return file.getvalue()


def _value(cell: object) -> object:
    return SEPARATOR.join(map(str, cell)) if isinstance(cell, tuple) else cell
