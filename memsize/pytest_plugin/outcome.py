"""The checks of a session's tests, as one worker or all of them saw it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memsize.pytest_plugin.tables import folder_of, stem_of
from memsize.records.check import Figure
from memsize.units import Bytes, format_bytes


@dataclass
class Outcome:
    """Figures beside their limits, test by test; the tables that were compared and written, and the obsolete ones."""

    figures: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    obsolete: list[str] = field(default_factory=list)

    def checked(self, test: str, figure: Figure) -> None:
        """Note a figure of a test beside its limit; two questions may tell the same."""
        line = f"{test}: {figure.name} {_drawn(figure)}"
        if line not in self.figures:
            self.figures.append(line)

    def look_for_obsolete(self, tests: Iterable[pytest.Item]) -> None:
        """Note the stored tables whose test is not among `tests`, beside those that were compared.

        Tests of other files may not have been collected, so that only the folders of these tests' files are looked at.
        """
        stems: dict[Path, set[str]] = {}
        for test in tests:
            stems.setdefault(folder_of(test), set()).add(stem_of(test))
        for folder in sorted({Path(path).parent for path in (*self.compared, *self.written)}):
            folder_stems = stems.get(folder, set())
            for path in sorted(folder.glob("*.txt")):
                if path.stem not in folder_stems and path.stem.partition("--")[0] not in folder_stems:
                    self.obsolete.append(str(path))

    def to_data(self) -> dict[str, list[str]]:
        """Return the data that a worker of xdist hands over."""
        return asdict(self)

    def add(self, other: dict[str, Any]) -> None:
        """Take over what another worker found."""
        for name, values in other.items():
            mine = getattr(self, name)
            mine += [value for value in values if value not in mine]

    def lines(self) -> list[str]:
        """The summary."""
        lines = sorted(self.figures)
        if self.compared:
            lines.append(f"{_count(self.compared)} compared with what is stored")
        if self.written:
            lines.append(f"{_count(self.written)} written")
        lines += [f"obsolete, no test has it: {os.path.relpath(path)}" for path in sorted(self.obsolete)]
        return lines


def _count(paths: list[str]) -> str:
    return f"{len(paths)} layer table{'' if len(paths) == 1 else 's'}"


def _drawn(figure: Figure) -> str:
    if figure.limit is None or figure.value is None:
        return f"{figure.limit:,} does not fit" if figure.limit else str(figure.value)
    if figure.unit == "samples":
        return f"{figure.limit:,} fits"
    value, limit = (_amount(size, figure.unit) for size in (figure.value, figure.limit))
    share = f" ({figure.value / figure.limit:.0%})" if figure.limit else ""
    return f"{value} of {limit}{share}" + ("" if figure.holds else ": over")


def _amount(value: int, unit: str) -> str:
    return format_bytes(Bytes(value)) if unit == "bytes" else f"{value:,}"
