"""Two models side by side as typed sections, in reading order."""

from __future__ import annotations

from memsize.documents.sections import Cell, Column, Findings, Section, Table, Title, Words
from memsize.records.aggregates import stored_dtypes, totals
from memsize.records.comparison import Comparison
from memsize.records.trace import Trace
from memsize.units import Bytes

_COLUMNS = (
    Column("model", "model", "name", 100, "which of the two"),
    Column("parameters", "parameters", "count", 90, "elements of its parameters"),
    Column("dtypes", "stored as", "words", 80, "the dtypes of its tensors"),
    Column("stored", "stored", "bytes", 95, "bytes of all its tensors"),
    Column("saved", "kept for backward", "bytes", 70, "bytes that a forward keeps, where it was run"),
)


def sections(comparison: Comparison) -> tuple[Section, ...]:
    """What the two models store, and what changed from one to the other."""
    before, after = comparison.before, comparison.after
    ran = bool(before.events or after.events)
    columns = _COLUMNS if ran else _COLUMNS[:-1]
    rows = tuple(_row(name, trace)[: len(columns)] for name, trace in (("before", before), ("after", after)))
    title = Title(f"{before.model} → {after.model}", ())
    return title, Table("models", "", columns, rows), Findings("What changed, and why", comparison.findings)


def _row(name: str, trace: Trace) -> tuple[Cell, ...]:
    found = totals(trace)
    kept = Bytes(found.saved_bytes) if trace.events else None
    return name, found.parameters, Words(stored_dtypes(trace.tensors)), Bytes(found.stored), kept
