"""Serving as a document: what a card serves in short, each scenario, and the layers that share blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, findings_data, plain, values_of
from memsize.documents.fit import remedy_tables
from memsize.documents.sections import Bars, Limit, Part, Phrase, Remark, Section, Strip, Table, Title
from memsize.documents.shared import listed, said_once, versions
from memsize.records.fields import Label
from memsize.records.gpu import Interval
from memsize.records.serving import GROUP_FIELDS, SERVING_FIELDS, ServingReport, ServingRow

SCHEMA: Final = "memsize.serving/1"

_PARTS = (
    Part("weights", "weights", "parameter"),
    Part("profile", "the largest step", "temporary"),
    Part("non_torch", "outside PyTorch", "workspace"),
    Part("graphs", "CUDA graphs", "communication"),
    Part("kv_cache", "KV cache", "KV cache"),
)
_ROW: Final = ("scenario", "weights", "profile", "non_torch", "graphs", "paged", "shortage", "reason")


class ServingDocument(Document[ServingReport]):
    """The memory of a paged server, scenario by scenario."""

    def sections(self) -> tuple[Section, ...]:
        report = self.answer
        remarks = said_once(
            Remark(row.scenario, "unavailable", row.reason) for row in report.serving_rows if row.reason is not None
        )
        caption = f"Requests of {report.asked['context']:,} tokens"
        remedied = report.remedied
        about = f"one request of {remedied.size:,} tokens under {remedied.scenario}" if remedied else ""
        return (
            title(report),
            *self.opening(),
            Table.of("rows", "Serving", SERVING_FIELDS, report.serving_rows, caption=caption, remarks=remarks),
            Table.of("groups", "Groups", GROUP_FIELDS, report.groups, caption="Layers that share blocks"),
            *remedy_tables(remedied, about),
            *self.reasons(),
            *listed("Assumed", report.assumptions),
            *listed("Notes", report.notes),
        )

    def main_table(self) -> str:
        return "remedies" if self.answer.remedied else super().main_table()

    def bars(self) -> Bars:
        rows = []
        for row in self.answer.ran:
            sizes = {"weights": row.weights, "profile": row.profile, "non_torch": row.non_torch.middle}
            sizes |= {"graphs": row.graphs.middle, "kv_cache": row.paged.available.middle if row.paged else 0}
            rows.append((Label(row.scenario, hint=row.title), sizes))
        bars = Bars.of("memory use", _PARTS, rows)
        return replace(bars, limit=Limit(self.answer.card.name, self.answer.card.bytes))

    def versions(self) -> tuple[Phrase, ...]:
        return versions((), (self.answer.card,))

    def figures(self, unit: str) -> dict[str, Any]:
        report = self.answer
        return {
            "schema": SCHEMA,
            "model": report.model,
            "gpu": report.card.name,
            "gpu_bytes": report.card.bytes,
            "asked": dict(report.asked),
            "budget": report.budget,
            "groups": plain(report.groups),
            "servings": [values_of(row, *_ROW) for row in report.serving_rows],
            "remedies": plain(report.remedied),
            "findings": findings_data(report.findings, unit),
            "assumptions": report.assumptions,
            "notes": report.notes,
        }


def title(report: ServingReport) -> Title:
    """The model, how it is served, and the card."""
    arguments = report.asked
    cards = report.card.name if arguments["tp"] == 1 else f"each of {arguments['tp']} {report.card.name}"
    seqs, block = arguments["seqs"], arguments["block"]
    step = f"steps of {arguments['batched_tokens']:,} tokens, {seqs:,} sequence{'s' * (seqs != 1)}"
    taken = f"{arguments['utilization']:.0%} of its memory, blocks of {block} token{'s' * (block != 1)}"
    strips = ((_strip(report, report.ran[0]),),) if report.ran else ()
    return Title(report.model, ((f"by {arguments['server']}: {step}",), (f"on {cards}: {taken}",), *strips))


def _strip(report: ServingReport, row: ServingRow) -> Strip:
    """The memory of a card as the server fills it, up to what it may take."""
    stepped = row.weights + row.profile
    amounts = {"weights": Interval(row.weights, row.weights), "+ step": Interval(stepped, stepped)}
    if row.paged is not None:
        amounts["+ KV cache"] = Interval(*(stepped + size for size in row.paged.available))
    amounts["allowed"] = Interval(report.budget, report.budget)
    return Strip(tuple(amounts.items()), report.card.bytes)
