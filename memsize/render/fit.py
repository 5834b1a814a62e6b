"""A fit in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memsize.documents.data import as_json, finding_data, input_data, records_as_csv
from memsize.documents.fit import records, sections
from memsize.records.fit import Bind, Fit
from memsize.render import check_format, draw

SCHEMA = "memsize.fit/1"


def render(fit: Fit, format: str, *, unit: str = "MiB", width: int | None = None) -> str:
    """`fit` in one of `FORMATS`, ending in a newline. csv has one row per scenario and GPU.

    Raises `OutputError` for an unknown format or unit.
    """
    check_format(format)
    if format == "json":
        return as_json(data(fit, unit))
    if format == "csv":
        return records_as_csv(list(records(fit)))
    return draw(sections(fit), format, unit, width)


def data(fit: Fit, unit: str = "MiB") -> dict[str, Any]:
    """`fit` as dicts, lists, strings, numbers and None. `unit` is for sentences: figures are in bytes."""
    roles = [row.bind.roles if row.bind else None for row in fit.fit_rows]
    extras = [
        {
            "roles": held,
            "largest": _largest(row.bind),
            "looked": list(row.looked),
            "step": row.step,
            "refused": dict(row.refused),
        }
        for row, held in zip(fit.fit_rows, roles, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "model": fit.model,
        "inputs": [input_data(tensor) for tensor in fit.inputs],
        "vary": fit.vary,
        "asked": fit.asked,
        "optimizer": fit.optimizer or None,
        "budgets": [
            {
                "name": budget.name,
                "device": budget.device,
                "context": budget.context,
                "margin": budget.margin,
                "allocator": budget.allocator,
            }
            for budget in fit.budgets
        ],
        "rows": [row | extra for row, extra in zip(records(fit), extras, strict=True)],
        "remedies": _remedies(fit),
        "findings": [finding_data(finding, unit) for finding in fit.findings],
        "notes": list(fit.notes),
        "runs": fit.runs,
    }


def _largest(bind: Bind | None) -> dict[str, Any] | None:
    if bind is None or bind.largest is None:
        return None
    most = bind.largest
    return {"tensors": most.tensors, "dtype": most.spec.dtype, "shape": list(most.spec.shape), "bytes": most.bytes}


def _remedies(fit: Fit) -> dict[str, Any] | None:
    if fit.remedied is None:
        return None
    return asdict(fit.remedied) | {"combination": list(fit.remedied.combination)}
