"""The target of text output: a terminal of some size, with or without colours, or a file, which has no limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memsize.printable import printable_lines

if TYPE_CHECKING:
    from rich.text import Text


class Screen(NamedTuple):
    """The size of the screen for text; None is no limit. With a height, only as much is shown as needs no scrolling."""

    width: int | None = None
    height: int | None = None
    colour: bool = False


WHOLE: Final = Screen()
"""What a file or a pipe is: complete, and without colours."""


def aligned(text: Text, width: int) -> Text:
    """`text` at the left of `width` columns of a terminal."""
    text.align("left", width)
    return text


def painted(text: Text) -> str:
    """`text` with its styles as escape sequences of 256 colours, which more terminals have than any others.

    Control characters of the text itself are escaped.
    """
    from rich.color import ColorSystem
    from rich.console import Console

    drawn = ((printable_lines(piece.text), piece.style) for piece in text.render(Console()))
    return "".join(style.render(part, color_system=ColorSystem.EIGHT_BIT) if style else part for part, style in drawn)
