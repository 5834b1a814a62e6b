"""The layer table of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memsize.documents.sections import Cell, Column, Path, Specs, Table, Words
from memsize.records.aggregates import Row, Totals, visible
from memsize.units import Bytes

if TYPE_CHECKING:
    from memsize.records.report import Report


class _LayerColumn(NamedTuple):
    column: Column
    cell: Callable[[Row], Cell]
    total: Callable[[Totals], Cell]


def _nothing(totals: Totals) -> Cell:
    return None


_LAYER_COLUMNS: dict[str, _LayerColumn] = {
    entry.column.key: entry
    for entry in (
        _LayerColumn(
            Column("layer", "layer", "name", 100, "the module's path in the model"),
            lambda row: Path(row.path),
            lambda totals: "total",
        ),
        _LayerColumn(Column("type", "type", "text", 60, "its class"), lambda row: row.type, _nothing),
        _LayerColumn(
            Column("output", "output", "specs", 70, "every tensor that it returns"),
            lambda row: Specs(output.spec for output in row.outputs),
            _nothing,
        ),
        _LayerColumn(Column("calls", "calls", "count", 20, "how often it was called"), lambda row: row.calls, _nothing),
        _LayerColumn(
            Column("parameters", "parameters", "count", 80, "elements of its own parameters, tied ones once"),
            lambda row: row.parameters,
            lambda totals: totals.parameters,
        ),
        _LayerColumn(
            Column("dtype", "stored as", "words", 50, "the dtypes in which its parameters are stored"),
            lambda row: Words(row.dtypes),
            _nothing,
        ),
        _LayerColumn(
            Column("stored", "stored", "bytes", 95, "bytes of its own parameters"),
            lambda row: Bytes(row.parameter_bytes),
            lambda totals: Bytes(totals.parameter_bytes),
        ),
        _LayerColumn(
            Column("buffers", "buffers", "bytes", 62, "bytes of its own buffers"),
            lambda row: Bytes(row.buffer_bytes),
            lambda totals: Bytes(totals.buffer_bytes),
        ),
        _LayerColumn(
            Column("unregistered", "not registered", "bytes", 88, "bytes of tensors that it holds as plain attributes"),
            lambda row: Bytes(row.attribute_bytes),
            lambda totals: Bytes(totals.attribute_bytes),
        ),
        _LayerColumn(
            Column("cast", "cast copies", "bytes", 65, "copies of parameters in another dtype, made while it runs"),
            lambda row: Bytes(row.cast_bytes),
            lambda totals: Bytes(totals.cast_bytes),
        ),
        _LayerColumn(
            Column("new", "new output", "bytes", 85, "new memory that its outputs take; views and in-place results: 0"),
            lambda row: Bytes(row.output_bytes),
            lambda totals: Bytes(totals.output_bytes),
        ),
        _LayerColumn(
            Column("saved", "kept for backward", "bytes", 90, "what its ops keep for backward, parameters apart"),
            lambda row: Bytes(row.saved_bytes),
            lambda totals: Bytes(totals.saved_bytes),
        ),
        _LayerColumn(
            Column("notes", "notes", "words", 92, "ties, views, calls, what was never called or used"),
            lambda row: Words(row.marks),
            _nothing,
        ),
    )
}

COLUMNS: tuple[str, ...] = tuple(_LAYER_COLUMNS)
"""The columns of the layer table, in the order in which they stand by default."""

_ON_REQUEST = ("calls",)
_ALWAYS = ("layer", "type", "output", "parameters", "stored", "new", "saved")


def layer_table(report: Report, depth: int | None = None, columns: Sequence[str] | None = None) -> Table:
    """The layer table down to `depth`; its rows add up to its total."""
    rows = visible(report.trace, depth)
    entries = [_LAYER_COLUMNS[key] for key in columns or _filled(rows)]
    stopped = report.stopped is not None
    total = [entry.total(report.totals) for entry in entries]
    if stopped and total[0] == "total":
        total[0] = "so far"
    return Table(
        name="layers",
        title="Layers",
        columns=tuple(entry.column for entry in entries),
        rows=tuple(tuple(entry.cell(row) for entry in entries) for row in rows),
        total=tuple(total),
        chosen=columns is not None,
        hint="--columns chooses; a file or a pipe gets them all.",
    )


def _filled(rows: Sequence[Row]) -> list[str]:
    """The columns worth showing unasked: the plain ones, and those that say something about these rows."""
    dtypes = {row.dtypes for row in rows if row.parameter_bytes}
    return [
        key
        for key, entry in _LAYER_COLUMNS.items()
        if key in _ALWAYS
        or (key == "dtype" and len(dtypes) > 1)
        or (key not in ("dtype", *_ON_REQUEST) and any(map(entry.cell, rows)))
    ]
