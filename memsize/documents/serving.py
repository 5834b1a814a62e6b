"""Serving as a document: what a card serves in short, each scenario, and the layers that share blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, findings_data, plain
from memsize.documents.fit import remedy_table
from memsize.documents.sections import Bars, Limit, Part, Phrase, Remark, Section, Table, Title, listed, said_once
from memsize.documents.versions import versions
from memsize.records.cells import Cell, Label
from memsize.records.fields import Column
from memsize.records.fit import Remedied
from memsize.records.serving import ServingReport, ServingRow
from memsize.units import Bytes

SCHEMA: Final = "memsize.serving/1"

_PARTS = (
    Part("weights", "weights", "parameter"),
    Part("profile", "the largest step", "temporary"),
    Part("non_torch", "outside PyTorch", "workspace"),
    Part("kv_cache", "KV cache", "KV cache"),
)


class ServingDocument(Document[ServingReport]):
    """What a paged server holds."""

    def sections(self) -> tuple[Section, ...]:
        """The answer first, then its figures."""
        report = self.answer
        return (
            title(report),
            *self.opening(),
            row_table(report),
            group_table(report),
            *([remedies(report.remedied)] if report.remedied else []),
            *self.reasons(),
            *listed("Assumed", report.assumptions),
            *listed("Notes", report.notes),
        )

    def bars(self) -> Bars:
        """What takes each card's memory, with as much outside PyTorch as there may be."""
        rows = [(Label(row.scenario, hint=row.title), _sizes(row)) for row in self.answer.ran]
        bars = Bars.of("taken on a card", _PARTS, rows)
        return replace(bars, limit=Limit(self.answer.card.name, self.answer.card.bytes))

    def versions(self) -> tuple[Phrase, ...]:
        """The GPU."""
        return versions((), (self.answer.card,))

    def figures(self, unit: str) -> dict[str, Any]:
        """Everything in it."""
        report = self.answer
        return {
            "schema": SCHEMA,
            "model": report.model,
            "gpu": report.card.name,
            "gpu_bytes": report.card.bytes,
            "asked": dict(report.asked),
            "budget": report.budget,
            "groups": [group._asdict() for group in report.groups],
            "servings": [_row_data(row) for row in report.serving_rows],
            "remedies": plain(report.remedied),
            "findings": findings_data(report.findings, unit),
            "assumptions": report.assumptions,
            "notes": report.notes,
        }


def remedies(found: Remedied) -> Table:
    """What would make room for one request."""
    return remedy_table(
        found, f"Remedies for one request of {found.size:,} tokens under {found.scenario}, each run by itself"
    )


def _sizes(row: ServingRow) -> dict[str, int]:
    cache = row.paged.available.low if row.paged else 0
    return {"weights": row.weights, "profile": row.profile, "non_torch": row.non_torch.high, "kv_cache": cache}


def _row_data(row: ServingRow) -> dict[str, Any]:
    paged = row.paged
    return {
        "scenario": row.scenario,
        "weights": row.weights,
        "profile": row.profile,
        "non_torch": row.non_torch._asdict(),
        "paged": paged
        and {
            "available": paged.available._asdict(),
            "block_bytes": paged.block_bytes,
            "request_blocks": paged.request_blocks,
            "blocks": paged.blocks._asdict(),
            "tokens": paged.tokens._asdict(),
            "concurrency": paged.concurrency._asdict(),
        },
        "shortage": row.shortage,
        "reason": row.reason,
    }


def title(report: ServingReport) -> Title:
    """The model, how it is served, and the card."""
    asked = report.asked
    cards = report.card.name if asked["tp"] == 1 else f"each of {asked['tp']} {report.card.name}"
    step = f"steps of {asked['batched_tokens']:,} tokens, {asked['seqs']:,} sequences"
    taken = f"{asked['utilization']:.0%} of its memory, blocks of {asked['block']} tokens"
    return Title(report.model, ((step,), (f"on {cards}: {taken}",)))


def row_table(report: ServingReport) -> Table:
    """One row per scenario."""
    columns = (
        Column("scenario", "scenario", "name", 100, "how the model is stored and run"),
        Column("weights", "weights", "bytes", 98, "parameters and buffers"),
        Column("profile", "step", "bytes", 97, "what the largest step needs beyond them"),
        Column("kv_cache", "KV cache from", "bytes", 96, "what is left for the cache, at least"),
        Column("kv_cache_high", "to", "bytes", 96, "and at most", beside="kv_cache"),
        Column("blocks", "blocks from", "count", 80, "blocks of the cache, at least"),
        Column("blocks_high", "to", "count", 80, "and at most", beside="blocks"),
        Column("tokens", "tokens from", "count", 95, "tokens that they hold, at least"),
        Column("tokens_high", "to", "count", 95, "and at most", beside="tokens"),
        Column("concurrency", "requests from", "count", 93, "requests of the whole context at once, at least"),
        Column("concurrency_high", "to", "count", 93, "and at most", beside="concurrency"),
    )
    rows = tuple(map(_cells, report.serving_rows))
    remarks = said_once(
        Remark(row.scenario, "unavailable", row.reason) for row in report.serving_rows if row.reason is not None
    )
    caption = f"Requests of {report.asked['context']:,} tokens"
    return Table("rows", "Serving", columns, rows, caption=caption, remarks=remarks)


def _cells(row: ServingRow) -> tuple[Cell, ...]:
    label = Label(row.scenario, hint=row.title)
    if row.reason is not None:
        return (label, *[None] * 10)
    taken = (label, Bytes(row.weights), Bytes(row.profile))
    paged = row.paged
    if paged is None:
        return (*taken, Bytes(0), Bytes(0), *[0] * 4, "0", "0")
    return (*taken, *map(Bytes, paged.available), *paged.blocks, *paged.tokens, *paged.concurrency.texts())


def group_table(report: ServingReport) -> Table:
    """The layers that share a table of blocks."""
    columns = (
        Column("kind", "layers of", "text", 100, "what a layer keeps of past tokens"),
        Column("layers", "layers", "count", 99, "how many share a table of blocks"),
        Column("window", "window", "count", 98, "the tokens that a sliding window keeps"),
    )
    return Table("groups", "Groups", columns, tuple(map(tuple, report.groups)), caption="Layers that share blocks")
