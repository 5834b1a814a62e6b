"""Text from elsewhere, such as names in a checkpoint or an exception's message, made safe to show.

Everything that memsize shows a person goes through here: characters that a terminal would obey, or that change the
order in which text is read, become escapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LONGEST: Final = 2000
"""Characters of a message that are worth reading; an exception may hold the tensor that it is about."""


def printable(text: str, longest: int | None = None) -> str:
    """`text` in one line, with escapes for characters that a terminal would obey or not show, cut after `longest`."""
    text = shortened(text, longest)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_lines(text: str, longest: int | None = None, escape: Callable[[str], str] | None = None) -> str:
    """The same for a text of several lines, whose ends and tabs are kept; `escape` writes one character otherwise."""
    text = shortened(text, longest)
    # Piece by piece: a report may have a hundred megabytes, and one bad character in them.
    pieces = [slice(start, start + _PIECE) for start in range(0, len(text), _PIECE)]
    if all(_is_plain(text[piece]) for piece in pieces):
        return text
    write = escape or _escape
    return "".join(_rewritten(text[piece], write) for piece in pieces)


_PIECE: Final = 1 << 16


def _is_plain(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()


def _rewritten(text: str, write: Callable[[str], str]) -> str:
    if _is_plain(text):
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else write(c) for c in text)


def shortened(text: str, longest: int | None) -> str:
    """`text` cut after `longest` characters."""
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
