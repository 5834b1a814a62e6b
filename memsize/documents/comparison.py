"""Two models side by side as a document, and findings alone as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from memsize.documents import MOST_SENTENCES, Document, findings_data
from memsize.documents.sections import Bars, Findings, Notes, Part, Remark, Section, Table, Title, listed, role_part
from memsize.records.aggregates import Totals, stored_dtypes, totals
from memsize.records.answer import FindingList
from memsize.records.cells import Cell, Change, Label, Missing, Path, Signed, Words
from memsize.records.comparison import Comparison, FigureChange, LayerChange, LivingChange
from memsize.records.fields import Column
from memsize.records.finding import Finding, optimizer_in_words
from memsize.records.gpu import LiveStorage
from memsize.records.roles import TITLES, noun
from memsize.records.trace import Trace
from memsize.units import Bytes

SCHEMA: Final = "memsize.comparison/1"
MOST_ROWS: Final = 40
"""Layers and tensors that are listed: a comment on a pull request has room for so many. json and csv list all."""

_MODEL_COLUMNS: Final = (
    Column("model", "model", "name", 100, "which of the two"),
    Column("parameters", "parameters", "count", 90, "elements of its parameters"),
    Column("dtypes", "stored as", "words", 80, "the dtypes of its tensors"),
    Column("stored", "stored", "bytes", 95, "bytes of all its tensors"),
    Column("saved", "kept for backward", "bytes", 70, "bytes that a forward keeps, where it was run"),
)

_TITLES: Final = {
    "parameter_bytes": "parameters",
    "buffer_bytes": "buffers",
    "attribute_bytes": "not registered",
    "master_bytes": "master weights",
    "cast_bytes": "cast copies",
    "output_bytes": "outputs",
    "saved_bytes": "kept for backward",
    "input_bytes": "input",
    "inference": "inference total",
    "training": "training up to backward",
    "device": "device, at most",
}
"""What figures are called; roles have their own names, and what is left is called as it is."""

_PARTS: Final = (
    role_part("parameter"),
    role_part("buffer"),
    Part("attribute", "not registered", "buffer"),
    Part("kept", "kept for backward", "activation"),
)


def _sizes(found: Totals) -> dict[str, int]:
    return {
        "parameter": found.parameter_bytes,
        "buffer": found.buffer_bytes,
        "attribute": found.attribute_bytes,
        "kept": found.saved_bytes,
    }


@dataclass(frozen=True)
class ComparisonDocument(Document[Comparison]):
    """What the two models store and need, and what changed from one to the other."""

    def sections(self) -> tuple[Section, ...]:
        """Both models in a table, what changed, and the layers, figures, tensors and findings that did."""
        found = self.answer
        before, after = found.before, found.after
        table = Table("models", "Stored", _MODEL_COLUMNS, (_cells("before", before), _cells("after", after)))
        names = [name or trace.model for name, trace in zip(found.names, (before, after), strict=True)]
        return (
            Title(" → ".join(names), _phrases(found)),
            *self.opening(),
            *self.reasons("What changed, and why"),
            table if before.events or after.events else table.without("saved"),
            *_tables(found),
            *([Findings("New findings", found.appeared)] if found.appeared else []),
            *([Findings("Findings that went", found.gone)] if found.gone else []),
            *listed("Notes", found.notes),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """What changed, most important first."""
        return self.answer.findings[:MOST_SENTENCES]

    def bars(self) -> Bars:
        """What both store and, where both were run, keep for backward."""
        pairs = zip(("before", "after"), self.answer.totals, strict=True)
        return Bars.of("stored and kept", _PARTS, ((Label(name), _sizes(found)) for name, found in pairs))

    def figures(self, unit: str) -> dict[str, Any]:
        """Both models, each tensor of either, and everything that changed."""
        found = self.answer
        return {
            "schema": SCHEMA,
            "before": _model_data(found.before, found.names[0]),
            "after": _model_data(found.after, found.names[1]),
            "same": found.is_same,
            **{name: table.records() for name, table in found.tables().items()},
            "peak": found.peak or None,
            "gpu": found.gpu or None,
            "optimizer": found.optimizer or None,
            "findings": findings_data(found.findings, unit),
            "appeared": findings_data(found.appeared, unit),
            "gone": findings_data(found.gone, unit),
            "notes": found.notes,
        }


def _phrases(found: Comparison) -> tuple[tuple[str | Bytes, ...], ...]:
    """What is stored, before and after."""
    before, after = found.totals
    if found.is_same:
        return ((f"{after.parameters:,} parameters,", Bytes(after.stored), "stored: nothing changed"),)
    counts = " → ".join(dict.fromkeys(f"{each.parameters:,}" for each in (before, after)))
    return ((counts, "parameters"), (Bytes(before.stored), "→", Bytes(after.stored), "stored"))


def _cells(name: str, trace: Trace) -> tuple[Cell, ...]:
    found = totals(trace)
    kept = Bytes(found.saved_bytes) if trace.events else None
    return name, found.parameters, Words(stored_dtypes(trace.tensors)), Bytes(found.stored), kept


def _model_data(trace: Trace, name: str) -> dict[str, Any]:
    found = totals(trace)
    return {
        "model": trace.model,
        "name": name or trace.model,
        "parameters": found.parameters,
        "bytes": found.stored,
    }


def _tables(found: Comparison) -> Iterator[Table]:
    if found.layer_changes:
        yield layer_table(found)
    if any(each.before != each.after for each in found.figure_changes):
        yield figure_table(found)
    if found.living:
        yield living_table(found)


# -- layers ------------------------------------------------------------------------------------------------------------

_LAYER_COLUMNS: Final = (
    Column("layer", "layer", "name", 100, "its path, and the one that it had"),
    Column("type", "type", "text", 50, "its class"),
    Column("how", "change", "words", 95, "what happened to it"),
    Column("parameters", "parameters", "count", 70, "elements of its parameters afterwards"),
    Column("before", "stored before", "bytes", 80, "bytes that it stored"),
    Column("after", "stored after", "bytes", 85, "bytes that it stores"),
    Column("change", "change", "bytes", 90, "bytes that it stores beyond what it stored"),
    Column("kept", "kept, change", "bytes", 75, "bytes that it keeps for backward beyond what it kept"),
)


def layer_table(found: Comparison) -> Table:
    """The layers that changed, in the order of the second model; of very many those that changed most."""
    changes = found.layer_changes
    shown = sorted(changes, key=_weight, reverse=True)[:MOST_ROWS]
    rest = [change for change in changes if change not in shown]
    rows = [_layer_cells(change) for change in changes if change in shown]
    if rest:
        rows.append(_rest_cells(rest))
    both = [totals(trace) for trace in (found.before, found.after)]
    stored, kept = ([getattr(each, name) for each in both] for name in ("stored", "saved_bytes"))
    total: tuple[Cell, ...] = (
        *("all layers", None, None, both[1].parameters),
        *(Bytes(stored[0]), Bytes(stored[1]), Signed(stored[1] - stored[0]), Signed(kept[1] - kept[0])),
    )
    table = Table("layers", "Layers that changed", _LAYER_COLUMNS, tuple(rows), total, caption="Layers that changed")
    return table.without_empty("type", "kept")


def _weight(change: LayerChange) -> int:
    before, after = change.sizes
    return abs(after.stored - before.stored) + abs(after.kept - before.kept) + abs(after.outputs - before.outputs)


def _layer_cells(change: LayerChange) -> tuple[Cell, ...]:
    before, after = change.sizes
    how = (*change.how, *([f"{change.layers} layers"] if change.layers > 1 else []))
    return (
        _moved(change.before, change.after),
        " → ".join(dict.fromkeys(filter(None, change.types))),
        Words(how),
        after.parameters,
        Bytes(before.stored),
        Bytes(after.stored),
        Signed(after.stored - before.stored),
        Signed(after.kept - before.kept),
    )


def _moved(before: str | None, after: str | None) -> Path:
    """The path of a layer, and the one that it had where that is another."""
    if before is None or after is None or before == after:
        return Path(before if after is None else after)
    return Path(" → ".join(path or "(model)" for path in (before, after)))


def _rest_cells(rest: Iterable[LayerChange]) -> tuple[Cell, ...]:
    changes = tuple(rest)
    sums = [[sum(change.sizes[side][place] for change in changes) for place in range(4)] for side in (0, 1)]
    (_, before, _, kept), (parameters, after, _, keeps) = sums
    return (
        *(f"{len(changes):,} more", None, None, parameters),
        *(Bytes(before), Bytes(after), Signed(after - before), Signed(keeps - kept)),
    )


# -- figures -----------------------------------------------------------------------------------------------------------

_FIGURE_COLUMNS: Final = (
    Column("scenario", "scenario", "name", 90, "how the models are stored and run"),
    Column("of", "of", "text", 85, "the run, or the peak of an inference or of a training step", alone="run or peak"),
    Column("figure", "figure", "text", 100, "what takes the bytes"),
    Column("before", "before", "bytes", 80, "bytes of the first"),
    Column("after", "after", "bytes", 85, "bytes of the second"),
    Column("change", "change", "bytes", 95, "after − before"),
    Column("share", "%", "share", 70, "the change as a part of what was before"),
)


def figure_table(found: Comparison) -> Table:
    """The figures that changed, scenario by scenario."""
    changed = [each for each in found.figure_changes if each.before != each.after]
    same = len(found.figure_changes) - len(changed)
    trained = f", training with {optimizer_in_words(found.optimizer)}" if found.optimizer else ""
    peaks = f"; peaks on {found.gpu}{trained}" if found.gpu else ""
    remarks = (Remark("figures", "unchanged", f"{same} more"),) if same else ()
    rows = tuple(map(_figure_cells, changed))
    return Table("figures", "Figures", _FIGURE_COLUMNS, rows, remarks=remarks, caption=f"Figures that changed{peaks}")


def _figure_cells(each: FigureChange) -> tuple[Cell, ...]:
    title = _TITLES.get(each.name) or (noun(each.name) if each.name in TITLES else each.name)
    unknown = Missing("this side has no such figure")
    sizes = [unknown if size is None else Bytes(size) for size in (each.before, each.after)]
    change = None if each.before is None or each.after is None else each.after - each.before
    share = None if change is None or not each.before else Change(change / each.before)
    return each.scenario, each.of, title, *sizes, None if change is None else Signed(change), share


# -- what is alive at the peak -----------------------------------------------------------------------------------------

_LIVING_COLUMNS: Final = (
    Column("role", "role", "text", 95, "what it is for"),
    Column("layer", "layer", "name", 90, "the layer that it belongs to or was made in"),
    Column("op", "op", "text", 70, "the op that made it"),
    Column("tensors", "tensor", "text", 85, "its dtype and shape in both models"),
    Column("before", "before", "bytes", 80, "bytes of the first"),
    Column("after", "after", "bytes", 85, "bytes of the second"),
    Column("change", "change", "bytes", 100, "after − before"),
)


def living_table(found: Comparison) -> Table:
    """Which of the largest tensors alive at the peak changed, those that changed most first."""
    changes = sorted(found.living, key=lambda each: -abs(_grown(each)))[:MOST_ROWS]
    rows = tuple(map(_living_cells, changes))
    return Table("living", "Alive at the peak", _LIVING_COLUMNS, rows, caption=f"Changed at the {found.peak}")


def _grown(change: LivingChange) -> int:
    return (change.after.bytes if change.after else 0) - (change.before.bytes if change.before else 0)


def _living_cells(change: LivingChange) -> tuple[Cell, ...]:
    before, after = change
    living = [each for each in (after, before) if each]
    tensors = dict.fromkeys(_tensor(each) for each in (before, after) if each)
    return (
        living[0].role,
        None if living[0].layer is None else Path(living[0].layer),
        living[0].op,
        " → ".join(tensors),
        Bytes(before.bytes if before else 0),
        Bytes(after.bytes if after else 0),
        Signed(_grown(change)),
    )


def _tensor(living: LiveStorage) -> str:
    return f"{living.dtype}[{','.join(map(str, living.shape))}]"


class WhyDocument(Document[FindingList]):
    """Findings without the answer that they are of."""

    def sections(self) -> tuple[Section, ...]:
        """The findings, or that there are none."""
        return (Findings("Why", self.answer) if self.answer else Notes("Why", (repr(self.answer),)),)

    def verdict(self) -> tuple[Finding, ...]:
        """None: the findings are all there is."""
        return ()

    def figures(self, unit: str) -> dict[str, Any]:
        """The findings."""
        return {"schema": "memsize.why/1", "findings": findings_data(self.answer, unit)}
