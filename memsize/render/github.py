"""Problems as GitHub workflow commands, which annotate the lines of a pull request."""

from __future__ import annotations

from typing import Any

from memsize.documents import Case, Document
from memsize.printable import printable
from memsize.render.screen import WHOLE, Screen

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """One line for each case of `document` that something is wrong with; an empty one where there is none."""
    return "\n".join(_annotation(case) for case in document.cases(unit) if case.severity) + "\n"


def _annotation(case: Case) -> str:
    values = {"file": case.file.replace("\\", "/"), "line": str(case.line), "title": f"memsize: {case.code}"}
    properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in values.items())
    return f"::{_LEVELS[case.severity or 'note']} {properties}::{_escaped(f'{case.group}: {case.text}')}"


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's toolkit writes messages and, with `more`, properties."""
    text = printable(text).replace("%", "%25")
    for character in more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
