"""A report as JSON for scripts: stable names, exact integers, everything that is known.

Adding up a column of `layers` gives the same figure of the whole model. A figure that is not known is null, and the
scenario's `reason` says why.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memsize.documents.data import as_json, finding_data, input_data, spec_data
from memsize.records.aggregates import Row, own_rows
from memsize.records.gpu import Outlook
from memsize.records.report import Report, ScenarioResult, figures
from memsize.records.trace import Output, StoredTensor

SCHEMA = "memsize.report/1"


def render(report: Report, unit: str = "MiB") -> str:
    """`report` as JSON text; `unit` is for the sentences of its findings, figures are in bytes."""
    return as_json(data(report, unit))


def data(report: Report, unit: str = "MiB") -> dict[str, Any]:
    """`report` as dicts, lists, strings, numbers and None."""
    trace, totals = report.trace, report.totals
    return {
        "schema": SCHEMA,
        "model": report.model,
        "scenario": trace.scenario,
        "torch": trace.torch,
        "training": trace.training,
        "batch_size": trace.batch_size,
        "inputs": [input_data(tensor) for tensor in trace.inputs],
        "parameters": {"count": totals.parameters, "trainable": totals.trainable, "bytes": totals.parameter_bytes},
        "buffers": {"bytes": totals.buffer_bytes},
        "attributes": {"bytes": totals.attribute_bytes},
        "totals": figures(totals),
        "layers": [_layer(row) for row in own_rows(trace)],
        "tensors": [_tensor(tensor) for tensor in trace.tensors],
        "scenarios": [_scenario(report, result) for result in report.scenario_results],
        "findings": [finding_data(finding, unit) for finding in report.findings],
        "assumptions": list(report.assumptions),
        "notes": list(report.remarks),
        "gpu": report.gpu or None,
        "optimizer": report.optimizer or None,
        "failure": asdict(report.stopped) if report.stopped else None,
    }


def _output(output: Output) -> dict[str, Any]:
    return {**spec_data(output.spec), "memory": output.memory, "bytes": output.bytes}


def _layer(row: Row) -> dict[str, Any]:
    return {
        "path": row.path,
        "type": row.type,
        "depth": row.depth,
        "calls": row.calls,
        "outputs": [_output(output) for output in row.outputs],
        "stored_as": list(row.dtypes),
        "parameters": row.parameters,
        "trainable": row.trainable,
        "parameter_bytes": row.parameter_bytes,
        "buffer_bytes": row.buffer_bytes,
        "attribute_bytes": row.attribute_bytes,
        "output_bytes": row.output_bytes,
        "saved_bytes": row.saved_bytes,
        "cast_bytes": row.cast_bytes,
        "marks": list(row.marks),
    }


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "layer": tensor.layer,
        **spec_data(tensor.spec),
        "elements": tensor.elements,
        "bytes": tensor.bytes,
        "reported_bytes": tensor.reported_bytes,
        "trainable": tensor.trainable,
        "tied_to": tensor.tied_to,
        "wrapper": tensor.wrapper,
        "parts": [{"name": part.name, **spec_data(part.spec), "bytes": part.bytes} for part in tensor.parts],
        "used": tensor.used,
        "differentiable": tensor.differentiable,
    }


def _scenario(report: Report, result: ScenarioResult) -> dict[str, Any]:
    shares = ("parameter_bytes", "output_bytes", "saved_bytes", "inference", "training")
    return {
        "name": result.name,
        "title": result.title,
        "status": result.status,
        "reason": result.reason,
        **figures(result.totals),
        "inference": _outlook(result.inference),
        "training": _outlook(result.training),
        "untrained": result.untrained,
        "of_fp32": {name.removesuffix("_bytes"): result.share(name, report.fp32) for name in shares},
    }


def _outlook(outlook: Outlook | None) -> dict[str, Any] | None:
    if outlook is None:
        return None
    return {
        "requested": outlook.requested,
        "allocated": outlook.allocated,
        "reserved": outlook.reserved,
        "device": list(outlook.device),
        "fragmentation": outlook.fragmentation,
        "peak_phase": outlook.peak_phase,
        "peak_step": outlook.peak_step,
        "peak_layer": outlook.peak_layer,
        "peak_op": outlook.peak_op,
        "roles": dict(outlook.roles),
        "storages": [{**living._asdict(), "shape": list(living.shape)} for living in outlook.storages],
    }
