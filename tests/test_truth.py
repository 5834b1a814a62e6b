"""Predictions beside measured GPU memory, where the measurements are at hand (they are not part of the project)."""

from __future__ import annotations

import csv
import statistics
from typing import NamedTuple

import pytest

from benchmarks.published.shared import BESIDE, folder, perceptron_step
from memsize.units import MiB


class Compared(NamedTuple):
    """A row: MiB that were measured, the allocator's segments, and what the card may show."""

    measured: float
    reserved: float
    low: float
    high: float


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    here = folder()
    if here is None or not (here / "a100_mlp.csv").exists():
        pytest.skip("the A100 measurements are not here")
    compared = []
    with (here / "a100_mlp.csv").open() as lines:
        for row in csv.DictReader(lines):
            peak = perceptron_step(row).peak
            low, high = peak.device
            compared.append(Compared(float(row["device_mib"]), peak.reserved / MiB, low / MiB, high / MiB))
    return compared


@pytest.mark.thorough
def test_the_segments_of_perceptrons_on_an_a100(rows: list[Compared]) -> None:
    """Beside one amount that all of these figures hold."""
    off = [abs(BESIDE + row.reserved - row.measured) for row in rows]
    relative = [error / row.measured for error, row in zip(off, rows, strict=True)]
    assert statistics.median(relative) <= 0.001
    assert sum(share <= 0.01 for share in relative) >= 0.95 * len(rows)
    assert sum(error <= 8 for error in off) >= 0.95 * len(rows)
    assert sum(error == 0 for error in off) >= 0.85 * len(rows)


def test_what_the_a100_shows(rows: list[Compared]) -> None:
    """Nothing is fitted here: what a driver takes, and all the code of PyTorch and cuBLAS."""
    assert sum(row.low <= row.measured <= row.high for row in rows) >= 0.95 * len(rows)
    assert max(row.high - row.low for row in rows) <= 300
