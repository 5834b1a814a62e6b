"""The published figures, and what was predicted of each: two files with a line for each row."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Final

from benchmarks.published.sources import SOURCES, Source
from memsize.records.gpu import Interval
from memsize.records.verification import off_by

FOLDER: Final = Path(__file__).parent
MEASUREMENTS: Final = FOLDER / "measurements.csv"
PREDICTIONS: Final = FOLDER / "predictions.csv"
COUNTS: Final = ("blocks", "tokens")
"""Figures that are no bytes."""


@dataclass(frozen=True)
class Row:
    """One published figure: its source, its setting as ``key=value`` words, and the text that was published."""

    source: Source
    setting: str
    published: str

    @property
    def name(self) -> str:
        """What `--only` matches and the file of predictions is sorted by."""
        return f"{self.source.name}: {self.setting}"

    @cached_property
    def values(self) -> Mapping[str, str]:
        """The setting's words by key."""
        return dict(word.split("=", 1) for word in self.setting.split())

    @property
    def figure(self) -> str:
        """Which of the allocator's peaks was published, ``allocated`` or ``reserved``, or which part of a server."""
        return self.values.get("figure", self.source.figure)

    @property
    def measured(self) -> int:
        """The figure in bytes; of blocks and tokens their number."""
        return round(float(self.published) * self.unit)

    @property
    def unit(self) -> int:
        """The bytes of the published figure's unit."""
        return 1 if self.figure in COUNTS else self.source.unit

    @property
    def rounding(self) -> float:
        """What rounding to the published digits may have changed, in bytes: half of the last one."""
        return half_digit(self.published) * self.unit


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction, in bytes; the interval is a point unless workspaces or addresses are in doubt."""

    row: Row
    predicted: int
    interval: Interval

    @property
    def error(self) -> float:
        """Predicted less measured, as a share of what was measured."""
        return self.predicted / self.row.measured - 1

    @property
    def outside(self) -> float:
        """The same from the nearer end of the interval: 0 inside, and where the published figure was rounded so that it
        may be inside.
        """
        rounded = Interval(*(round(self.row.measured + end) for end in (-self.row.rounding, self.row.rounding)))
        if rounded.low <= self.interval.high and self.interval.low <= rounded.high:
            return 0.0
        return off_by(self.interval, self.row.measured) / self.row.measured


def half_digit(published: str) -> float:
    """Half of the last digit of a number as it is written: 0.005 of ``54.09``, 500 of ``5.5e4``."""
    return 10.0 ** int(Decimal(published).as_tuple().exponent) / 2


def rows(patterns: Iterable[str] = ("*",), path: Path = MEASUREMENTS) -> list[Row]:
    """The figures whose name or source matches one of `patterns`, in the order of the file."""
    with path.open(newline="") as file:
        rows = [Row(SOURCES[line["source"]], line["setting"], line["published"]) for line in csv.DictReader(file)]
    return [row for row in rows if any(fnmatch(row.name, p) or fnmatch(row.source.name, p) for p in patterns)]


def read(path: Path = PREDICTIONS) -> dict[str, tuple[int, Interval]]:
    """What was predicted of each row, by the row's name."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {
        f"{line['source']}: {line['setting']}": (
            int(line["predicted"]),
            Interval(int(line["least"]), int(line["most"])),
        )
        for line in lines
    }


def write(predicted: Mapping[str, tuple[int, Interval]], path: Path = PREDICTIONS) -> None:
    """Write the predictions of all rows that have one, in the order of the figures."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("source", "setting", "predicted", "least", "most"))
        for row in rows():
            if row.name in predicted:
                said, interval = predicted[row.name]
                lines.writerow((row.source.name, row.setting, said, interval.low, interval.high))


def compared(patterns: Iterable[str] = ("*",)) -> list[Compared]:
    """The rows with a stored prediction beside it."""
    said = read()
    return [Compared(row, *said[row.name]) for row in rows(patterns) if row.name in said]
