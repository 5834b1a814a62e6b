"""An answer as JSON for scripts: its document's data with stable names and exact integers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from memsize.documents import Document
from memsize.records.fields import FlatTable
from memsize.render.screen import WHOLE, Screen

_AT_ONCE: Final = 1000
"""Rows of a table that are drawn together: the encoder makes fifty small texts of one, and keeps all to the end."""


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> Iterator[str]:
    """Yield the JSON of `document` piece by piece; `unit` is for the sentences of findings, figures are in bytes."""
    data = document.data(unit)
    if document.indent is None:
        return iter((_dumps(data), "\n"))
    return _members(data, document.indent)


def _members(data: dict[str, Any], indent: int) -> Iterator[str]:
    """Yield the output of `json.dumps` for `data` piece by piece, with each table as its records."""
    inner = "\n" + " " * indent
    before = "{"
    for name, value in data.items():
        yield f"{before}{inner}{_dumps(name)}: "
        if isinstance(value, FlatTable):
            yield from (part.replace("\n", inner) for part in _records(value, indent))
        else:
            yield _dumps(value, indent).replace("\n", inner)
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
