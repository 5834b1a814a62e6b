"""An explained snapshot as a document: the verdict, what was alive, the largest of it by line, and what is reserved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

from memsize.documents import Document, findings_data, plain, values_of
from memsize.documents.sections import Bars, Chart, Overlay, ScenarioView, Section, Table, Title
from memsize.documents.shared import listed, role_part
from memsize.records.explanation import ALIVE_FIELDS, PLACE_FIELDS, RESERVED_FIELDS, BlockHistory, Explanation
from memsize.records.fields import Share, Signed
from memsize.records.roles import ROLES, UNKNOWN
from memsize.records.timeline import Timeline
from memsize.records.trace import Storage
from memsize.units import Bytes

SCHEMA: Final = "memsize.explanation/1"
MOST_PLACES: Final = 12
"""Places that are shown; JSON and CSV have all."""

_MOMENTS: Final = {
    "out of memory": "when memory ran out",
    "peak": "at the peak",
    "end": "when the snapshot was taken",
}


class ExplanationDocument(Document[Explanation]):
    """An explained snapshot."""

    only_brief = False

    @cached_property
    def _chart(self) -> Chart | None:
        history, other = self.answer.history, self.answer.predicted
        if history is None:
            return None
        title, overlay = "Live bytes over the history", None
        if other and other.levels:
            overlay = Overlay(other.model if other.is_snapshot else "predicted", other.levels)
            title += f", with {other.model if other.is_snapshot else 'the prediction'} as a line"
        stacks = tuple(stack.calls for stack in history.stacks)
        return Chart(_timeline(self.answer.snapshot, history), title, stacks, history.moment, overlay)

    def scenes(self) -> tuple[ScenarioView, ...]:
        chart = self._chart
        if chart is None:
            return ()
        return (ScenarioView("history", "the history in the snapshot", lambda: (chart, self._alive_table)),)

    def bars(self) -> Bars | None:
        """The bytes of each category that was alive."""
        rows = [(role_part(entry.category), entry.bytes) for entry in self.answer.alive if entry.bytes]
        return Bars.of_whole(f"alive {_MOMENTS[self.answer.moment]}", rows) if rows else None

    def picture(self) -> Bars | Chart | None:
        return self._chart or self.bars()

    @cached_property
    def _alive_table(self) -> Table:
        explanation = self.answer
        fields = ALIVE_FIELDS.only("category", "bytes", "share", "blocks", "predicted", "difference", "how")
        predicted = Bytes(explanation.predicted.requested) if explanation.predicted else None
        off = Signed(explanation.requested - explanation.predicted.requested) if explanation.predicted else None
        blocks = sum(entry.blocks for entry in explanation.alive)
        total = ("total", Bytes(explanation.requested), Share(1.0), blocks, predicted, off, None)
        caption = f"What was alive {_MOMENTS[explanation.moment]}"
        if explanation.predicted and explanation.predicted.is_snapshot:
            fields = fields.titled(predicted="before").hinted(predicted=f"live bytes in {explanation.predicted.model}")
        table = Table.of("alive", "Alive", fields, explanation.alive, explanation, total=total, caption=caption)
        table = table if len({entry.how for entry in explanation.alive if entry.blocks}) > 1 else table.without("how")
        return table if explanation.predicted else table.without("predicted", "difference")

    def in_short(self) -> Title:
        explanation = self.answer
        segments = (Bytes(explanation.requested), "in tensors,", Bytes(explanation.reserved_then), "reserved")
        return Title(explanation.snapshot, ((_MOMENTS[explanation.moment] + ":", *segments),))

    def sections(self) -> tuple[Section, ...]:
        explanation = self.answer
        by_place, other = _place_table(explanation), explanation.predicted
        return (
            Title(explanation.snapshot, ((f"GPU {explanation.device}",),)),
            *self.opening(),
            *self.reasons(),
            *((self._alive_table, by_place) if other and not other.is_snapshot else (by_place, self._alive_table)),
            _reserved_table(explanation),
            *listed("Notes", explanation.notes),
        )

    def figures(self, unit: str) -> dict[str, Any]:
        explanation, other = self.answer, self.answer.predicted
        return {
            "schema": SCHEMA,
            **values_of(explanation, "snapshot", "device", "moment", "requested", "reserved_then", "line"),
            **values_of(explanation, "alive", "places"),
            "reserved": {"bytes": explanation.reserved.bytes, **plain(explanation.reserved)},
            **values_of(explanation, "failed", "entries"),
            "predicted": other and values_of(other, "model", "scenario", "requested", "reserved"),
            "findings": findings_data(explanation.findings, unit),
            "notes": explanation.notes,
        }


_BLOCK: Final = 512
"""What the caching allocator rounds blocks up to: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp."""


def _timeline(name: str, history: BlockHistory) -> Timeline:
    """The history as a timeline without modules, whose storages are blocks and whose lines are those of stacks."""
    numbers, delta = zip(*history.events, strict=True)
    blocks = [history.blocks[number] for number in numbers]
    rounded = (-(-abs(change) // _BLOCK) * (_BLOCK if change > 0 else -_BLOCK) for change in delta)
    mapped = [0] * len(delta)
    for segment in history.segments:
        mapped[segment.event] += segment.bytes
    categories = {block.category for block in history.blocks}
    return Timeline(
        model=name,
        scenario="",
        layers=(),
        phases=history.phases,
        op=tuple(history.stacks[block.stack].function for block in blocks),
        layer=(-1,) * len(delta),
        delta=delta,
        live={
            category: _live(
                change if block.category == category else 0 for block, change in zip(blocks, delta, strict=True)
            )
            for category in (*ROLES, *UNKNOWN)
            if category in categories
        },
        allocated=_live(rounded),
        reserved=_live(mapped),
        storage=numbers,
        address=tuple(block.address for block in blocks),
        storages=tuple(
            Storage(block.bytes, block.category, -1, history.stacks[block.stack].function, "", (), -1, line=block.stack)
            for block in history.blocks
        ),
        segments=history.segments,
        lines=tuple(stack.line for stack in history.stacks),
    )


def _live(changes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(changes))


def _place_table(explanation: Explanation) -> Table:
    other = explanation.predicted if explanation.predicted and explanation.predicted.is_snapshot else None
    rest = explanation.places[MOST_PLACES:]
    hint = "JSON and CSV have every place, with its stack."
    caption = f"Where it differs most from {other.model}" if other else "Where the largest of it was made"
    table = Table.of("places", "Places", PLACE_FIELDS, explanation.places[:MOST_PLACES], caption=caption, hint=hint)
    if rest:
        before, growth = Bytes(sum(row.before or 0 for row in rest)), Signed(sum(row.growth for row in rest))
        sums = (Bytes(sum(row.bytes for row in rest)), before, growth, sum(row.blocks for row in rest))
        table = replace(table, rows=(*table.rows, (*sums, None, f"{len(rest)} more places", *[None] * 4)))
    if other is None:
        table = table.without("before", "growth")
    return table.without_empty("line", "function", "called_from", "region")


def _reserved_table(explanation: Explanation) -> Table:
    caption = "What PyTorch had reserved when the snapshot was taken"
    reserved = explanation.reserved
    total = RESERVED_FIELDS.total("total", reserved, explanation)
    return Table.of("reserved", "Reserved", RESERVED_FIELDS, reserved.parts, explanation, total=total, caption=caption)
