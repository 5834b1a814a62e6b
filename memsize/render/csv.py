"""The first table of an answer as comma-separated values: one header row, exact bytes, no total row.

What else the answer holds is in the json format. Several values in one cell are separated by a semicolon and a space.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

from memsize.documents import Document
from memsize.printable import printable
from memsize.render.screen import WHOLE, Screen

SEPARATOR = "; "
_FORMULA = ("=", "+", "-", "@")
"""What a formula begins with, by OWASP's list; tabs and line ends are written as escapes anyway."""
_NUMBER = re.compile(r"[+-]?[0-9]+([.][0-9]+)?")


_AT_ONCE: Final = 1000
"""Rows in a piece of the text."""


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> Iterator[str]:
    """The first of the flat tables of `document`, piece by piece, whatever `unit` says."""
    table = next(iter(document.tables().values()))
    lines = chain((table.columns,), (map(_value, row) for row in table.rows))
    return iter(lambda: _text(islice(lines, _AT_ONCE)), "")


def _text(lines: Iterable[Iterable[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def _value(cell: object) -> object:
    text = SEPARATOR.join(map(str, cell)) if isinstance(cell, tuple) else cell
    return _inert(printable(text)) if isinstance(text, str) else text


def _inert(text: str) -> str:
    """`text` as a spreadsheet shows it: one that begins like a formula would be run, unless it is a number."""
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text
