"""The memory-format audit in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memsize.documents.data import as_json, finding_data, input_data, records_as_csv, spec_data
from memsize.documents.layout import sections
from memsize.records.layout import LayoutReport, Run, layer_row
from memsize.render import check_format, draw

SCHEMA = "memsize.layout/1"


def render(
    report: LayoutReport, format: str, *, unit: str = "MiB", depth: int | None = None, width: int | None = None
) -> str:
    """`report` in one of `FORMATS`, ending in a newline. `depth` cuts the layer table.

    json holds everything, whatever `depth` says; csv has one row per module, whose bytes are its own. Raises
    `OutputError` for an unknown format or unit.
    """
    check_format(format)
    if format == "json":
        return as_json(data(report, unit))
    if format == "csv":
        return records_as_csv([layer_row(report.audit, layer) for layer in report.audit.last.layers])
    return draw(sections(report, depth), format, unit, width)


def data(report: LayoutReport, unit: str = "MiB") -> dict[str, Any]:
    """`report` as dicts, lists, strings, numbers and None. `unit` is for sentences: figures are in bytes."""
    audit = report.audit
    return {
        "schema": SCHEMA,
        "model": audit.model,
        "scenario": audit.scenario,
        "training": audit.training,
        "inputs": [input_data(tensor) for tensor in audit.inputs],
        "converted": {"inputs": audit.converted_inputs, "weights": audit.converted},
        "copied_bytes": audit.last.copied,
        "row_major_copied_bytes": audit.plain.copied,
        "layers": [
            {
                "path": layer.path,
                "type": layer.type,
                "depth": layer.depth,
                "leaf": layer.leaf,
                "calls": layer.calls,
                "parameters": list(layer.parameters),
                "inputs": list(layer.inputs),
                "outputs": list(layer.outputs),
                "output": [spec_data(spec) for spec in layer.specs],
                "copied_bytes": audit.last.copied_in(layer.path),
                "row_major_copied_bytes": audit.plain.copied_in(layer.path),
            }
            for layer in audit.last.layers
        ],
        "copies": _events(audit.last, "copies"),
        "row_major_copies": _events(audit.plain, "copies"),
        "losses": _events(audit.last, "losses"),
        "findings": [finding_data(finding, unit) for finding in report.findings],
        "notes": list(report.notes),
    }


def _events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [asdict(event) | {"tensor": spec_data(event.tensor)} for event in getattr(run, kind)]
