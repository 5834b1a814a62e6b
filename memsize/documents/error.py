"""An out-of-memory error as a document: the verdict, and the GPU's memory by its use."""

from __future__ import annotations

from typing import Any, Final

from memsize.documents import Document, findings_data, values_of
from memsize.documents.sections import Bars, Part, Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.error import FREE, PIECES, POOLS, TENSORS, USE_FIELDS, MemoryUse, OutOfMemoryReport
from memsize.records.roles import Role
from memsize.units import Bytes

SCHEMA: Final = "memsize.error/1"

_COLOURS: Final[dict[str, Role]] = {
    TENSORS: "parameter",
    PIECES: "cast copy",
    POOLS: "communication",
    FREE: "workspace",
}
"""The roles in whose colours uses are drawn."""


class ErrorDocument(Document[OutOfMemoryReport]):
    """An out-of-memory error."""

    only_brief = False

    def bars(self) -> Bars:
        """The GPU's memory by its use."""
        rows = [(Part(use.use, use.use, _COLOURS.get(use.use, "elsewhere")), use.bytes) for use in self.answer.uses]
        return Bars.of_whole(f"memory of GPU {self.answer.device}", rows)

    def sections(self) -> tuple[Section, ...]:
        report = self.answer
        total = USE_FIELDS.total("total", MemoryUse("total", report.total), report)
        caption = "What the GPU held"
        return (
            Title(report.source, ((f"GPU {report.device}, of", Bytes(report.total)),)),
            *self.opening(),
            *self.reasons(),
            Table.of("memory", "Memory", USE_FIELDS, report.uses, report, total=total, caption=caption),
            *listed("Notes", report.notes),
        )

    def figures(self, unit: str) -> dict[str, Any]:
        report = self.answer
        return {
            "schema": SCHEMA,
            **values_of(report, "source", "device", "failed", "total", "reserved", "tensors", "pieces", "pools"),
            **values_of(report, "process", "others", "allowed", "outside", "rest"),
            "findings": findings_data(report.findings, unit),
            "notes": report.notes,
        }
