"""What the documents' data have in common, and how data become json and csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memsize.records.finding import Finding
from memsize.records.trace import InputTensor, TensorSpec


def as_json(data: Mapping[str, Any]) -> str:
    """`data` as JSON text for people and scripts, ending in a newline."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def as_csv(columns: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    """One header row, then `rows`."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()


def records_as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """`rows`, which all have the same keys: the first one's are the header."""
    return as_csv(rows[0] if rows else (), [list(row.values()) for row in rows])


def spec_data(spec: TensorSpec) -> dict[str, Any]:
    """A dtype and a shape."""
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def input_data(tensor: InputTensor) -> dict[str, Any]:
    """An input with its bytes."""
    return {"name": tensor.name, **spec_data(tensor.spec), "bytes": tensor.bytes}


def finding_data(finding: Finding, unit: str) -> dict[str, Any]:
    """A finding, its sentence in `unit`."""
    return {
        "code": finding.code,
        "layers": list(finding.layers),
        "bytes": finding.bytes,
        "text": finding.text(unit),
    }
