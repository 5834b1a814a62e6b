"""The checks of a session's tests, as one worker or all of them saw it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from memsize.records.check import Figure
from memsize.units import Bytes, format_bytes

_FOLDER: Final = "memsize_tables"
_LONGEST_NAME: Final = 100


def folder_of(test: pytest.Item) -> Path:
    """The folder of the tables of a test's file."""
    return test.path.parent / _FOLDER / test.path.stem


def stem_of(test: pytest.Item) -> str:
    """Name the files of a test's tables: the test with its parameters, in characters that any disk takes."""
    parts = test.nodeid.split("::")[1:]
    return re.sub(r"[^\w.\[\]=,-]+", "-", ".".join(parts))[:_LONGEST_NAME].rstrip(".-")


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

    def add(self, other: dict[str, Any]) -> None:
        """Take over what another worker found."""
        for name, values in other.items():
            mine = getattr(self, name)
            mine += [value for value in values if value not in mine]

    def lines(self) -> list[str]:
        """The summary."""
        lines = sorted(self.figures)
        for paths, outcome in ((self.compared, "compared with what is stored"), (self.written, "written")):
            if paths:
                lines.append(f"{len(paths)} layer table{'' if len(paths) == 1 else 's'} {outcome}")
        lines += [f"obsolete, no test has it: {os.path.relpath(path)}" for path in sorted(self.obsolete)]
        return lines


def _drawn(figure: Figure) -> str:
    if figure.limit is None or figure.value is None:
        return f"{figure.limit:,} does not fit" if figure.limit else str(figure.value)
    if figure.unit == "samples":
        return f"{figure.limit:,} fits"
    drawn = (format_bytes(Bytes(n)) if figure.unit == "bytes" else f"{n:,}" for n in (figure.value, figure.limit))
    value, limit = drawn
    share = f" ({figure.value / figure.limit:.0%})" if figure.limit else ""
    return f"{value} of {limit}{share}" + ("" if figure.holds else ": over")
