"""The memory-format audit in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from memsize.errors import OutputError
from memsize.layout import LayoutReport, Run, layer_row
from memsize.nearest import suggestion
from memsize.record import InputTensor, TensorSpec
from memsize.render import FORMATS, draw
from memsize.sections.layout import sections

SCHEMA = "memsize.layout/1"


def render(
    report: LayoutReport, format: str, *, unit: str = "MiB", depth: int | None = None, width: int | None = None
) -> str:
    """`report` in one of `FORMATS`, ending in a newline. `depth` cuts the layer table.

    json holds everything, whatever `depth` says; csv has one row per module, whose bytes are its own. Raises
    `OutputError` for an unknown format or unit.
    """
    if format not in FORMATS:
        raise OutputError(f"no format {format!r}: {suggestion(format, FORMATS)}")
    if format == "json":
        return json.dumps(data(report, unit), indent=2, ensure_ascii=False) + "\n"
    if format == "csv":
        return _csv(report)
    return draw(sections(report, depth), format, unit, width)


def data(report: LayoutReport, unit: str = "MiB") -> dict[str, Any]:
    """`report` as dicts, lists, strings, numbers and None. `unit` is for sentences: figures are in bytes."""
    audit = report.audit
    return {
        "schema": SCHEMA,
        "model": audit.model,
        "scenario": audit.scenario,
        "training": audit.training,
        "inputs": [_input(tensor) for tensor in audit.inputs],
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
                "output": [_spec(spec) for spec in layer.specs],
                "copied_bytes": audit.last.copied_in(layer.path),
                "row_major_copied_bytes": audit.plain.copied_in(layer.path),
            }
            for layer in audit.last.layers
        ],
        "copies": _events(audit.last, "copies"),
        "row_major_copies": _events(audit.plain, "copies"),
        "losses": _events(audit.last, "losses"),
        "findings": [
            {"code": f.code, "layers": list(f.layers), "bytes": f.bytes, "text": f.text(unit)} for f in report.findings
        ],
        "notes": list(report.notes),
    }


def _events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [asdict(event) | {"tensor": _spec(event.tensor)} for event in getattr(run, kind)]


def _input(tensor: InputTensor) -> dict[str, Any]:
    return {"name": tensor.name, **_spec(tensor.spec), "bytes": tensor.bytes}


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def _csv(report: LayoutReport) -> str:
    rows = [layer_row(report.audit, layer) for layer in report.audit.last.layers]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
