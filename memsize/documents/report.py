"""A report as typed sections, in reading order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memsize.documents.layers import layer_table
from memsize.documents.peaks import peak_sections
from memsize.documents.scenarios import scenario_table
from memsize.documents.sections import Findings, Heading, Notes, Section, Stop
from memsize.records.aggregates import COUNTED, stored_dtypes
from memsize.units import Bytes

if TYPE_CHECKING:
    from memsize.records.report import Report


def sections(report: Report, *, depth: int | None = None, columns: Sequence[str] | None = None) -> tuple[Section, ...]:
    """`report` in reading order. `columns` picks those of the layer table; by default empty ones are left out."""
    parts: list[Section] = [heading(report)]
    if report.stopped:
        parts.append(Stop(report.stopped))
    parts.append(layer_table(report, depth, columns))
    if report.scenario_results:
        parts.append(scenario_table(report))
    parts.extend(peak_sections(report))
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
