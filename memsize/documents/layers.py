"""The table of a report's layers: its columns, by any name that people know them by, and its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from memsize.documents.sections import Table
from memsize.errors import UnknownOutputError
from memsize.records.aggregates import Row, Totals, visible
from memsize.records.cells import Cell, Path, Share, Specs, Words
from memsize.records.fields import Column
from memsize.records.report import Report
from memsize.units import Bytes

_COLUMNS: Final = (
    Column("layer", "layer", "name", 100, "the module's path in the model"),
    Column("type", "type", "text", 60, "its class"),
    Column("kernel", "kernel", "text", 21, "the window that it slides over its input", optional=True),
    Column("input", "input", "specs", 22, "every tensor that it is given", optional=True),
    Column("output", "output", "specs", 70, "every tensor that it returns"),
    Column("calls", "calls", "count", 20, "how often it was called", optional=True),
    Column("parameters", "parameters", "count", 80, "elements of its own parameters, tied ones once"),
    Column("trainable", "trainable", "count", 23, "those of them that require a gradient", optional=True),
    Column("share", "% of parameters", "share", 24, "its part of the model's parameters", optional=True),
    Column("dtype", "stored as", "words", 50, "the dtypes in which its parameters are stored"),
    Column("stored", "stored", "bytes", 95, "bytes of its own parameters", "parameter"),
    Column("buffers", "buffers", "bytes", 62, "bytes of its own buffers", "buffer"),
    Column("unregistered", "not registered", "bytes", 88, "bytes of tensors that it holds as plain attributes"),
    Column(
        "cast", "cast copies", "bytes", 65, "copies of parameters in another dtype, made while it runs", "cast copy"
    ),
    Column(
        "new", "new output", "bytes", 85, "new memory that its outputs take; views and in-place results: 0", "output"
    ),
    Column("saved", "kept for backward", "bytes", 90, "what its ops keep for backward, parameters apart", "activation"),
    Column("mult_adds", "multiply-adds", "count", 25, "those of its products and convolutions", optional=True),
    Column("mult_adds_share", "% of multiply-adds", "share", 24, "its part of those of the forward", optional=True),
    Column("notes", "notes", "words", 92, "other paths, ties, views, calls, what was never called or used"),
)

_FROM_RUNS: Final = ("input", "output", "calls", "cast", "new", "saved", "mult_adds", "mult_adds_share")
"""The columns of which nothing is known where the model was not run."""

COLUMNS: Final = tuple(column.key for column in _COLUMNS)
"""The columns of the layer table, in the order in which they stand by default."""

FILE_NAMES: Final = dict(
    zip(
        COLUMNS,
        "path type kernel inputs outputs calls parameters trainable parameters_share stored_as parameter_bytes "
        "buffer_bytes attribute_bytes cast_bytes output_bytes saved_bytes multiply_adds multiply_adds_share "
        "marks".split(),
        strict=True,
    )
)
"""What each column is called in files: the names that the data have for the same figures."""


_TORCHINFO_NAMES: Final = {
    "input_size": "input",
    "output_size": "output",
    "num_params": "parameters",
    "params_percent": "share",
    "kernel_size": "kernel",
}
"""What torchinfo calls the same columns, where its name is another."""


def column_keys(names: Iterable[str]) -> tuple[str, ...]:
    """Columns of the layer table by their names, or by torchinfo's; raises `OutputError` for one that there is not."""
    keys = tuple(_TORCHINFO_NAMES.get(name, name) for name in names)
    for name in keys:
        if name not in COLUMNS:
            raise UnknownOutputError("column", name, COLUMNS)
    return keys


def layer_table(report: Report, depth: int | None = None, columns: Sequence[str] | None = None) -> Table:
    """The layer table down to `depth`; its rows add up to its total. `layer` is always its first column."""
    rows, totals = visible(report.trace, depth), report.totals
    table = Table(
        name="layers",
        title="Layers",
        columns=_COLUMNS,
        rows=tuple(_cells(row, totals) for row in rows),
        total=_total_cells(totals, "so far" if report.stopped else "total"),
        chosen=columns is not None,
        hint="--columns chooses; a file or a pipe gets them all.",
    )
    if columns is not None:
        return table.picked(dict.fromkeys(("layer", *columns)))
    # A dtype that all share stands in the heading.
    dtypes = {row.dtypes for row in rows if row.parameter_bytes}
    unknown = [] if report.trace.ran else _FROM_RUNS
    table = table.without(*(["dtype"] if len(dtypes) < 2 else []), *unknown)
    return table.without_empty("buffers", "unregistered", "cast", "notes")


def _cells(row: Row, totals: Totals) -> tuple[Cell, ...]:
    return (
        Path(row.path),
        row.type,
        "×".join(map(str, row.kernel)) or None,
        Specs(row.inputs),
        Specs(output.spec for output in row.outputs),
        row.calls,
        row.parameters,
        row.trainable,
        _share(row.parameters, totals.parameters),
        Words(row.dtypes),
        Bytes(row.parameter_bytes),
        Bytes(row.buffer_bytes),
        Bytes(row.attribute_bytes),
        Bytes(row.cast_bytes),
        Bytes(row.output_bytes),
        Bytes(row.saved_bytes),
        row.multiply_adds,
        _share(row.multiply_adds, totals.multiply_adds),
        Words(row.marks),
    )


def _share(part: int | None, whole: int | None) -> Share | None:
    return Share(part / whole) if part is not None and whole else None


def _total_cells(totals: Totals, label: str) -> tuple[Cell, ...]:
    return (
        label,
        None,
        None,
        None,
        None,
        None,
        totals.parameters,
        totals.trainable,
        _share(totals.parameters, totals.parameters),
        None,
        Bytes(totals.parameter_bytes),
        Bytes(totals.buffer_bytes),
        Bytes(totals.attribute_bytes),
        Bytes(totals.cast_bytes),
        Bytes(totals.output_bytes),
        Bytes(totals.saved_bytes),
        totals.multiply_adds,
        _share(totals.multiply_adds, totals.multiply_adds),
        None,
    )
