"""Checks for continuous integration as GitHub's annotations."""

from __future__ import annotations

from typing import Any, Final

from memsize.documents import Document
from memsize.printable import printable
from memsize.render.screen import WHOLE, Screen

_LEVELS: Final = {"error": "error", "warning": "warning", "note": "notice"}


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """GitHub workflow commands, which annotate the lines of a pull request; an empty line where there is none."""
    lines = []
    for annotation in document.annotations(unit):
        values = {"file": annotation.file.replace("\\", "/"), "line": str(annotation.line)}
        values["title"] = f"memsize: {annotation.code}"
        properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in values.items())
        lines.append(f"::{_LEVELS[annotation.severity]} {properties}::{_escaped(annotation.text)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's toolkit writes messages and, with `more`, properties."""
    text = "%0A".join(printable(line).replace("%", "%25") for line in text.split("\n"))
    for character in more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
