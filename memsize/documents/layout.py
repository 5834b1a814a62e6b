"""The memory-format audit as a document: how each layer's tensors lie under channels last, and what copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from memsize.documents import Document, findings_data, plain, renamed, values_of
from memsize.documents.sections import Bars, Part, Section, Table, Title
from memsize.documents.shared import input_text, listed
from memsize.records.fields import Label
from memsize.records.layout import COPY_FIELDS, LAYER_FIELDS, Audit, LayoutReport, audit_rows
from memsize.units import Bytes

SCHEMA: Final = "memsize.layout/1"
MOST_COPIES: Final = 20


@dataclass(frozen=True)
class LayoutDocument(Document[LayoutReport]):
    """A memory-format audit. `depth` cuts the layer table: copies in deeper layers count for their parents."""

    only_brief = False

    depth: int | None = None

    def sections(self) -> tuple[Section, ...]:
        report = self.answer
        copies = sorted(report.audit.last.copies, key=lambda copy: -copy.bytes)
        shown = f", the largest {MOST_COPIES} of {len(copies):,} (JSON has them all)"
        caption = f"Copies that only rearrange{shown if len(copies) > MOST_COPIES else ''}"
        return (
            title(report),
            *self.opening(),
            *([table] if (table := layer_table(report.audit, self.depth)).rows else []),
            *([Table.of("copies", "Copies", COPY_FIELDS, copies[:MOST_COPIES], caption=caption)] if copies else []),
            *self.reasons(),
            *listed("Notes", report.notes),
        )

    def main_table(self) -> str:
        return "copies" if self.answer.audit.last.copies else super().main_table()

    def bars(self) -> Bars:
        audit = self.answer.audit
        rows = [("row-major", audit.plain), ("channels last", audit.last)]
        sizes = [(Label(name), {"copied": run.copied}) for name, run in rows if audit.plain.copied or audit.last.copied]
        return Bars.of("copied to rearrange", [Part("copied", "copied", "cast copy")], sizes)

    def figures(self, unit: str) -> dict[str, Any]:
        report, audit = self.answer, self.answer.audit
        layers = [
            renamed(plain(row.layer), specs="output") | values_of(row, "copied_bytes", "row_major_copied_bytes")
            for row in audit_rows(audit, audit.last.layers)
        ]
        return {
            "schema": SCHEMA,
            **values_of(audit, "model", "scenario", "training"),
            "inputs": plain(audit.inputs),
            "converted": {"inputs": audit.converted_inputs, "weights": audit.converted},
            "copied_bytes": audit.last.copied,
            "row_major_copied_bytes": audit.plain.copied,
            "layers": layers,
            "copies": plain(audit.last.copies),
            "row_major_copies": plain(audit.plain.copies),
            "losses": plain(audit.last.losses),
            "findings": findings_data(report.findings, unit),
            "notes": report.notes,
        }


def title(report: LayoutReport) -> Title:
    """The model, its inputs, and the number of inputs and weights that were converted."""
    audit = report.audit
    inputs = ", ".join(map(input_text, audit.inputs))
    converted = f"{audit.converted:,} weight{'' if audit.converted == 1 else 's'} to channels last"
    inputs_text = f"{audit.converted_inputs:,} input{'' if audit.converted_inputs == 1 else 's'}"
    scenario = ((audit.scenario,),) if audit.scenario != "as-given" else ()
    return Title(report.model, ((f"input {inputs}",), (f"{inputs_text} and {converted}",), *scenario))


def layer_table(audit: Audit, depth: int | None = None) -> Table:
    """The modules that have images or copy; the columns of bytes add up to the totals."""
    shown = [layer for layer in audit.last.layers if depth is None or layer.depth <= depth]
    rows = [
        row
        for row in audit_rows(audit, shown)
        if (row.layer.leaf and bool(row.layer.parameters or row.layer.inputs or row.layer.outputs))
        or row.copied_bytes
        or row.row_major_copied_bytes
    ]
    total = ("total", *[None] * (len(LAYER_FIELDS.columns) - 3), Bytes(audit.last.copied), Bytes(audit.plain.copied))
    return Table.of("layers", "Layers", LAYER_FIELDS, rows, total=total, caption="Memory formats under channels last")
