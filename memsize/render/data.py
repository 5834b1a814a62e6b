"""An answer for other programs: all of its data as JSON, or its first table as comma-separated values.

Both have stable names and exact bytes, whatever the unit, and are drawn piece by piece.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final

from memsize.documents import Document
from memsize.printable import printable
from memsize.records.fields import FlatTable
from memsize.render import WHOLE, Screen

_AT_ONCE: Final = 1000
"""Rows of a table that are drawn together: the encoder makes fifty small texts of one, and keeps all to the end."""
_FORMULA: Final = ("=", "+", "-", "@")
"""What a formula begins with, by OWASP's list; tabs and line ends are written as escapes anyway."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]+([.][0-9]+)?")


def draw_json(document: Document[Any], unit: str, screen: Screen = WHOLE) -> Iterator[str]:
    """Yield the JSON of `document` piece by piece; `unit` is for the sentences of findings, figures are in bytes."""
    data, indent = document.data(unit), document.indent
    if indent is None:
        yield from (_dumps(data), "\n")
        return
    inner = "\n" + " " * indent
    before = "{"
    for name, value in data.items():
        yield f"{before}{inner}{_dumps(name)}: "
        parts = _records(value, indent) if isinstance(value, FlatTable) else (_dumps(value, indent),)
        yield from (part.replace("\n", inner) for part in parts)
        before = ","
    yield "\n}\n"


def _records(table: FlatTable, indent: int) -> Iterator[str]:
    rows = iter(table.rows)
    before, end = "[", "[]"
    while some := [dict(zip(table.columns, row, strict=True)) for row in islice(rows, _AT_ONCE)]:
        # Without the brackets of the list around them.
        yield before + _dumps(some, indent)[1:-2]
        before, end = ",", "\n]"
    yield end


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False)


def draw_csv(document: Document[Any], unit: str, screen: Screen = WHOLE) -> Iterator[str]:
    """The first of the flat tables of `document`: a header row and no total row; several values in a cell are separated
    by a semicolon.
    """
    table = next(iter(document.tables().values()))
    lines = chain((table.columns,), (map(_value, row) for row in table.rows))
    while some := [*islice(lines, _AT_ONCE)]:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(some)
        yield file.getvalue()


def _value(cell: object) -> object:
    """A cell as a spreadsheet shows it: a text that begins like a formula would be run, unless it is a number."""
    text = "; ".join(map(str, cell)) if isinstance(cell, tuple) else cell
    if not isinstance(text, str):
        return text
    text = printable(text)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text
