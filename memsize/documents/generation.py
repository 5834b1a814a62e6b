"""Generation as a document: what it takes in short, each scenario and batch, and what the KV cache is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from memsize.documents import Document, findings_data, plain, renamed, values_of
from memsize.documents.fit import remedy_tables
from memsize.documents.sections import Bars, Limit, Phrase, Remark, Section, Strip, Table, Title
from memsize.documents.shared import input_text, listed, role_part, said_once, versions
from memsize.records.fields import SCENARIO, Fields, Label, Path, shown
from memsize.records.generation import (
    CACHE_FIELDS,
    GENERATION_FIELDS,
    GENERATION_TABLE,
    CachedRow,
    GenerationReport,
    GenerationRow,
    decisive_row,
)
from memsize.records.gpu import PhasePeak
from memsize.records.report import ScenarioResult
from memsize.records.roles import in_order

SCHEMA: Final = "memsize.generation/1"


class GenerationDocument(Document[GenerationReport]):
    """The memory of generating tokens, by scenario, batch and prompt."""

    def sections(self) -> tuple[Section, ...]:
        report = self.answer
        fields = GENERATION_FIELDS.only(*GENERATION_TABLE).hinted(fits=f"whether it fits {report.card.name}")
        if not any(row.hosted for row in report.generation_rows):
            fields = fields.without("kv_on_host")
        remarks = said_once(
            Remark(row.scenario, "unavailable", row.reason) for row in report.generation_rows if row.reason is not None
        )
        inputs, remedied = ", ".join(map(input_text, report.inputs)), report.remedied
        about = f"{remedied.scenario} at batch {remedied.size:,} on {remedied.gpu}" if remedied else ""
        return (
            Title(report.model, ((f"input {inputs}",), (f"on {report.card.name}",), *_strip(report))),
            *self.opening(),
            Table.of("rows", "Generation", fields, report.generation_rows, remarks=remarks),
            *self._cache_tables(),
            *remedy_tables(remedied, about),
            *self.reasons(),
            *listed("Assumed", report.assumptions),
            *listed("Notes", report.notes),
        )

    @property
    def first_sentences(self) -> int:
        """Up to the reason why a scenario that was asked for changes little, if there is one."""
        codes = [finding.code for finding in self.verdict()]
        return codes.index("quantization-leaves-most") + 1 if "quantization-leaves-most" in codes else 1

    def _cache_tables(self) -> Iterator[Table]:
        """The layers of one sequence's KV cache, for each prompt of the first scenario that has a cache."""
        cached = [row for row in self.answer.ran if row.layers]
        if cached:
            first = cached[0]
            shown = [row for row in cached if (row.scenario, row.batch) == (first.scenario, first.batch)]
            rows = (CachedRow(row, layer) for row in shown for layer in row.layers)
            caption = f"The KV cache of one sequence, under {first.scenario}"
            yield Table.of("cache", "KV cache", CACHE_FIELDS.without("scenario", "batch"), rows, caption=caption)

    def bars(self) -> Bars:
        report = self.answer
        batches, prompts = ({getattr(row, name) for row in report.ran} for name in ("batch", "prompt"))
        rows = []
        for row in report.ran:
            batch = f", batch {row.batch:,}" if len(batches) > 1 else ""
            prompt = f", prompt {row.prompt:,}" if len(prompts) > 1 else ""
            if row.estimate:
                rows.append((Label(f"{row.scenario}{batch}{prompt}", hint=row.title), row.estimate.roles))
        parts = map(role_part, in_order(role for _, sizes in rows for role in sizes))
        bars = Bars.of("alive at the peak", parts, rows)
        return replace(bars, limit=Limit(report.card.name, report.card.bytes))

    def versions(self) -> tuple[Phrase, ...]:
        return versions((self.answer.trace,), (self.answer.card,))

    def figures(self, unit: str) -> dict[str, Any]:
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


def _strip(report: GenerationReport) -> Iterator[Phrase]:
    row = decisive_row(report.ran)
    if row is not None and (peak := row.estimate) is not None:
        yield (Strip.of_peak(peak.requested, peak.allocated, peak.reserved, peak.device, report.card.bytes),)


def _row_data(row: GenerationRow) -> dict[str, Any]:
    sizes = values_of(row, "scenario", "batch", "prompt", "new", "weights", "assistant", "prefill", "decode", "cache")
    sizes |= values_of(row, "per_token", "per_sequence", "hosted", "pinned", "layers", "transient")
    kv = {"cache": "kv_cache", "per_token": "kv_per_token", "per_sequence": "kv_per_sequence", "hosted": "kv_on_host"}
    moment = ("peak_phase", "peak_step", "peak_layer", "peak_op")
    peak = row.estimate and values_of(row.estimate, "requested", "allocated", "reserved", "device", *moment, "roles")
    return {
        **renamed(sizes, assistant="assistant_weights", **kv),
        "peak": peak and renamed(peak, **{name: name.removeprefix("peak_") for name in moment}),
        "largest": row.estimate and plain(row.estimate.storages),
        "fits": row.fits,
        "traced_lengths": row.traced,
        **values_of(row, "exact", "reason"),
    }


class _PhaseRow(NamedTuple):
    """A phase of a pipeline's generation under a scenario."""

    result: ScenarioResult
    peak: PhasePeak


_ACTIVATIONS: Final = "temporaries, workspaces, inputs, and weights that the pipeline casts"
_PHASE_FIELDS: Final = Fields[_PhaseRow](
    shown("scenario", "scenario", "name", 100, SCENARIO.help, get="result.label"),
    shown("peak.phase", "phase", "text", 99, "a phase of the generation", key="phase"),
    shown("parts", "parts", "words", 70, "the parts that run in it", get=lambda row: list(row.peak.parts)),
    shown("peak.requested", "requested", "bytes", 98, "peak of the bytes that live tensors ask for", key="requested"),
    shown("peak.allocated", "allocated", "bytes", 80, "the caching allocator's blocks at most", key="allocated"),
    shown("peak.reserved", "reserved", "bytes", 85, "its segments, those of earlier phases included", key="reserved"),
    shown("peak.weights", "weights", "bytes", 95, "weights of these parts", key="weights", role="parameter"),
    shown("peak.other_weights", "other weights", "bytes", 95, "bytes of all other parts", key="other_weights"),
    shown("peak.activations", "activations", "bytes", 95, _ACTIVATIONS, key="activations"),
    shown("layer", "at", "name", 60, "the layer of its peak", alone="layer"),
    cell={"layer": lambda row, _: Path(row.peak.layer) if row.peak.layer else ""},
)


def phase_tables(results: Sequence[ScenarioResult]) -> Iterator[Table]:
    """One row per scenario and phase of a pipeline: its peak, which its weights, others and activations add up to."""
    peaks = [(result, result.inference.phases) for result in results if result.inference]
    if rows := [_PhaseRow(result, peak) for result, phases in peaks for peak in phases]:
        yield Table.of("phases", "Phases", _PHASE_FIELDS, rows, caption="Peaks of the phases of a generation")
