"""The unit that an answer's sizes are drawn in where nobody names one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from memsize.documents import Document
from memsize.documents.sections import Bars, Chart, Section, Table
from memsize.units import UNITS, Bytes, telling_unit

USUAL: Final = "MiB"


def unit_of(document: Document[Any]) -> str:
    """MiB; or for a tiny model the unit in which the largest of the sizes below each other says something.

    In MiB a table of its layers would be a column of ``<0.01``.
    """
    least = UNITS[USUAL] // 10
    # What is drawn as bars is most of it, and costs less than all sections.
    bars = document.bars()
    if bars and any(size > least for size in _sizes([bars])):
        return USUAL
    return telling_unit(max(_sizes(document.sections()), default=0), USUAL)


def _sizes(sections: Iterable[Section]) -> Iterator[int]:
    for section in sections:
        if isinstance(section, Bars) and section.kind == "bytes":
            yield from (bar.total for bar in section.bars)
        elif isinstance(section, Chart):
            yield max(section.timeline.reserved, default=0)
        elif isinstance(section, Table):
            yield from (cell for row in section.rows for cell in row if isinstance(cell, Bytes))
