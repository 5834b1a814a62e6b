"""The results file: one outcome per line, so that a run that was cut off can go on."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.zoo.case import Outcome, decode, encode


def resumed(path: Path) -> list[Outcome]:
    """The outcomes in the file, none where there is no file. A last line that was cut off is taken away."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [decode(json.loads(line)) for line in whole.splitlines()]


def append(path: Path, outcome: Outcome) -> None:
    """Write one outcome to the file's end."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(encode(outcome)) + "\n")
