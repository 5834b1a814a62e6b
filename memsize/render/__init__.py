"""A report in the format that its reader wants: text, markdown, json, csv or html.

Each format is one module with one function. They draw the same sections and add no fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memsize.documents.layers import COLUMNS
from memsize.documents.report import sections
from memsize.documents.sections import Section
from memsize.errors import OutputError, UnknownOutputError
from memsize.units import DECIMAL, UNITS

if TYPE_CHECKING:
    from memsize.records.report import Report


__all__ = ["COLUMNS", "FORMATS", "check_format", "draw", "format_of", "render"]

FORMATS: dict[str, tuple[str, ...]] = {
    "text": (".txt",),
    "markdown": (".md", ".markdown"),
    "json": (".json",),
    "csv": (".csv",),
    "html": (".html", ".htm"),
}
"""The formats, each with the suffixes of its files."""


def render(
    report: Report,
    format: str,
    *,
    unit: str = "MiB",
    depth: int | None = None,
    columns: Sequence[str] | None = None,
    width: int | None = None,
) -> str:
    """`report` in one of `FORMATS`, ending in a newline.

    `unit` is what bytes are drawn in (json and csv always hold exact bytes). `depth` cuts the layer table, whose rows
    still add up; `columns` picks from `COLUMNS`. Text fits `width` characters when it is given, and is complete when it
    isn't. json holds everything, whatever `depth` and `columns` say; csv holds the layer table. Raises `OutputError`
    for an unknown format, unit or column.
    """
    check_format(format)
    _check(unit, UNITS | DECIMAL, "unit")
    for column in columns or ():
        _check(column, COLUMNS, "column")
    if depth is not None and depth < 0:
        raise OutputError(f"depth {depth} is below the model itself, which is depth 0")
    chosen = None if columns is None else ("layer", *(key for key in dict.fromkeys(columns) if key != "layer"))
    if format == "json":
        from memsize.render import json

        return json.render(report, unit)
    if format == "csv":
        from memsize.render import csv

        return csv.render(report, depth, chosen)
    return draw(sections(report, depth=depth, columns=chosen), format, unit, width)


def draw(parts: Sequence[Section], format: str, unit: str = "MiB", width: int | None = None) -> str:
    """The sections of any document as text, markdown or html, ending in a newline.

    Raises `OutputError` for an unknown format or unit.
    """
    _check(format, ("text", "markdown", "html"), "format")
    _check(unit, UNITS | DECIMAL, "unit")
    if format == "markdown":
        from memsize.render import markdown

        return markdown.render(parts, unit)
    if format == "html":
        from memsize.render import html

        return html.render(parts, unit)
    from memsize.render import text

    return text.render(parts, unit, width)


def check_format(name: str) -> None:
    """Raise `OutputError` unless `name` is one of `FORMATS`."""
    _check(name, FORMATS, "format")


def format_of(name: str, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> str:
    """Which of `formats` a file called `name` is in, by its suffix; raises `OutputError` when none has it."""
    for format, suffixes in formats.items():
        if name.lower().endswith(suffixes):
            return format
    known = ", ".join(suffix for suffixes in formats.values() for suffix in suffixes)
    raise OutputError(f"cannot tell a format from the file name {name!r}: end it in one of {known}, or name the format")


def _check(name: str, known: Sequence[str] | dict[str, tuple[str, ...]] | dict[str, int], what: str) -> None:
    if name not in known:
        raise UnknownOutputError(what, name, known)
