"""An answer as a web page that one can touch, or as a still part of one for a notebook. Nothing is fetched.

Everything is drawn here, so that a page reads well without scripts; those in `page/` sort, fold, zoom and follow what
is already there. A timeline travels with its picture as the JSON that `memsize timeline` writes.
"""

from __future__ import annotations

import base64
import gzip
import platform
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from json import dumps
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memsize.documents import Document
from memsize.documents.sections import Bar, Bars, Chart, ScenarioView, Section, Table, Title
from memsize.printable import printable, printable_lines
from memsize.records.cells import Label
from memsize.records.roles import TITLES, Role
from memsize.records.timeline import Timeline, to_data
from memsize.records.trace import Storage
from memsize.render import bars, markdown, page_cells, plot
from memsize.render.assets import hashed, script, style
from memsize.render.cell_text import MODELLED, draw_bytes, draw_cell, draw_failure, draw_phrase, draw_phrases
from memsize.render.screen import WHOLE, Screen
from memsize.render.text import LEFT
from memsize.units import DECIMAL, UNITS
from memsize.version import VERSION

if TYPE_CHECKING:
    from jinja2 import Template


MOST_LINKS: Final = 8
"""The largest number of modules that a finding links to."""


def page(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """`document` as a page that stands on its own."""
    return _drawn(document, unit, standalone=True) + "\n"


def fragment(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """`document` as a part of a page, without scripts."""
    return _drawn(document, unit, standalone=False)


def _drawn(document: Document[Any], unit: str, *, standalone: bool) -> str:
    sections = document.sections()
    if not standalone:
        sections = tuple(section.usual() if isinstance(section, Table) else section for section in sections)
    first = sections[0]
    context = _shared(unit, standalone) | {
        "parts": _typed(sections),
        "name": first.name if isinstance(first, Title) else "",
        "is_timeline": any(isinstance(section, Chart) for section in sections),
        "style": style("base", "page") if standalone else style("base"),
    }
    if standalone:
        context |= {
            "script": script(),
            "script_hash": hashed(script()),
            "markdown": _packed(markdown.draw(document, unit)),
            "unit_bytes": (UNITS | DECIMAL)[unit],
            "made_with": _made_with(document, unit),
            **_scenes(document, unit),
        }
        shown = (*sections, *(section for _, section in context["first_scene"]))
        context["has_run"] = any(isinstance(section, Chart) for section in shown)
    return _template().render(context)


def _made_with(document: Document[Any], unit: str) -> list[str]:
    """The versions behind the figures, and those that drew the page."""
    drawn = f"page by memsize {VERSION}, Python {platform.python_version()}"
    return [*(draw_phrase(phrase, unit) for phrase in document.versions()), drawn]


def _scenes(document: Document[Any], unit: str) -> dict[str, Any]:
    """The template variables of scenes: the first, and a function to pack the others. No table is drawn twice."""
    scenes = document.scenes()
    first = scenes[0].sections() if scenes else ()
    return {
        "scenes": scenes,
        "first_scene": _typed(first),
        "place_of_scenes": {section.name for section in first if isinstance(section, Table)},
        "packed_scene": lambda scene: _packed(_scene(scene, unit)),
    }


def _scene(scene: ScenarioView, unit: str) -> str:
    """Render a scene that replaces the first one. Only scripts can choose it, so they also draw its pictures."""
    context = {"parts": _typed(scene.sections()), "is_scene": True, "is_still": False}
    return _template().render(_shared(unit, True) | context)


def _typed(sections: Iterable[Section]) -> list[tuple[str, Section]]:
    """`sections` with the names of their types."""
    return [(type(section).__name__, section) for section in sections]


def _shared(unit: str, standalone: bool) -> dict[str, Any]:
    """Return the template variables that all sections share."""
    return {
        "unit": unit,
        "place_of_scenes": (),
        "printable": printable,
        "most_links": MOST_LINKS,
        "is_scene": False,
        "is_still": True,
        "has_run": False,
        "role_titles": {role: {"noun": title.noun, "colour": title.colour} for role, title in TITLES.items()},
        "phrases": draw_phrases,
        "picture": plot.picture,
        "stop": draw_failure,
        "modelled": MODELLED,
        "body": page_cells.body,
        "bars": _bars,
        "cell": draw_cell,
        "total": page_cells.total,
        "is_hidden": page_cells.is_hidden,
        "side": lambda column: "text" if column.kind in LEFT else "number",
        "packed": lambda timeline: _packed(_timeline_json(timeline)),
        "standalone": standalone,
    }


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("memsize.render", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2")


def _timeline_json(timeline: Timeline) -> str:
    """The JSON of a timeline, without derivable data and data that no chart shows: a page may hold many timelines.

    Storages are columns; levels and indices are differences from the event before.
    """
    data = to_data(timeline)
    del data["live"], data["streams"]
    data["roles"] = tuple(timeline.live)
    data["storages"] = dict(zip(Storage._fields, zip(*timeline.storages, strict=True), strict=True))
    for name in ("storage", "layer", "allocated", "reserved"):
        data[name] = tuple(after - before for before, after in pairwise((0, *data[name])))
    data["address"] = tuple(_places(timeline))
    return dumps(data, separators=(",", ":"))


def _places(timeline: Timeline) -> Iterator[int]:
    """Where each event places its storage; 0 where it frees it."""
    sizes: dict[int, int] = {}
    for storage, change, address in zip(timeline.storage, timeline.delta, timeline.address, strict=True):
        sizes[storage] = sizes.get(storage, 0) + change
        yield address if sizes[storage] else 0


def _packed(text: str) -> str:
    """Compress `text` and encode it in base64: short, and without characters that could end the element around it."""
    return base64.b64encode(gzip.compress(printable_lines(text).encode(), mtime=0)).decode()


class _Piece(NamedTuple):
    """A part of a bar: its length in percent of what is drawn, its role, and what it is."""

    width: float
    role: Role
    title: str


class _Bar(NamedTuple):
    labels: tuple[Label, ...]
    pieces: list[_Piece]
    total: str


class _Bars(NamedTuple):
    keys: list[_Piece]
    bars: list[_Bar]
    limit: str
    limit_at: float | None
    """Where the limit is, in percent of what is drawn; None where it lies beyond."""
    limit_taken: str


def _bars(section: Bars, unit: str) -> _Bars:
    """Bars with every size drawn."""
    scale = bars.longest_drawn(section) or 1
    keys = [_Piece(0, part.role, part.title) for part in section.parts]
    drawn = [
        _Bar(bar.labels, list(_pieces(section, bar, scale, unit)), _size(section, bar.total, unit))
        for bar in section.bars
    ]
    limit = section.limit
    if limit is None:
        return _Bars(keys, drawn, "", None, "")
    is_near = limit.size <= scale
    at = round(100 * limit.size / scale, 2) if is_near else None
    return _Bars(keys, drawn, _size(section, limit.size, unit), at, "" if is_near else bars.taken(section, limit))


def _pieces(section: Bars, bar: Bar, scale: int, unit: str) -> Iterator[_Piece]:
    for part, size in zip(section.parts, bar.sizes, strict=True):
        if size:
            title = f"{part.title} {_size(section, size, unit)}"
            yield _Piece(round(100 * size / scale, 2), part.role, title)


def _size(section: Bars, size: int, unit: str) -> str:
    return draw_bytes(size, unit) if section.kind == "bytes" else f"{size:,}"
