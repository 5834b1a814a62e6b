"""A checkpoint's report in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memsize.checkpoint.anatomy import Group, View
from memsize.checkpoint.document import CheckpointReport
from memsize.checkpoint.record import USES, Tensor
from memsize.checkpoint.sections import remains, sections
from memsize.errors import OutputError
from memsize.nearest import suggestion
from memsize.record import TensorSpec
from memsize.render import FORMATS, draw

SCHEMA = "memsize.checkpoint/1"


def render(
    report: CheckpointReport, format: str, *, unit: str = "MiB", depth: int | None = None, width: int | None = None
) -> str:
    """`report` in one of `FORMATS`, ending in a newline. `depth` cuts the module table, and the rows of csv.

    json holds everything, whatever `depth` says; csv has one row per module, which is a tensor unless `depth` is given.
    Raises `OutputError` for an unknown format or unit.
    """
    if format not in FORMATS:
        raise OutputError(f"no format {format!r}: {suggestion(format, FORMATS)}")
    if format == "json":
        return json.dumps(data(report, unit), indent=2, ensure_ascii=False) + "\n"
    if format == "csv":
        return _csv(report, depth)
    return draw(sections(report, depth), format, unit, width)


def data(report: CheckpointReport, unit: str = "MiB") -> dict[str, Any]:
    """`report` as dicts, lists, strings, numbers and None. `unit` is for sentences: figures are in bytes."""
    contents, anatomy = report.contents, report.anatomy
    return {
        "schema": SCHEMA,
        "path": contents.path,
        "format": contents.format,
        "bytes": contents.size,
        "uses": {use: sum(file.bytes_for(use) for file in contents.files) for use in USES},
        "behind_views": anatomy.unneeded,
        "unnamed": anatomy.unowned,
        "saved_by_compression": contents.compressed,
        "files": [
            {
                "name": file.name,
                "format": file.format,
                "bytes": file.size,
                "tensors": file.tensors,
                "uses": dict(zip(USES, file.uses, strict=True)),
            }
            for file in contents.files
        ],
        "parts": [{"part": group.kind, "where": group.name, **_figures(group)} for group in anatomy.parts],
        "dtypes": [{"dtype": group.name, **_figures(group)} for group in anatomy.dtypes],
        "tensors": list(tensor_rows(report)),
        "remains": dict(remains(report)),
        "against": _match(report),
        "findings": [
            {"code": f.code, "layers": list(f.layers), "bytes": f.bytes, "text": f.text(unit)} for f in report.findings
        ],
        "values": dict(contents.values),
        "classes": list(contents.classes),
        "missing": list(contents.missing),
        "notes": list(contents.notes),
    }


def tensor_rows(report: CheckpointReport) -> Iterator[dict[str, Any]]:
    """What is known of each tensor."""
    for tensor, place in zip(report.contents.tensors, report.anatomy.places, strict=True):
        yield {
            "name": tensor.name,
            "part": place.kind,
            "dtype": tensor.spec.dtype,
            "shape": list(tensor.spec.shape),
            "elements": tensor.elements,
            "bytes": tensor.bytes,
            "unneeded": tensor.unneeded,
            "shared_with": tensor.shared_with,
            "wrapper": tensor.wrapper,
            "trainable": tensor.trainable,
            **_stored(report, tensor),
        }


def _stored(report: CheckpointReport, tensor: Tensor) -> dict[str, Any]:
    if tensor.storage is None:
        return {"file": None, "storage": None, "offset": None}
    storage = report.contents.storages[tensor.storage]
    return {"file": report.contents.files[storage.file].name, "storage": storage.name, "offset": storage.offset}


def _figures(group: Group) -> dict[str, Any]:
    return {
        "tensors": group.tensors,
        "elements": group.elements,
        "dtypes": list(group.dtypes),
        "bytes": group.bytes,
        "unneeded": group.unneeded,
    }


def _match(report: CheckpointReport) -> dict[str, Any] | None:
    if report.match is None:
        return None
    return asdict(report.match) | {
        "differences": [
            {
                "name": row.name,
                "problem": row.problem,
                "file": _spec(row.file),
                "model": _spec(row.model),
                "bytes": row.bytes,
            }
            for row in report.match.differences
        ]
    }


def _spec(spec: TensorSpec | None) -> dict[str, Any] | None:
    return {"dtype": spec.dtype, "shape": list(spec.shape)} if spec else None


def _csv(report: CheckpointReport, depth: int | None) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("part", "module", "tensors", "elements", "dtypes", "bytes", "unneeded"))
    for group in report.anatomy.modules(View(depth)):
        dtypes = "; ".join(group.dtypes)
        figures = (group.tensors, group.elements, dtypes, group.bytes, group.unneeded)
        writer.writerow((group.kind, group.name, *figures))
    return file.getvalue()
