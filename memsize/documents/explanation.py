"""An explained snapshot as a document: the verdict, what was alive, the largest of it by line, and what is reserved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, findings_data, plain, values_of
from memsize.documents.sections import Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.cells import Share, Signed
from memsize.records.explanation import ALIVE_FIELDS, PLACE_FIELDS, RESERVED_FIELDS, Explanation
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

    only_brief = False

    def sections(self) -> tuple[Section, ...]:
        explanation = self.answer
        segments = (Bytes(explanation.requested), "in tensors,", Bytes(explanation.reserved_then), "reserved")
        fields = ALIVE_FIELDS.only("category", "bytes", "share", "blocks", "predicted", "difference", "how")
        predicted = Bytes(explanation.predicted.requested) if explanation.predicted else None
        off = Signed(explanation.requested - explanation.predicted.requested) if explanation.predicted else None
        blocks = sum(entry.blocks for entry in explanation.alive)
        total = ("total", Bytes(explanation.requested), Share(1.0), blocks, predicted, off, None)
        caption = f"What was alive {_MOMENTS[explanation.moment]}"
        table = Table.of("alive", "Alive", fields, explanation.alive, explanation, total=total, caption=caption)
        return (
            Title(
                explanation.snapshot, ((f"GPU {explanation.device}",), (_MOMENTS[explanation.moment] + ":", *segments))
            ),
            *self.opening(),
            *self.reasons(),
            table if explanation.predicted else table.without("predicted", "difference"),
            _place_table(explanation),
            _reserved_table(explanation),
            *listed("Notes", explanation.notes),
        )

    def figures(self, unit: str) -> dict[str, Any]:
        explanation = self.answer
        return {
            "schema": SCHEMA,
            **values_of(explanation, "snapshot", "device", "moment", "requested", "reserved_then", "line"),
            **values_of(explanation, "alive", "places"),
            "reserved": {"bytes": explanation.reserved.bytes, **plain(explanation.reserved)},
            **values_of(explanation, "failed", "entries", "predicted"),
            "findings": findings_data(explanation.findings, unit),
            "notes": explanation.notes,
        }


def _place_table(explanation: Explanation) -> Table:
    rest = explanation.places[MOST_PLACES:]
    hint = "JSON and CSV have every place, with its stack."
    caption = "Where the largest of it was made"
    table = Table.of("places", "Places", PLACE_FIELDS, explanation.places[:MOST_PLACES], caption=caption, hint=hint)
    if rest:
        sums = (Bytes(sum(row.bytes for row in rest)), sum(row.blocks for row in rest))
        table = replace(table, rows=(*table.rows, (*sums, None, f"{len(rest)} more places", None, None, None)))
    return table.without_empty("line", "function", "called_from")


def _reserved_table(explanation: Explanation) -> Table:
    caption = "What PyTorch had reserved when the snapshot was taken"
    reserved = explanation.reserved
    total = RESERVED_FIELDS.total("total", reserved, explanation)
    return Table.of("reserved", "Reserved", RESERVED_FIELDS, reserved.parts, explanation, total=total, caption=caption)
