"""The results file: one outcome per line, so that a run that was cut off can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.zoo.case import Outcome, decode, encode


def read(path: Path) -> Iterator[Outcome]:
    """The outcomes in the file, none where there is no file. A last line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield decode(json.loads(line))


def append(path: Path, outcome: Outcome) -> None:
    """Write one outcome to the file's end."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(encode(outcome)) + "\n")
