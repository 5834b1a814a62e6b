"""Layer tables in files beside the tests: exact figures in aligned columns, so that a difference can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Final

import pytest

from memsize import files
from memsize.records.aggregates import own_rows, totals
from memsize.records.trace import Trace

FOLDER: Final = "memsize_tables"
_HEAD: Final = ("layer", "type", "output", "parameters", "stored", "new output", "kept")
_NUMBERS: Final = 3
"""The columns from here on are numbers."""
_LONGEST_NAME: Final = 100


def folder_of(test: pytest.Item) -> Path:
    """The folder of the tables of a test's file."""
    return test.path.parent / FOLDER / test.path.stem


def stem_of(test: pytest.Item) -> str:
    """Name the files of a test's tables: the test with its parameters, in characters that any disk takes."""
    parts = test.nodeid.split("::")[1:]
    return re.sub(r"[^\w.\[\]=,-]+", "-", ".".join(parts))[:_LONGEST_NAME].rstrip(".-")


def layer_table(trace: Trace) -> str:
    """One line for each layer with its own figures: elements of its parameters, and bytes."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for row in own_rows(trace):
        stored = row.parameter_bytes + row.buffer_bytes + row.attribute_bytes
        outputs = ", ".join(str(output.spec) for output in row.outputs)
        rows.append(
            (
                row.path or "(model)",
                row.type,
                outputs,
                *_texts(row.parameters, stored, row.output_bytes, row.saved_bytes),
            )
        )
    table_totals = totals(trace)
    sums = _texts(table_totals.parameters, table_totals.stored, table_totals.output_bytes, table_totals.saved_bytes)
    rows.append(("total", "", "", *sums))
    return _aligned(rows)


def _texts(*values: int) -> tuple[str, ...]:
    return tuple(f"{value:,}" for value in values)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if column >= _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines) + "\n"


def difference(stored: str, current: str, path: Path) -> str:
    """Show what changed from the stored table to this one, the heading and the lines around it included."""
    # Columns may have become wider: that alone changes no figure.
    before, after = ([re.sub("  +", "  ", line) for line in text.splitlines()] for text in (stored, current))
    lines = unified_diff(before, after, f"{path.name} (stored)", "now", n=1, lineterm="")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Store a table, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text, overwrite=True)
