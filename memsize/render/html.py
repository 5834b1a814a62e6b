"""An answer as a web page that one can touch, or as a still part of one for a notebook. Nothing is fetched.

Everything is drawn here, so that a page reads well without scripts; those in `page/` sort, fold, zoom and follow what
is already there. A timeline travels with its picture as the JSON that `memsize timeline` writes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from json import dumps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from memsize.documents import WHY, Document
from memsize.documents.sections import (
    Bar,
    Bars,
    Chart,
    Curve,
    Findings,
    Limit,
    Line,
    ScenarioView,
    Section,
    Table,
    Title,
    without_repeats,
)
from memsize.printable import printable, printable_lines
from memsize.records.fields import Cell, Column, Label, Load, Missing, Path, Signed
from memsize.records.roles import ROLES, UNKNOWN, Role, colour, noun
from memsize.records.timeline import Timeline, to_data
from memsize.records.trace import Storage
from memsize.render import WHOLE, Screen, bars, markdown, plot
from memsize.render.cell_text import LEFT, draw_cell, draw_failure, draw_phrase, draw_phrases
from memsize.render.plot import Frame, round_ticks, ticks
from memsize.units import Bytes, Unit, format_bytes, unit_for
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
    sections = without_repeats(document.sections())
    if standalone:
        sections = _reasons_second(sections)
    else:
        sections = tuple(section.usual() if isinstance(section, Table) else section for section in sections)
    first = sections[0]
    context = _shared(unit, standalone) | {
        "parts": _typed(sections),
        "continued": {f.code for section in sections if isinstance(section, Findings) for f in section.findings},
        "name": first.name if isinstance(first, Title) else "",
        "is_timeline": any(isinstance(section, Chart) for section in sections),
        "style": style("base", "page") if standalone else style("base"),
    }
    if standalone:
        context |= {
            "script": script(),
            # How a Content-Security-Policy names the one inline script that it lets run.
            "script_hash": f"sha256-{base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()}",
            "markdown": _packed(markdown.draw(document, unit)),
            "made_with": [
                *(draw_phrase(phrase, unit) for phrase in document.versions()),
                f"page by memsize {VERSION}, Python {platform.python_version()}",
            ],
            **_scenes(document, unit),
        }
        shown = (*sections, *(section for _, section in context["first_scene"]))
        context["has_run"] = any(isinstance(section, Chart) for section in shown)
    return _template().render(context)


def _reasons_second(sections: Sequence[Section]) -> tuple[Section, ...]:
    """`sections` with the reasons behind the verdict and its bars, before all tables."""
    tables = [position for position, section in enumerate(sections) if isinstance(section, Table)]
    start = tables[0] if tables else len(sections)
    reasons = [section for section in sections[start:] if isinstance(section, Findings) and section.title == WHY]
    return (*sections[:start], *reasons, *(section for section in sections[start:] if section not in reasons))


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


def _typed(sections: Iterable[Section | Curve]) -> list[tuple[str, Section | Curve]]:
    return [(type(section).__name__, section) for section in sections]


def _shared(unit: str, standalone: bool) -> dict[str, Any]:
    return {
        "unit": unit,
        "place_of_scenes": (),
        "printable": printable,
        "most_links": MOST_LINKS,
        "is_scene": False,
        "continued": (),
        "is_still": True,
        "has_run": False,
        "role_titles": {role: {"noun": noun(role), "colour": colour(role)} for role in (*ROLES, *UNKNOWN)},
        "phrases": draw_phrases,
        "picture": plot.picture,
        "curve": picture,
        "stop": draw_failure,
        "columns": lambda table, unit: zip(table.columns, table.units(unit), strict=True),
        "body": _body,
        "bars": _bars,
        "cell": draw_cell,
        "total": _total,
        "is_hidden": _is_hidden,
        "side": lambda column: "text" if column.kind in LEFT else "number",
        "packed": lambda chart: _packed(_timeline_json(chart)),
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


def _timeline_json(chart: Chart) -> str:
    """The JSON of a chart's timeline, without derivable data and data that no chart shows: a page may hold many charts.

    Storages are columns; levels and indices are differences from the event before.
    """
    timeline = chart.timeline
    other = chart.other and chart.other._asdict()
    data = to_data(timeline) | {"stacks": chart.stacks, "moment": chart.moment, "other": other}
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


def _bars(section: Bars, unit_name: str) -> SimpleNamespace:
    """Bars with every size drawn, and lengths in percent of what is drawn."""
    scale = bars.longest_drawn(section) or 1
    limit, unit = section.limit, unit_for(scale, unit_name)
    is_near = limit is not None and limit.size <= scale
    return SimpleNamespace(
        keys=bars.legend(section),
        unit=unit.name,
        bars=[
            SimpleNamespace(
                labels=bar.labels,
                pieces=list(_pieces(section, bar, scale, unit)),
                total=bars.draw_size(section, bar.total, unit),
            )
            for bar in section.bars
        ],
        limit=bars.limit_text(section, limit, unit_name) if limit else "",
        limit_at=round(100 * limit.size / scale, 2) if limit and is_near else None,
        limit_taken=bars.taken(section, limit) if limit and not is_near else "",
    )


def _pieces(section: Bars, bar: Bar, scale: int, unit: Unit) -> Iterator[SimpleNamespace]:
    for part, size in zip(section.parts, bar.sizes, strict=True):
        if size:
            title = f"{part.title} {bars.draw_size(section, size, unit)}"
            yield SimpleNamespace(width=round(100 * size / scale, 2), role=part.role, title=title)


# -- cells: each is drawn only once, since scenarios repeat most of each other's rows ----------------------------------

_KEPT: Final = 2**15
"""How many cells are kept drawn: those of some 2,000 layers, in about 10 MB."""


def _body(table: Table, unit: str) -> Iterator[Markup]:
    """The rows of `table`, each as its cells."""
    largest = [
        max((cell for cell in column if isinstance(cell, Bytes)), default=0) for column in zip(*table.rows, strict=True)
    ]
    units = table.units(unit)
    yield from (_row(table, row, largest, units) for row in table.rows)


def _total(table: Table, unit: str) -> Markup:
    """The cells of the row below the table. A total has no bar."""
    return _row(table, table.total, [0] * len(table.columns), table.units(unit)) if table.total else Markup("")


def _is_hidden(table: Table, column: Column) -> bool:
    """Whether the reader of a page must choose the column to see it."""
    return column.optional and not table.chosen


def _row(table: Table, row: tuple[Cell, ...], largest: list[int], units: tuple[Unit, ...]) -> Markup:
    hidden = [_is_hidden(table, column) for column in table.columns]
    cells = zip(row, table.columns, largest, hidden, units, strict=True)
    return Markup(
        "".join(
            _drawn_cell(cell, column.kind, column.role, most, own_unit, is_hidden)
            for cell, column, most, is_hidden, own_unit in cells
        )
    )


# Equal numbers of different types are drawn differently: bytes, counts, shares.
@lru_cache(maxsize=_KEPT, typed=True)
def _drawn_cell(cell: Cell, kind: str, role: Role | None, largest: int, unit: Unit, hidden: bool) -> str:
    """A cell with its bar, which is as long as its share of the column's `largest`.

    Scripts sort and sum `data-value`, which cells of text lack; `data-path` is the module that the cell names.
    """
    bar = round(100 * cell / largest, 1) if isinstance(cell, Bytes) and largest else 0
    text = draw_cell(cell, unit)
    path = printable(cell) if isinstance(cell, Path) else None
    above = text[: text.rfind(".") + 1] if path else ""
    bar = min(round(100 * cell), 100) if isinstance(cell, Load) else bar
    shaded = f"{kind} load{' over' if cell > 1 else ''}" if isinstance(cell, Load) else kind
    attributes = {
        "class": f"{kind} role-{role.replace(' ', '-')}" if bar and role else shaded,
        "data-path": path,
        "data-label": (printable(cell.text) or None) if isinstance(cell, Label) else None,
        "data-value": cell if isinstance(cell, int | float) else None,
        "title": _hint(cell) or None,
        "style": f"--bar:{bar}%" if bar else None,
    }
    written = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value is not None)
    around = f'<span class="above">{escape(above)}</span>' if above else ""
    rest = escape(text.removeprefix(above))
    return f"<td{written}{' hidden' if hidden else ''}>{around}{rest}</td>"


def _hint(cell: Cell) -> str:
    """Return the tooltip of a cell: exact bytes, the hint of a label, or the reason why a figure is missing."""
    match cell:
        case Missing():
            return cell.reason
        case Label():
            return cell.hint
        case Bytes() | Signed():
            return f"{cell:,} B" if cell else ""
    return ""


# -- style sheets, and scripts with the libraries that they use --------------------------------------------------------

LIBRARIES: Final = tuple(
    "dispatch timer color interpolate ease selection drag transition zoom hierarchy".split()
)  # fmt: skip
"""The modules of d3, each after those that it needs."""
SCRIPTS: Final = (
    *("dom", "size", "roles", "packed", "paths", "rows", "table", "treemap", "events", "chart", "overview", "moment"),
    *("curve", "scenes", "address", "tools", "start"),
)
"""Our own scripts. They share one scope, so that only what runs at once (`start`) must come last."""


@cache
def style(*names: str) -> Markup:
    """The style sheets of these names, one after the other."""
    return Markup("\n".join(_read(f"{name}.css") for name in names))


@cache
def script() -> Markup:
    """All scripts of a page as one, the libraries and their licence first."""
    libraries = [_read(f"vendor/d3-{name}.min.js") for name in LIBRARIES]
    own = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    licence = f"/*! d3\n{_read('vendor/LICENSE')}*/"
    return Markup("\n".join([licence, *libraries, "(() => {", '"use strict";', own, "})();"]))


def _read(name: str) -> str:
    """A file as the content of its element, which it must not end."""
    text = files("memsize.render").joinpath("page", name).read_text(encoding="utf-8").rstrip() + "\n"
    return text.replace("</", "<\\/")


COLOURS: Final = ("parameter", "activation", "optimizer state", "KV cache", "gathered parameter", "cast copy", "input")
"""Roles in whose colours lines are drawn, one after the other; red is that of limits."""
_ROOM: Final = 34
"""The width of a number."""
_BEYOND: Final = 1.12
"""How far the picture goes on beyond the largest size and the most bytes."""


def picture(curve: Curve, unit: str) -> dict[str, Any]:
    """Everything that the template draws of a curve, in the picture's units."""
    top = max(size for line in curve.lines for _, size in line.points)
    limits = [limit for limit in curve.limits if limit.size <= 2 * top]
    most = max(top, *(limit.size for limit in limits), 1)
    widest = max(size for line in curve.lines for size, _ in line.points)
    frame = Frame(round(widest * _BEYOND) + 1, round(most * _BEYOND), left=64, right=690, top=24, bottom=330)
    scale = unit_for(frame.most, unit)
    drawn = [_line(frame, line, COLOURS[n % len(COLOURS)], curve.axis, unit) for n, line in enumerate(curve.lines)]
    answers = sorted((line["answer"] for line in drawn if line["answer"]), reverse=True)
    return {
        "frame": frame,
        "unit": scale.name,
        "ticks": ticks(frame, scale),
        "sizes": [(frame.x(size), f"{size:,}") for size in round_ticks(frame.events - 1, 1)],
        "lines": drawn,
        # Numbers stand at the left of their lines, where the next line leaves room.
        "answers": [a for a, b in zip(answers, [*answers[1:], (0.0, 0.0, "")], strict=True) if a[0] - b[0] > _ROOM],
        "limits": [_limit(frame, limit, unit) for limit in limits],
        "sizes_of_limits": [(limit.title, limit.size) for limit in limits],
        "first": next((line.answer[0] for line in curve.lines if line.answer), 0),
        "off": [_limit(frame, limit, unit) for limit in curve.limits if limit not in limits],
    }


def _line(frame: Frame, line: Line, role: str, axis: str, unit: str) -> dict[str, Any]:
    answer = line.answer
    text = f"{', '.join(line.names)}: {f'largest {axis} {answer[0]:,}' if answer else 'none fits'}"
    return {
        "role": role,
        "name": ", ".join(line.names),
        "sizes": line.points,
        "text": text,
        "points": " ".join(f"{frame.x(size):g},{frame.y(need):g}" for size, need in line.points),
        "marks": [
            (frame.x(size), frame.y(need), f"{axis} {size:,} needs {format_bytes(need, unit)}")
            for size, need in line.points
        ],
        "answer": (frame.x(answer[0]), frame.y(answer[1]), f"{answer[0]:,}") if answer else None,
    }


def _limit(frame: Frame, limit: Limit, unit: str) -> tuple[float, str]:
    return frame.y(limit.size), f"{limit.title}: {format_bytes(limit.size, unit)}"
