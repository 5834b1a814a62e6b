"""DataFrames say what is in bytes, and answers hand out their tables as pandas styles them."""

from __future__ import annotations

import re
from pathlib import Path

import pandas
import pytest

import memsize
from memsize import StepTrace
from tests import records

SAVED = Path(__file__).parent / "saved"
COUNTS = re.compile(
    "parameters|trainable|tensors|elements|blocks.*|layers|depth|calls|multiply_adds|window|count|ranks?|node"
    "|line|batch|prompt|new|size|next_size|runs|batch_size|tokens_.*|concurrency_.*|step|event|storage|share|seconds|.*_of_fp32"
)
"""Columns of numbers that are no sizes."""


def unsaid(frame: pandas.DataFrame) -> list[str]:
    """The columns of numbers of which neither their names nor ``attrs`` say what they are in."""
    if "unit" in frame:  # each row has its own
        return []
    numbers = frame.select_dtypes("number").columns
    return [name for name in numbers if name not in frame.attrs["units"] and not COUNTS.fullmatch(name)]


@pytest.mark.parametrize("path", sorted(SAVED.glob("*.1.memsize")), ids=lambda path: path.name)
def test_every_column_of_bytes_says_so(path: Path) -> None:
    answer = memsize.load(path)
    if isinstance(answer, StepTrace):
        frames = {"events": answer.events, "timeline": answer.timeline, "collectives": answer.collectives}
    else:
        frames = {name: table.frame() for name, table in answer.tables().items()}
    assert {name: unsaid(frame) for name, frame in frames.items()} == {name: [] for name in frames}


def test_units_outlive_the_properties() -> None:
    report = records.toy_report()
    assert report.scenarios.attrs["units"]["inference"] == "B"
    assert report.layers.attrs["units"] == dict.fromkeys(
        ("parameter_bytes", "buffer_bytes", "attribute_bytes", "output_bytes", "saved_bytes", "cast_bytes"), "B"
    )
