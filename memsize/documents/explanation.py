"""An explained snapshot as a document: the verdict, what was alive, the largest of it by line, and what is reserved."""

from __future__ import annotations

from typing import Any, Final

from memsize.documents import MOST_SENTENCES, Document, findings_data
from memsize.documents.sections import Section, Table, Title, listed
from memsize.records.cells import Cell, Share, Signed
from memsize.records.explanation import Alive, Explanation, Place, category_noun
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
_HOW: Final = {
    "recorded": "the snapshot says so",
    "stack": "inferred from the stack",
    "lifetime": "inferred from stack and lifetime",
    "size": "inferred from the size",
    "unknown": "",
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
    columns = (
        Column("category", "alive", "text", 100, "what the blocks are for"),
        Column("bytes", "holds", "bytes", 99, "live bytes at that moment"),
        Column("share", "% of all", "share", 80, "part of all live bytes"),
        Column("blocks", "blocks", "count", 70, "how many blocks"),
        Column("predicted", "predicted", "bytes", 95, "live bytes at the peak that memsize predicts"),
        Column("difference", "difference", "bytes", 90, "found beyond the prediction"),
        Column("how", "known by", "text", 60, "how the category is known"),
    )
    rows = tuple(_alive_cells(each, found) for each in found.alive)
    predicted = Bytes(found.predicted.requested) if found.predicted else None
    off = Signed(found.requested - found.predicted.requested) if found.predicted else None
    blocks = sum(each.blocks for each in found.alive)
    total: tuple[Cell, ...] = ("total", Bytes(found.requested), Share(1.0), blocks, predicted, off, None)
    table = Table("alive", "Alive", columns, rows, total, caption=f"What was alive {_MOMENTS[found.moment]}")
    return table if found.predicted else table.without("predicted", "difference")


def _alive_cells(each: Alive, found: Explanation) -> tuple[Cell, ...]:
    predicted = None if each.predicted is None else Bytes(each.predicted)
    difference = None if each.predicted is None else Signed(each.bytes - each.predicted)
    share = Share(each.bytes / found.requested) if found.requested else None
    noun = category_noun(each.category)
    return (noun, Bytes(each.bytes), share, each.blocks, predicted, difference, _HOW[each.how] or None)


def _place_table(found: Explanation) -> Table:
    columns = (
        Column("bytes", "holds", "bytes", 100, "live bytes of all its blocks"),
        Column("blocks", "blocks", "count", 90, "how many blocks"),
        Column("largest", "largest", "bytes", 70, "the largest of them"),
        Column("category", "as", "text", 95, "what they are for", alone="role"),
        Column("line", "made at", "text", 99, "the line above PyTorch that allocates"),
        Column(
            "function",
            "in",
            "text",
            85,
            "the function that the line is in; of backward the autograd node",
            alone="function",
        ),
        Column("called_from", "called from", "text", 80, "the program's own line, where that is another one"),
    )
    shown, rest = found.places[:MOST_PLACES], found.places[MOST_PLACES:]
    more = sum(place.bytes for place in rest)
    hint = "JSON and CSV have every place, with its stack."
    rows = tuple(map(_place_cells, shown))
    if rest:
        rows += (
            (Bytes(more), sum(place.blocks for place in rest), None, f"{len(rest)} more places", None, None, None),
        )
    table = Table("places", "Places", columns, rows, caption="Where the largest of it was made", hint=hint)
    return table.without_empty("line", "function", "called_from")


def _place_cells(place: Place) -> tuple[Cell, ...]:
    return (
        Bytes(place.bytes),
        place.blocks,
        Bytes(place.largest),
        category_noun(place.category),
        place.line,
        place.function or None,
        place.called_from,
    )


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
