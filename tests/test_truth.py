"""Predictions beside measured GPU memory, where the measurements are at hand (they are not part of the project)."""

from __future__ import annotations

import csv
import statistics

import pytest

from benchmarks.published.shared import folder, perceptron_peak


@pytest.fixture(scope="module")
def errors() -> list[tuple[float, float]]:
    """Absolute (MiB) and relative error of every row."""
    here = folder()
    if here is None or not (here / "a100_mlp.csv").exists():
        pytest.skip("the A100 measurements are not here")
    with (here / "a100_mlp.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    found = [(abs(perceptron_peak(row) - float(row["device_mib"])), float(row["device_mib"])) for row in rows]
    return [(error, error / measured) for error, measured in found]


def test_a100_perceptrons(errors: list[tuple[float, float]]) -> None:
    relative = [share for _, share in errors]
    assert statistics.median(relative) <= 0.001
    assert sum(share <= 0.01 for share in relative) >= 0.95 * len(errors)
    assert sum(error <= 8 for error, _ in errors) >= 0.95 * len(errors)


def test_most_rows_are_exact(errors: list[tuple[float, float]]) -> None:
    assert sum(error == 0 for error, _ in errors) >= 0.85 * len(errors)
