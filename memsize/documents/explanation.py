"""An explained snapshot as a document: the verdict, what was alive, the largest of it by line, and what is reserved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from memsize.documents import MOST_SENTENCES, Document, findings_data
from memsize.documents.sections import Section, Table, Title, listed
from memsize.records.cells import Share, Signed
from memsize.records.explanation import ALIVE_FIELDS, PLACE_FIELDS, Explanation
from memsize.records.fields import Column
from memsize.records.finding import Finding
from memsize.units import Bytes

SCHEMA: Final = "memsize.explanation/1"
MOST_PLACES: Final = 12
"""Places that are shown; JSON and CSV have all."""

_MOMENTS: Final = {
    "out of memory": "when memory ran out",
    "peak": "at the peak of the history",
    "end": "when the snapshot was taken",
}


class ExplanationDocument(Document[Explanation]):
    """An explained snapshot."""

    def sections(self) -> tuple[Section, ...]:
        """The verdict first, then what it rests on."""
        found = self.answer
        return (
            _title(found),
            *self.opening(),
            *self.reasons(),
            _alive_table(found),
            _place_table(found),
            _reserved_table(found),
            *listed("Notes", found.notes),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """What was found, most important first."""
        return self.answer.findings[:MOST_SENTENCES]

    def figures(self, unit: str) -> dict[str, Any]:
        """Everything."""
        found = self.answer
        return {
            "schema": SCHEMA,
            "snapshot": found.snapshot,
            "device": found.device,
            "moment": found.moment,
            "requested": found.requested,
            "reserved_then": found.reserved_then,
            "line": found.line,
            "alive": [each._asdict() for each in found.alive],
            "places": [each._asdict() for each in found.places],
            "reserved": {"bytes": found.reserved.bytes, **found.reserved._asdict()},
            "failed": found.failed and found.failed._asdict(),
            "entries": found.entries,
            "predicted": found.predicted and found.predicted._asdict(),
            "findings": findings_data(found.findings, unit),
            "notes": found.notes,
        }


def _title(found: Explanation) -> Title:
    held = (Bytes(found.requested), "in tensors,", Bytes(found.reserved_then), "reserved")
    return Title(found.snapshot, ((f"GPU {found.device}",), (_MOMENTS[found.moment] + ":", *held)))


def _alive_table(found: Explanation) -> Table:
    fields = ALIVE_FIELDS.only("category", "bytes", "share", "blocks", "predicted", "difference", "how")
    predicted = Bytes(found.predicted.requested) if found.predicted else None
    off = Signed(found.requested - found.predicted.requested) if found.predicted else None
    blocks = sum(each.blocks for each in found.alive)
    total = ("total", Bytes(found.requested), Share(1.0), blocks, predicted, off, None)
    caption = f"What was alive {_MOMENTS[found.moment]}"
    table = Table.of("alive", "Alive", fields, found.alive, found, total=total, caption=caption)
    return table if found.predicted else table.without("predicted", "difference")


def _place_table(found: Explanation) -> Table:
    rest = found.places[MOST_PLACES:]
    hint = "JSON and CSV have every place, with its stack."
    caption = "Where the largest of it was made"
    table = Table.of("places", "Places", PLACE_FIELDS, found.places[:MOST_PLACES], caption=caption, hint=hint)
    if rest:
        sums = (Bytes(sum(place.bytes for place in rest)), sum(place.blocks for place in rest))
        table = replace(table, rows=(*table.rows, (*sums, None, f"{len(rest)} more places", None, None, None)))
    return table.without_empty("line", "function", "called_from")


def _reserved_table(found: Explanation) -> Table:
    columns = (
        Column("part", "reserved by PyTorch", "text", 100, "what the allocator's segments hold"),
        Column("bytes", "holds", "bytes", 99, "bytes of them"),
        Column("share", "% of all", "share", 80, "part of all segments"),
    )
    held = found.reserved
    parts = (
        ("tensors", held.requested),
        ("rounding of blocks", held.rounding),
        ("given up, but other streams may use it", held.waiting),
        ("free between blocks in use", held.pieces),
        ("free in whole segments, which empty_cache returns", held.cached),
    )
    rows = tuple((name, Bytes(size), Share(size / held.bytes) if held.bytes else None) for name, size in parts if size)
    caption = "What PyTorch had reserved when the snapshot was taken"
    return Table("reserved", "Reserved", columns, rows, ("total", Bytes(held.bytes), Share(1.0)), caption=caption)
