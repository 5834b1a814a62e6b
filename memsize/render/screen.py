"""The target of text output: a terminal of some size, with or without colours, or a file, which has no limits.

A colour is two private-use characters in a text until it is painted. No name in the text can contain one, because
unprintable characters are escaped before.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from memsize.printable import printable_lines
from memsize.records.roles import TITLES


class Screen(NamedTuple):
    """The size of the screen for text; None is no limit. With a height, only as much is shown as needs no scrolling."""

    width: int | None = None
    height: int | None = None
    colour: bool = False


WHOLE: Final = Screen()
"""What a file or a pipe is: complete, and without colours."""

_CUBE: Final = (0, 95, 135, 175, 215, 255)
"""The levels of red, green and blue that terminals of 256 colours have."""


def _indexed(colour: str) -> str:
    """The escape sequence of the nearest of 256 colours, which more terminals have than any: ``#1f7fe8``."""
    levels = [int(colour[position : position + 2], 16) for position in (1, 3, 5)]
    red, green, blue = (min(range(6), key=lambda step: abs(_CUBE[step] - level)) for level in levels)
    return f"\x1b[38;5;{16 + 36 * red + 6 * green + blue}m"


_STYLES: Final = {"bold": "\x1b[1m", "soft": "\x1b[2m", "alarm": "\x1b[1;31m"}
_STYLES.update({role: _indexed(title.colour) for role, title in TITLES.items()})
_MARKS: Final = {style: chr(0xE000 + position) for position, style in enumerate(_STYLES)}
_SEQUENCES: Final = {_MARKS[style]: sequence for style, sequence in _STYLES.items()} | {"\ue0ff": "\x1b[0m"}
_PIECES: Final = re.compile("([\ue000-\ue0ff])")


def styled(text: str, style: str, colour: bool = True) -> str:
    """`text` in a style: ``"bold"``, ``"soft"``, ``"alarm"``, or the colour of a role. Only `colour` marks it."""
    return f"{_MARKS[style]}{text}\ue0ff" if colour and text else text


def painted(text: str) -> str:
    """`text` for a terminal: styles become escape sequences, any other control characters are escaped."""
    return "".join(_SEQUENCES.get(piece) or printable_lines(piece) for piece in _PIECES.split(text))
