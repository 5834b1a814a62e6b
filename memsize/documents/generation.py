"""Generation as a document: what it takes in short, each scenario and batch, and what the KV cache is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, findings_data, plain
from memsize.documents.fit import remedy_table
from memsize.documents.sections import (
    Bars,
    Limit,
    Part,
    Phrase,
    Remark,
    Section,
    Table,
    Title,
    input_text,
    listed,
    said_once,
)
from memsize.documents.versions import versions
from memsize.records.cells import Cell, Label
from memsize.records.fields import Column
from memsize.records.fit import Remedied
from memsize.records.generation import GenerationReport, GenerationRow
from memsize.records.roles import TITLES, in_order
from memsize.units import Bytes

SCHEMA: Final = "memsize.generation/1"
_HOSTED: Final = Column("hosted", "on the host", "bytes", 94, "what of the cache is on the host at the end")


class GenerationDocument(Document[GenerationReport]):
    """What generating tokens holds."""

    def sections(self) -> tuple[Section, ...]:
        """The answer first, then its figures."""
        report = self.answer
        return (
            title(report),
            *self.opening(),
            row_table(report),
            *((cache_table(report),) if any(row.layers for row in report.ran) else ()),
            *((remedies(report.remedied),) if report.remedied else ()),
            *self.reasons(),
            *listed("Assumed", report.assumptions),
            *listed("Notes", report.notes),
        )

    def bars(self) -> Bars:
        """What is alive at the peak of each row, beside the card."""
        rows = [(_label(self.answer, row), row.estimate.roles) for row in self.answer.ran if row.estimate]
        parts = [Part(role, TITLES[role].noun, role) for role in in_order(role for _, sizes in rows for role in sizes)]
        bars = Bars.of("alive at the peak", parts, rows)
        return replace(bars, limit=Limit(self.answer.card.name, self.answer.card.bytes))

    def versions(self) -> tuple[Phrase, ...]:
        """The PyTorch that ran it, and the GPU."""
        return versions((self.answer.trace,), (self.answer.card,))

    def figures(self, unit: str) -> dict[str, Any]:
        """Everything but the trace."""
        report = self.answer
        return {
            "schema": SCHEMA,
            "model": report.model,
            "gpu": report.card.name,
            "gpu_bytes": report.card.bytes,
            "asked": dict(report.asked),
            "inputs": plain(report.inputs),
            "generations": [_row_data(row) for row in report.generation_rows],
            "remedies": plain(report.remedied),
            "findings": findings_data(report.findings, unit),
            "assumptions": report.assumptions,
            "notes": report.notes,
        }


def _row_data(row: GenerationRow) -> dict[str, Any]:
    peak = row.estimate
    return {
        "scenario": row.scenario,
        "batch": row.batch,
        "prompt": row.prompt,
        "new": row.new,
        "weights": row.weights,
        "assistant_weights": row.assistant,
        "prefill": row.prefill._asdict(),
        "decode": row.decode._asdict(),
        "kv_cache": row.cache,
        "kv_per_token": row.per_token,
        "kv_per_sequence": row.per_sequence,
        "kv_on_host": row.hosted,
        "pinned": row.pinned,
        "layers": [kind._asdict() for kind in row.layers],
        "transient": row.transient,
        "peak": peak
        and {
            "requested": peak.requested,
            "allocated": peak.allocated,
            "reserved": peak.reserved,
            "device": peak.device._asdict(),
            "phase": peak.peak_phase,
            "step": peak.peak_step,
            "layer": peak.peak_layer,
            "op": peak.peak_op,
            "roles": dict(peak.roles),
        },
        "largest": peak and [storage._asdict() for storage in peak.storages],
        "fits": row.fits,
        "traced_lengths": row.traced,
        "exact": row.exact,
        "reason": row.reason,
    }


def _label(report: GenerationReport, row: GenerationRow) -> Label:
    """The name of a row among others: its scenario, and what else differs between them."""
    batches, prompts = ({getattr(each, name) for each in report.ran} for name in ("batch", "prompt"))
    batch = f", batch {row.batch:,}" if len(batches) > 1 else ""
    prompt = f", prompt {row.prompt:,}" if len(prompts) > 1 else ""
    return Label(f"{row.scenario}{batch}{prompt}", hint=row.title)


def remedies(found: Remedied) -> Table:
    """What would make the row fit that does not."""
    return remedy_table(
        found, f"Remedies for {found.scenario} at batch {found.size:,} on {found.gpu}, each run by itself"
    )


def title(report: GenerationReport) -> Title:
    """The model, its inputs and the card."""
    inputs = ", ".join(map(input_text, report.inputs))
    return Title(report.model, ((f"input {inputs}",), (f"on {report.card.name}",)))


def row_table(report: GenerationReport) -> Table:
    """One row per scenario, batch and prompt."""
    offloaded = any(row.hosted for row in report.generation_rows)
    columns = (
        Column("scenario", "scenario", "name", 100, "how the model is stored and run"),
        Column("batch", "batch", "count", 99, "sequences at once"),
        Column("prompt", "prompt", "count", 98, "tokens of each prompt"),
        Column("new", "new", "count", 60, "tokens that are generated after it", alone="new tokens"),
        Column("weights", "weights", "bytes", 90, "parameters and buffers"),
        Column("kv_cache", "KV cache", "bytes", 95, "the cache of all sequences at the end"),
        Column("per_token", "bytes per token", "count", 85, "what one more token of one sequence adds to it"),
        *((_HOSTED,) if offloaded else ()),
        Column("prefill", "prefill", "bytes", 92, "the most that is alive while the prompt is read"),
        Column("decode", "decode", "bytes", 91, "the most that is alive in the steps after it"),
        Column("transient", "for a moment", "bytes", 70, "what a decode step needs beyond what stays"),
        Column("reserved", "reserved", "bytes", 88, "the allocator's segments at their peak"),
        Column("device_low", "device from", "bytes", 75, "what nvidia-smi would show, at least"),
        Column("device_high", "to", "bytes", 75, "and at most", beside="device_low"),
        Column("fits", "fits", "text", 97, f"whether it fits {report.card.name}"),
    )
    rows = tuple(_cells(row, offloaded) for row in report.generation_rows)
    remarks = said_once(
        Remark(row.scenario, "unavailable", row.reason) for row in report.generation_rows if row.reason is not None
    )
    return Table("rows", "Generation", columns, rows, remarks=remarks)


def _cells(row: GenerationRow, offloaded: bool) -> tuple[Cell, ...]:
    named: tuple[Cell, ...] = (Label(row.scenario, hint=row.title), row.batch, row.prompt, row.new)
    peak = row.estimate
    if peak is None:
        return (*named, *[None] * (11 if offloaded else 10))
    return (
        *named,
        Bytes(row.weights),
        Bytes(row.cache),
        row.per_token // row.batch,
        *((Bytes(row.hosted),) if offloaded else ()),
        Bytes(row.prefill.peak),
        Bytes(row.decode.peak),
        Bytes(row.transient),
        Bytes(peak.reserved),
        Bytes(peak.device.low),
        Bytes(peak.device.high),
        "yes" if row.fits else "no",
    )


def cache_table(report: GenerationReport) -> Table:
    """What the cache of one sequence is made of, for each prompt of the first scenario that keeps one."""
    columns = (
        Column("prompt", "prompt", "count", 90, "tokens of the prompt"),
        Column("kind", "layers of", "text", 100, "what the layer keeps of past tokens"),
        Column("layers", "layers", "count", 95, "how many such layers there are"),
        Column("bytes", "hold", "bytes", 98, "bytes for one sequence at the end"),
        Column("per_token", "bytes per token", "count", 97, "what one more token adds"),
    )
    first = next(row for row in report.ran if row.layers)
    shown = [row for row in report.ran if (row.scenario, row.batch) == (first.scenario, first.batch)]
    rows = tuple(
        (row.prompt, kind.kind, kind.layers, Bytes(kind.bytes), kind.per_token) for row in shown for kind in row.layers
    )
    caption = f"The KV cache of one sequence, under {first.scenario}"
    return Table("cache", "KV cache", columns, rows, caption=caption)
