"""`render`: any answer in the format that its reader wants.

Each format is a function, and a line in the table below. It draws the sections, the data or a flat table of any
document (`memsize.documents`), knows none of them in particular, and adds no fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from json import dumps
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memsize.documents import document
from memsize.errors import OutputError, UnknownOutputError
from memsize.printable import printable_lines
from memsize.records.answer import Renderable
from memsize.units import AUTO, DECIMAL, UNITS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.text import Text

__all__ = ["FORMATS", "IMAGES", "check_images", "format_of", "image", "pieces", "plotted", "render"]

_FORMATS: Final = {
    "text": ("memsize.render.text:draw", (".txt",)),
    "markdown": ("memsize.render.markdown:draw", (".md", ".markdown")),
    "json": ("memsize.render.data:draw_json", (".json",)),
    "csv": ("memsize.render.data:draw_csv", (".csv",)),
    "html": ("memsize.render.html:page", (".html", ".htm")),
    "agent": ("memsize.render.text:draw_brief", ()),
    "notebook": ("memsize.render.html:fragment", ()),
    "line": ("memsize.render.cell_text:one_line", ()),
    "speedscope": ("memsize.render.data:draw_speedscope", ()),
    "github": ("memsize.render.data:github", ()),
    "junit": ("memsize.render.data:junit", ()),
}
"""What draws each format, imported when it is asked for, and the suffixes of its files (none: it is no file of any
answer; a command that writes it says how its files end).

All are called alike: with a document, the unit of bytes, and the screen, which only text minds. What can be long is
drawn in pieces.
"""

FORMATS: Final[Mapping[str, tuple[str, ...]]] = {name: suffixes for name, (_, suffixes) in _FORMATS.items() if suffixes}
"""The formats of files, each with its suffixes."""
IMAGES: Final[Mapping[str, tuple[str, ...]]] = {"png": (".png",), "svg": (".svg",)}
"""The formats of pictures, each with its suffixes: what an answer's page shows first, and nothing else."""


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


def render(
    answer: Renderable,
    format: str,
    *,
    unit: str | None = None,
    width: int | None = None,
    height: int | None = None,
    colour: bool = False,
    **view: Any,
) -> str:
    """`answer` in one of `FORMATS`, ending in a newline; as ``"notebook"``, which is a part of a
    page; or as ``"agent"``, its verdict and findings in 40 lines.

    `unit` is the unit of bytes (json and csv always hold exact bytes); by default each column, picture and figure in a
    sentence has the one that suits its size, with three significant digits from 1 GiB on. Text fits `width` characters
    if that is set, and shows only the parts that `height` lines have room for; without `height` it is complete.
    `colour` is for a terminal.
    `view` sets fields of the answer's document that choose what is shown, such as `depth` and `columns` of a report.
    json holds everything, whatever `view` says; csv holds the document's first flat table.

    Raises `OutputError` for an unknown format, unit or column, and for a depth that there is not.
    """
    return "".join(pieces(answer, format, Screen(width, height, colour), unit=unit, **view))


def pieces(
    answer: Renderable, format: str, screen: Screen = WHOLE, *, unit: str | None = None, **view: Any
) -> Iterator[str]:
    """The text of `render` piece by piece, where a format can draw it so: it may have hundreds of megabytes."""
    if format not in _FORMATS:
        raise UnknownOutputError("format", format, FORMATS)
    _check_unit(unit)
    function, _ = _FORMATS[format]
    shown = document(answer, **view)
    drawn: str | Iterator[str] = resolve_name(function)(shown, unit or AUTO, screen)
    texts = (drawn,) if isinstance(drawn, str) else drawn
    if format == "text" and screen.colour:
        return iter(texts)
    # Whatever a renderer let through: no format needs a control character, but for a terminal's colours.
    escape = (lambda character: dumps(character)[1:-1]) if format in ("json", "speedscope") else None
    return (printable_lines(text, escape=escape) for text in texts)


def plotted(answer: Renderable, picture: Literal["overview", "layers"], unit: str | None, **view: Any) -> Figure:
    """One `picture` of `answer` as a figure of plotly; `view` as in `render`.

    Raises `OutputError` without plotly, where there is nothing to plot, and for an unknown unit or column.
    """
    _check_unit(unit)
    shown = document(answer, **view)
    return resolve_name(f"memsize.render.figures:{picture}")(shown, unit or AUTO)


def image(answer: Renderable, format: str, *, unit: str | None = None, **view: Any) -> bytes:
    """The first picture of `answer` as a file in one of `IMAGES`; `view` as in `render`.

    Raises `OutputError` as `check_images` and `plotted` do, and without a browser.
    """
    check_images()
    figure = plotted(answer, "overview", unit, **view)
    content: bytes = resolve_name("memsize.render.figures:image")(figure, format)
    return content


def check_images() -> None:
    """Raise `OutputError` where the packages are missing that pictures need."""
    missing = [name for name in ("plotly", "kaleido") if find_spec(name) is None]
    if missing:
        raise OutputError(f"a picture needs {' and '.join(missing)}: pip install 'memsize[plots]'")


def _check_unit(unit: str | None) -> None:
    if unit not in (None, AUTO) and unit not in UNITS | DECIMAL:
        raise UnknownOutputError("unit", unit, UNITS | DECIMAL)


def format_of(name: str, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> str:
    """Return the one of `formats` that the suffix of the file `name` stands for; raise `OutputError` if none does."""
    for format, suffixes in formats.items():
        if name.lower().endswith(suffixes):
            return format
    suffixes_text = ", ".join(suffix for suffixes in formats.values() for suffix in suffixes)
    raise OutputError(
        f"cannot tell a format from the file name {name!r}: end it in one of {suffixes_text}, or name the format"
    )
