"""The memory-format audit as a document: how each layer's tensors lie under channels last, and what copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from memsize.documents import MOST_SENTENCES, Document, findings_data, plain, renamed
from memsize.documents.sections import Bars, Part, Section, Table, Title, input_text, listed
from memsize.records.cells import Cell, Label, Path, Specs, Words
from memsize.records.fields import Column
from memsize.records.finding import Finding
from memsize.records.layout import Audit, Copy, Format, LayerFormats, LayoutReport, shortened
from memsize.units import Bytes

SCHEMA: Final = "memsize.layout/1"
MOST_COPIES: Final = 20
_STRIDED: Final[dict[Format, str]] = {"other": "strided"}
"""How formats are called in tables where that is not their name."""


@dataclass(frozen=True)
class LayoutDocument(Document[LayoutReport]):
    """A memory-format audit. `depth` cuts the layer table: what deeper layers copy is added to their parents."""

    depth: int | None = None

    def sections(self) -> tuple[Section, ...]:
        """What was rearranged, the formats of each layer, the copies, and why."""
        report = self.answer
        return (
            title(report),
            *self.opening(),
            layer_table(report.audit, self.depth),
            *([copy_table(report.audit)] if report.audit.last.copies else []),
            *self.reasons(),
            *listed("Notes", report.notes),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """What was found, most important first."""
        return self.answer.findings[:MOST_SENTENCES]

    def bars(self) -> Bars:
        """What a forward copies only to rearrange tensors, either way."""
        audit = self.answer.audit
        rows = [("row-major", audit.plain), ("channels last", audit.last)]
        sizes = [(Label(name), {"copied": run.copied}) for name, run in rows if audit.plain.copied or audit.last.copied]
        return Bars.of("copied to rearrange", [Part("copied", "copied", "cast copy")], sizes)

    def figures(self, unit: str) -> dict[str, Any]:
        """Everything that is known, whatever `depth` says."""
        report, audit = self.answer, self.answer.audit
        return {
            "schema": SCHEMA,
            "model": audit.model,
            "scenario": audit.scenario,
            "training": audit.training,
            "inputs": plain(audit.inputs),
            "converted": {"inputs": audit.converted_inputs, "weights": audit.converted},
            "copied_bytes": audit.last.copied,
            "row_major_copied_bytes": audit.plain.copied,
            "layers": [_layer_data(audit, layer) for layer in audit.last.layers],
            "copies": plain(audit.last.copies),
            "row_major_copies": plain(audit.plain.copies),
            "losses": plain(audit.last.losses),
            "findings": findings_data(report.findings, unit),
            "notes": report.notes,
        }


def _layer_data(audit: Audit, layer: LayerFormats) -> dict[str, Any]:
    return renamed(plain(layer), specs="output") | {
        "copied_bytes": audit.last.copied_in(layer.path),
        "row_major_copied_bytes": audit.plain.copied_in(layer.path),
    }


def title(report: LayoutReport) -> Title:
    """The model, its inputs and what was rearranged."""
    audit = report.audit
    inputs = ", ".join(map(input_text, audit.inputs))
    converted = f"{audit.converted:,} weight{'' if audit.converted == 1 else 's'} to channels last"
    given = f"{audit.converted_inputs:,} input{'' if audit.converted_inputs == 1 else 's'}"
    phrases: list[tuple[str | Bytes, ...]] = [(f"input {inputs}",), (f"{given} and {converted}",)]
    if audit.scenario != "as-given":
        phrases.append((audit.scenario,))
    return Title(report.model, tuple(phrases))


def layer_table(audit: Audit, depth: int | None = None) -> Table:
    """The modules that have images or copy; the columns of bytes add up to the totals."""
    columns = (
        Column("layer", "layer", "name", 100, "its path in the model"),
        Column("type", "type", "text", 90, "its class"),
        Column("output", "output", "specs", 70, "the tensors that it returns"),
        Column("parameters", "weights", "words", 75, "how its own weights lie"),
        Column("inputs", "given", "words", 85, "how the images lie that it is given", alone="inputs given"),
        Column("outputs", "returned", "words", 95, "how the images lie that it returns"),
        Column("lost", "lost at", "words", 94, "the op in it that loses channels last"),
        Column("copied", "copied", "bytes", 96, "bytes that it copies to rearrange tensors"),
        Column("before", "if row-major", "bytes", 80, "the same when nothing is converted"),
    )
    shown = [layer for layer in audit.last.layers if depth is None or layer.depth <= depth]
    paths = {layer.path for layer in shown}
    last, plain = (_by_row(run.copies, paths) for run in (audit.last, audit.plain))
    lost: dict[str, list[str]] = {}
    for loss in audit.last.losses:
        lost.setdefault(_row_of(loss.layer, paths), []).append(loss.op)
    rows = [
        _row(layer, lost.get(layer.path, ()), last.get(layer.path, 0), plain.get(layer.path, 0))
        for layer in shown
        if _has_images(layer) or last.get(layer.path) or plain.get(layer.path)
    ]
    total: tuple[Cell, ...] = ("total", *[None] * 6, Bytes(audit.last.copied), Bytes(audit.plain.copied))
    return Table("layers", "Layers", columns, tuple(rows), total, caption="Memory formats under channels last")


def _row(layer: LayerFormats, lost: Iterable[str], last: int, plain: int) -> tuple[Cell, ...]:
    return (
        Path(layer.path) if layer.path else "(the model itself)",
        layer.type,
        Specs(layer.specs),
        _words(layer.parameters),
        _words(layer.inputs),
        _words(layer.outputs),
        Words(dict.fromkeys(lost)),
        Bytes(last),
        Bytes(plain),
    )


def _has_images(layer: LayerFormats) -> bool:
    """Whether a row says something: containers only repeat what their last layer returns."""
    return layer.leaf and bool(layer.parameters or layer.inputs or layer.outputs)


def _by_row(copies: Sequence[Copy], paths: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for copy in copies:
        row = _row_of(copy.layer, paths)
        found[row] = found.get(row, 0) + copy.bytes
    return found


def _row_of(path: str, paths: set[str]) -> str:
    """The row that a layer is in: its own, or that of the nearest layer above it that is shown."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def _words(formats: tuple[Format, ...]) -> Words:
    return Words(_STRIDED.get(each, each) for each in shortened(formats))


