"""The scenarios of a report side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from memsize.documents.sections import Cell, Column, Label, Missing, Remark, Share, Table
from memsize.records.aggregates import Totals
from memsize.units import Bytes

if TYPE_CHECKING:
    from memsize.records.report import Report, ScenarioResult


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
