"""A checkpoint's report in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memsize.checkpoint.findings import Inspection
from memsize.checkpoint.record import USES, Group, Tensor, View
from memsize.checkpoint.sections import remains, sections
from memsize.documents.data import as_csv, as_json, finding_data, spec_data
from memsize.render import check_format, draw

SCHEMA = "memsize.checkpoint/1"


def render(
    report: Inspection, format: str, *, unit: str = "MiB", depth: int | None = None, width: int | None = None
) -> str:
    """`report` in one of `FORMATS`, ending in a newline. `depth` cuts the module table, and the rows of csv.

    json holds everything, whatever `depth` says; csv has one row per module, which is a tensor unless `depth` is given.
    Raises `OutputError` for an unknown format or unit.
    """
    check_format(format)
    if format == "json":
        return as_json(data(report, unit))
    if format == "csv":
        return _csv(report, depth)
    return draw(sections(report, depth), format, unit, width)


def data(report: Inspection, unit: str = "MiB") -> dict[str, Any]:
    """`report` as dicts, lists, strings, numbers and None. `unit` is for sentences: figures are in bytes."""
    contents, breakdown = report.contents, report.breakdown
    return {
        "schema": SCHEMA,
        "path": contents.path,
        "format": contents.format,
        "bytes": contents.size,
        "uses": {use: sum(file.bytes_for(use) for file in contents.files) for use in USES},
        "behind_views": breakdown.unneeded,
        "unnamed": breakdown.unowned,
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
        "parts": [{"part": group.kind, "where": group.name, **_figures(group)} for group in breakdown.parts],
        "dtypes": [{"dtype": group.name, **_figures(group)} for group in breakdown.dtypes],
        "tensors": list(tensor_rows(report)),
        "remains": dict(remains(report)),
        "against": _match(report),
        "findings": [finding_data(finding, unit) for finding in report.findings],
        "values": dict(contents.values),
        "classes": list(contents.classes),
        "missing": list(contents.missing),
        "notes": list(contents.notes),
    }


def tensor_rows(report: Inspection) -> Iterator[dict[str, Any]]:
    """What is known of each tensor."""
    for tensor, place in zip(report.contents.tensors, report.breakdown.places, strict=True):
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


def _stored(report: Inspection, tensor: Tensor) -> dict[str, Any]:
    if tensor.storage is None:
        return {"file": None, "storage": None, "offset": None}
    storage = report.contents.storages[tensor.storage]
    return {"file": report.contents.files[storage.file].name, "storage": storage.name, "offset": storage.offset}


def _figures(group: Group, separator: str | None = None) -> dict[str, Any]:
    """The figures of a group; its dtypes as a list, or as one text with `separator`."""
    return {
        "tensors": group.tensors,
        "elements": group.elements,
        "dtypes": list(group.dtypes) if separator is None else separator.join(group.dtypes),
        "bytes": group.bytes,
        "unneeded": group.unneeded,
    }


def _match(report: Inspection) -> dict[str, Any] | None:
    if report.match is None:
        return None
    return asdict(report.match) | {
        "differences": [
            {
                "name": row.name,
                "problem": row.problem,
                "file": spec_data(row.file) if row.file else None,
                "model": spec_data(row.model) if row.model else None,
                "bytes": row.bytes,
            }
            for row in report.match.differences
        ]
    }


def _csv(report: Inspection, depth: int | None) -> str:
    columns = ("part", "module", "tensors", "elements", "dtypes", "bytes", "unneeded")
    groups = report.breakdown.modules(View(depth))
    return as_csv(columns, ((group.kind, group.name, *_figures(group, "; ").values()) for group in groups))