def copy_table(audit: Audit) -> Table:
    """The copies that rearrange, the largest first."""
    copies = sorted(audit.last.copies, key=lambda copy: -copy.bytes)
    more = len(copies) - MOST_COPIES
    columns = (
        Column("layer", "layer", "name", 100, "the layer that copies"),
        Column("op", "op", "text", 90, "the op that copies"),
        Column("tensor", "tensor", "specs", 80, "what is copied"),
        Column("before", "from", "text", 85, "how it lay"),
        Column("after", "to", "text", 85, "how the copy lies"),
        Column(
            "kind", "as", "text", 60, "an op of the model, or inside a kernel that frees it again", alone="kind of copy"
        ),
        Column("place", "at", "text", 88, "the line of code that asked for it", alone="line"),
        Column("bytes", "copied", "bytes", 95, "bytes of the copy"),
    )
    caption = "Copies that only rearrange"
    caption += f", the largest {MOST_COPIES} of {len(copies):,} (JSON has them all)" if more > 0 else ""
    return Table("copies", "Copies", columns, tuple(map(_copy_row, copies[:MOST_COPIES])), caption=caption)


def _copy_row(copy: Copy) -> tuple[Cell, ...]:
    return (
        Path(copy.layer) if copy.layer else "(the model itself)",
        copy.op,
        Specs((copy.tensor,)),
        _STRIDED.get(copy.before, copy.before),
        _STRIDED.get(copy.after, copy.after),
        "in the kernel" if copy.hidden else "an op",
        copy.place,
        Bytes(copy.bytes),
    )
