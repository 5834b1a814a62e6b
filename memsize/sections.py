"""A report as typed sections: what every text, page and table of it is drawn from.

A cell is a value with a type (bytes, a share, a path, tensor specs …) and never text that was already formatted, so
that each renderer draws it in its own way and none can know more than another. None is a cell that has no meaning in
its row; `Missing` is a figure that is not known, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memsize.document import Report, ScenarioResult
from memsize.findings.finding import Finding
from memsize.folds import COUNTED, Row, Totals, stored_dtypes, visible
from memsize.record import Failure, InputTensor, TensorSpec
from memsize.units import Bytes


class Path(str):
    """A module's or tensor's qualified name."""

    __slots__ = ()


class Share(float):
    """A part of a whole: 0.5 is half of it."""

    __slots__ = ()


class Words(tuple[str, ...]):
    """Short texts in one cell: marks, dtypes."""

    __slots__ = ()


class Specs(tuple[TensorSpec, ...]):
    """The tensors that a module returns."""

    __slots__ = ()


class Missing(NamedTuple):
    """A figure that is not known, and why."""

    reason: str


class Label(NamedTuple):
    """A row's name; `modelled` when its figures were not all run, `hint` says in a few words what it is."""

    text: str
    modelled: bool = False
    hint: str = ""


Cell = Label | Path | Specs | Words | Share | Bytes | str | int | Missing | None
Kind = Literal["name", "text", "specs", "count", "bytes", "share", "words"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its stable `key`, its title, what its cells are, and how much it matters where room is short."""

    key: str
    title: str
    kind: Kind
    weight: int
    help: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """What the report is about, in one line."""

    model: str
    inputs: tuple[InputTensor, ...]
    scenario: str
    parameters: int
    trainable: int
    stored: Bytes
    dtypes: tuple[str, ...]
    buffers: Bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the run stopped before its end."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Remark:
    """A line about one row of a table: what is modelled in it, or why it has no figures."""

    row: str
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its rows, and a total where rows add up. `chosen` columns were asked for and are never left out."""

    name: Literal["layers", "scenarios"]
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: tuple[Cell, ...] | None = None
    remarks: tuple[Remark, ...] = ()
    chosen: bool = False

    @property
    def modelled(self) -> bool:
        """Whether a row is marked as modelled."""
        return any(isinstance(row[0], Label) and row[0].modelled for row in self.rows)


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer: findings, most important first."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Notes:
    """Lines that qualify what stands above them."""

    title: str
    lines: tuple[str, ...]


Section = Heading | Stop | Table | Findings | Notes


def sections(report: Report, *, depth: int | None = None, columns: Sequence[str] | None = None) -> tuple[Section, ...]:
    """`report` in reading order. `columns` picks those of the layer table; by default empty ones are left out."""
    parts: list[Section] = [heading(report)]
    if report.stopped:
        parts.append(Stop(report.stopped))
    parts.append(layer_table(report, depth, columns))
    if report.scenario_results:
        parts.append(scenario_table(report))
    if report.findings:
        parts.append(Findings("Why", report.findings))
    if report.assumptions:
        parts.append(Notes("Assumed", report.assumptions))
    if report.remarks:
        parts.append(Notes("Notes", report.remarks))
    return tuple(parts)


def heading(report: Report) -> Heading:
    """The model, its input and what it stores."""
    totals = report.totals
    counted = [tensor for tensor in report.trace.tensors if tensor.kind in COUNTED]
    return Heading(
        model=report.model,
        inputs=report.trace.inputs,
        scenario=report.trace.scenario,
        parameters=totals.parameters,
        trainable=totals.trainable,
        stored=Bytes(totals.parameter_bytes),
        dtypes=stored_dtypes(counted),
        buffers=Bytes(totals.buffer_bytes),
    )


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


class _Figure(NamedTuple):
    """One figure of the scenario table: its column, its name in `Totals`, and the weight of its share (0: has none)."""

    column: Column
    name: str
    share: int


_FIGURES = (
    _Figure(Column("stored", "parameters", "bytes", 95, "bytes of stored parameters"), "parameter_bytes", 85),
    _Figure(Column("buffers", "buffers", "bytes", 42, "bytes of registered buffers"), "buffer_bytes", 0),
    _Figure(
        Column("unregistered", "not registered", "bytes", 43, "bytes of tensors held as plain attributes"),
        "attribute_bytes",
        0,
    ),
    _Figure(
        Column("master", "master weights", "bytes", 44, "float32 copies of parameters that the optimizer keeps"),
        "master_bytes",
        0,
    ),
    _Figure(
        Column("cast", "cast copies", "bytes", 75, "copies of parameters in another dtype, made while it runs"),
        "cast_bytes",
        0,
    ),
    _Figure(Column("new", "outputs", "bytes", 60, "new memory that layers' outputs take"), "output_bytes", 35),
    _Figure(
        Column("saved", "kept for backward", "bytes", 80, "what backward needs, parameters apart"), "saved_bytes", 45
    ),
    _Figure(Column("input", "input", "bytes", 30, "bytes of the model's input"), "input_bytes", 0),
    _Figure(
        Column(
            "inference",
            "inference total",
            "bytes",
            70,
            "the model, its input, cast copies and all outputs; the peak is smaller, as outputs are freed",
        ),
        "inference",
        50,
    ),
    _Figure(
        Column(
            "training",
            "training up to backward",
            "bytes",
            90,
            "the model, its input, cast copies and what is kept for backward: without gradients and optimizer state",
        ),
        "training",
        55,
    ),
)
_MAY_BE_EMPTY = ("buffer_bytes", "attribute_bytes", "master_bytes", "cast_bytes")


def scenario_table(report: Report) -> Table:
    """The scenarios side by side, each figure beside its share of float32's where that is known."""
    results, baseline = report.scenario_results, report.fp32
    shown = [f for f in _FIGURES if f.name not in _MAY_BE_EMPTY or any(result.figure(f.name) for result in results)]
    columns = [Column("scenario", "scenario", "name", 100, "how the model is stored and run")]
    for figure in shown:
        columns.append(figure.column)
        if figure.share and baseline:
            column = figure.column
            key, meaning = f"{column.key}_of_fp32", f"{column.title} ÷ fp32's"
            columns.append(Column(key, "% of fp32", "share", figure.share, meaning))
    return Table(
        name="scenarios",
        title="Scenarios",
        columns=tuple(columns),
        rows=tuple(_scenario_row(result, shown, baseline) for result in results),
        remarks=tuple(_remark(result) for result in results if result.reason),
    )


def _scenario_row(result: ScenarioResult, shown: Sequence[_Figure], baseline: Totals | None) -> tuple[Cell, ...]:
    cells: list[Cell] = [Label(result.name, result.status == "modelled", result.title)]
    for figure in shown:
        size = result.figure(figure.name)
        cells.append(Missing(result.reason or result.status) if size is None else Bytes(size))
        if figure.share and baseline:
            share = result.share(figure.name, baseline)
            cells.append(None if share is None else Share(share))
    return tuple(cells)


def _remark(result: ScenarioResult) -> Remark:
    return Remark(result.name, result.status, result.reason or "")
