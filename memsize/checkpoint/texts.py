"""Texts out of a file, made fit to be shown: no control characters, no end."""

from __future__ import annotations

LONGEST = 300
"""No name in a checkpoint is longer than this; what is longer is cut."""


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` with what a terminal would obey or not show written as escapes, and cut after `longest` characters."""
    if len(text) > longest:
        text = f"{text[: longest - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
