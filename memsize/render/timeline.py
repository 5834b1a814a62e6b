"""A timeline in the format that its reader wants: text, json, csv or html; a snapshot is not drawn but pickled."""

from __future__ import annotations

import json
from typing import Final

from memsize.documents.data import as_csv
from memsize.documents.timeline import timeline_sections
from memsize.records.timeline import Timeline, to_data
from memsize.render import draw

FORMATS: Final[dict[str, tuple[str, ...]]] = {
    "text": (".txt",),
    "json": (".json",),
    "csv": (".csv",),
    "html": (".html", ".htm"),
    "snapshot": (".pickle", ".pkl"),
}
"""The formats, each with the suffixes of its files."""


def render(found: Timeline, format: str, unit: str = "MiB", width: int | None = None) -> str:
    """`found` as text, json, csv or html, ending in a newline. Text fits `width` characters when it is given.

    json and csv hold exact bytes, one value per event and column. Raises `OutputError` for an unknown unit.
    """
    if format == "json":
        return json.dumps(to_data(found)) + "\n"
    if format == "csv":
        return _csv(found)
    if format == "html":
        from memsize.render import plot

        return plot.render(found, unit)
    return _text(found, unit, width)


def _text(found: Timeline, unit: str, width: int | None) -> str:
    from memsize.render import chart

    title, *rest = timeline_sections(found)
    parts = [draw([title], "text", unit, width)]
    if len(found):
        parts += [chart.render(found, unit, width), draw(rest, "text", unit, width)]
    return "\n".join(parts)


def _csv(found: Timeline) -> str:
    columns = found.table()
    return as_csv(columns, zip(*columns.values(), strict=True))
