"""A fit in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from memsize.errors import OutputError
from memsize.fitreport import Fit
from memsize.nearest import suggestion
from memsize.render import FORMATS, draw
from memsize.sections.fit import records, sections

SCHEMA = "memsize.fit/1"


def render(fit: Fit, format: str, *, unit: str = "MiB", width: int | None = None) -> str:
    """`fit` in one of `FORMATS`, ending in a newline. csv has one row per scenario and GPU.

    Raises `OutputError` for an unknown format or unit.
    """
    if format not in FORMATS:
        raise OutputError(f"no format {format!r}: {suggestion(format, FORMATS)}")
    if format == "json":
        return json.dumps(data(fit, unit), indent=2, ensure_ascii=False) + "\n"
    if format == "csv":
        return _csv(fit)
    return draw(sections(fit), format, unit, width)


def data(fit: Fit, unit: str = "MiB") -> dict[str, Any]:
    """`fit` as dicts, lists, strings, numbers and None. `unit` is for sentences: figures are in bytes."""
    roles = [row.bind.roles if row.bind else None for row in fit.fit_rows]
    extras = [
        {"roles": held, "looked": list(row.looked), "step": row.step, "refused": dict(row.refused)}
        for row, held in zip(fit.fit_rows, roles, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "model": fit.model,
        "inputs": [
            {"name": i.name, "dtype": i.spec.dtype, "shape": list(i.spec.shape), "bytes": i.bytes} for i in fit.inputs
        ],
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
        "findings": [
            {"code": f.code, "bytes": f.bytes, "layers": list(f.layers), "text": f.text(unit)} for f in fit.findings
        ],
        "notes": list(fit.notes),
        "runs": fit.runs,
    }


def _remedies(fit: Fit) -> dict[str, Any] | None:
    if fit.remedied is None:
        return None
    return asdict(fit.remedied) | {"combination": list(fit.remedied.combination)}


def _csv(fit: Fit) -> str:
    file = io.StringIO()
    rows = list(records(fit))
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
