"""Two models side by side as a document, and findings alone as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from memsize.analysis.timeline import timeline
from memsize.analysis.verify.alignment import levels_beside
from memsize.documents import Document, findings_data
from memsize.documents.sections import (
    Bars,
    Chart,
    Findings,
    Notes,
    Overlay,
    Part,
    Phrase,
    Remark,
    ScenarioView,
    Section,
    Table,
    Title,
)
from memsize.documents.shared import listed, role_part
from memsize.records.aggregates import stored_dtypes, totals
from memsize.records.answer import FindingList
from memsize.records.comparison import (
    FIGURE_FIELDS,
    LAYER_FIELDS,
    LIVING_FIELDS,
    MODEL_FIELDS,
    ComparedModel,
    Comparison,
    LayerChange,
    LayerSizes,
)
from memsize.records.fields import Cell, Label
from memsize.records.finding import Finding, optimizer_in_words
from memsize.records.trace import Trace
from memsize.units import Bytes

SCHEMA: Final = "memsize.comparison/1"
MOST_ROWS: Final = 40
"""The most layers and tensors listed: a comment on a pull request has little room. JSON and CSV list all."""

_PARTS: Final = (
    role_part("parameter"),
    role_part("buffer"),
    Part("attribute", "not registered", "elsewhere"),
    Part("kept", "kept for backward", "activation"),
)


@dataclass(frozen=True)
class ComparisonDocument(Document[Comparison]):
    """A comparison of two models: the bytes that they store and need, and the changes from one to the other."""

    only_brief = False
    folded = True

    def sections(self) -> tuple[Section, ...]:
        comparison = self.answer
        traces, (before, after) = (comparison.before, comparison.after), comparison.totals
        names = [name or trace.model for name, trace in zip(comparison.names, traces, strict=True)]
        counts = " → ".join(dict.fromkeys(f"{sums.parameters:,}" for sums in comparison.totals))
        phrases: tuple[Phrase, ...] = (
            (counts, "parameters"),
            (Bytes(before.stored), "→", Bytes(after.stored), "stored"),
        )
        if comparison.is_same:
            phrases = ((f"{counts} parameters,", Bytes(after.stored), "stored: nothing changed"),)
        changes = sorted(comparison.living, key=lambda entry: -abs(entry.bytes))[:MOST_ROWS]
        caption = f"Changed at the {comparison.peak}"
        living = Table.of("living", "Alive at the peak", LIVING_FIELDS, changes, caption=caption)
        figures_changed = any(entry.before != entry.after for entry in comparison.figure_changes)
        return (
            Title(" → ".join(names), phrases),
            *self.opening(),
            *self.reasons("What changed, and why"),
            model_table(*traces),
            *([layer_table(comparison)] if comparison.layer_changes else []),
            *([figure_table(comparison)] if figures_changed else []),
            *([living] if comparison.living else []),
            *([Findings("New findings", comparison.appeared)] if comparison.appeared else []),
            *([Findings("Resolved findings", comparison.gone)] if comparison.gone else []),
            *listed("Notes", comparison.notes),
        )

    def scenes(self) -> tuple[ScenarioView, ...]:
        before, after = self.answer.before, self.answer.after
        if not (before.events and after.events):
            return ()

        def sections() -> tuple[Chart, Table]:
            runs = timeline(before), timeline(after)
            old, new = ([*zip(map(run.path, range(len(run))), run.op, strict=True)] for run in runs)
            overlay = Overlay("before", levels_beside(runs[1].delta, runs[0].delta, (new, old)))
            title = f"Live bytes after the change{', with those before as a line' if overlay.levels else ''}"
            return Chart(runs[1], title, other=overlay if overlay.levels else None), model_table(before, after)

        return (ScenarioView("runs", "the runs of both", sections),)

    def bars(self) -> Bars:
        rows = []
        for name, sums in zip(("before", "after"), self.answer.totals, strict=True):
            sizes = {"parameter": sums.parameter_bytes, "buffer": sums.buffer_bytes}
            rows.append((Label(name), sizes | {"attribute": sums.attribute_bytes, "kept": sums.saved_bytes}))
        return Bars.of("stored and kept", _PARTS, rows)

    def figures(self, unit: str) -> dict[str, Any]:
        comparison = self.answer
        models: dict[str, dict[str, Any]] = {}
        sides = zip(("before", "after"), (comparison.before, comparison.after), comparison.names, strict=True)
        for (side, trace, name), sums in zip(sides, comparison.totals, strict=True):
            models[side] = {"model": trace.model, "name": name or trace.model}
            models[side] |= {"parameters": sums.parameters, "bytes": sums.stored}
        return {
            "schema": SCHEMA,
            **models,
            "same": comparison.is_same,
            **{name: table.records() for name, table in comparison.tables().items()},
            "peak": comparison.peak or None,
            "gpu": comparison.gpu or None,
            "optimizer": comparison.optimizer or None,
            **{name: findings_data(getattr(comparison, name), unit) for name in ("findings", "appeared", "gone")},
            "notes": comparison.notes,
        }


def model_table(before: Trace, after: Trace) -> Table:
    """Both models; the column of what a forward keeps is there if either was run."""
    models = [
        ComparedModel(name, totals(trace), stored_dtypes(trace.tensors), bool(trace.events))
        for name, trace in (("before", before), ("after", after))
    ]
    table = Table.of("models", "Stored", MODEL_FIELDS, models)
    return table if any(model.ran for model in models) else table.without("saved")


def layer_table(comparison: Comparison) -> Table:
    """Changed layers, in the order of the second model: the `MOST_ROWS` largest changes, then the rest in one row."""

    def weight(change: LayerChange) -> int:
        before, after = change.sizes
        return abs(after.stored - before.stored) + abs(after.kept - before.kept) + abs(after.outputs - before.outputs)

    def row(name: str, sizes: Iterable[LayerSizes]) -> tuple[Cell, ...]:
        before, after = sizes
        return LAYER_FIELDS.total(name, LayerChange(None, None, (None, None), (), (before, after)))

    changes = comparison.layer_changes
    shown = sorted(changes, key=weight, reverse=True)[:MOST_ROWS]
    table = Table.of("layers", "Layers that changed", LAYER_FIELDS, (change for change in changes if change in shown))
    rows, rest = table.rows, [change.sizes for change in changes if change not in shown]
    if rest:
        sides = zip(*rest, strict=True)
        rows += (row(f"{len(rest):,} more", (LayerSizes(*map(sum, zip(*side, strict=True))) for side in sides)),)
    whole = (LayerSizes(s.parameters, s.stored, s.output_bytes, s.saved_bytes) for s in comparison.totals)
    table = replace(table, rows=rows, total=row("all layers", whole), caption="Layers that changed")
    return table.without_empty("type", "kept")


def figure_table(comparison: Comparison) -> Table:
    """The figures that changed, scenario by scenario."""
    changed = [entry for entry in comparison.figure_changes if entry.before != entry.after]
    same = len(comparison.figure_changes) - len(changed)
    trained = f", training with {optimizer_in_words(comparison.optimizer)}" if comparison.optimizer else ""
    peaks = f"; peaks on {comparison.gpu}{trained}" if comparison.gpu else ""
    remarks = (Remark("figures", "unchanged", f"{same} more"),) if same else ()
    caption = f"Figures that changed{peaks}"
    return Table.of("figures", "Figures", FIGURE_FIELDS, changed, remarks=remarks, caption=caption)


class WhyDocument(Document[FindingList]):
    """Findings without the answer that they belong to."""

    def sections(self) -> tuple[Section, ...]:
        return (Findings("Why", self.answer) if self.answer else Notes("Why", (repr(self.answer),)),)

    def verdict(self) -> tuple[Finding, ...]:
        return ()

    def figures(self, unit: str) -> dict[str, Any]:
        return {"schema": "memsize.why/1", "findings": findings_data(self.answer, unit)}
