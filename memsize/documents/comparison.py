"""Two models side by side as a document, and findings alone as one."""

from __future__ import annotations

from typing import Any, Final

from memsize.documents import Document, findings_data
from memsize.documents.sections import Cell, Column, Findings, Notes, Section, Table, Title, Words
from memsize.records.aggregates import stored_dtypes, totals
from memsize.records.answer import Why
from memsize.records.comparison import Comparison
from memsize.records.trace import Trace
from memsize.units import Bytes

SCHEMA: Final = "memsize.comparison/1"

_COLUMNS: Final = (
    Column("model", "model", "name", 100, "which of the two"),
    Column("parameters", "parameters", "count", 90, "elements of its parameters"),
    Column("dtypes", "stored as", "words", 80, "the dtypes of its tensors"),
    Column("stored", "stored", "bytes", 95, "bytes of all its tensors"),
    Column("saved", "kept for backward", "bytes", 70, "bytes that a forward keeps, where it was run"),
)


class ComparisonDocument(Document[Comparison]):
    """What the two models store, and what changed from one to the other."""

    def sections(self) -> tuple[Section, ...]:
        """Both models in a table, and what changed."""
        before, after = self.answer.before, self.answer.after
        table = Table("models", "", _COLUMNS, (_cells("before", before), _cells("after", after)))
        return (
            Title(f"{before.model} → {after.model}", ()),
            table if before.events or after.events else table.without("saved"),
            Findings("What changed, and why", self.answer.findings),
        )

    def data(self, unit: str) -> dict[str, Any]:
        """Both models, and each tensor of either."""
        found = self.answer
        return {
            "schema": SCHEMA,
            "before": _model_data(found.before),
            "after": _model_data(found.after),
            **{name: table.records() for name, table in found.tables().items()},
            "findings": findings_data(found.findings, unit),
        }


def _cells(name: str, trace: Trace) -> tuple[Cell, ...]:
    found = totals(trace)
    kept = Bytes(found.saved_bytes) if trace.events else None
    return name, found.parameters, Words(stored_dtypes(trace.tensors)), Bytes(found.stored), kept


def _model_data(trace: Trace) -> dict[str, Any]:
    found = totals(trace)
    return {"model": trace.model, "parameters": found.parameters, "bytes": found.stored}


class WhyDocument(Document[Why]):
    """Findings without the answer that they are of."""

    def sections(self) -> tuple[Section, ...]:
        """The findings, or that there are none."""
        return (Findings("Why", self.answer) if self.answer else Notes("Why", (repr(self.answer),)),)

    def data(self, unit: str) -> dict[str, Any]:
        """The findings."""
        return {"schema": "memsize.why/1", "findings": findings_data(self.answer, unit)}
