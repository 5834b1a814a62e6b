"""An answer for notebooks and scripts: its bars, its run over time and its layers as figures of plotly, and any of its
tables as pandas styles it.

A role has the colour that it has everywhere. Lengths are in the unit of their axis; a bar and an area tell a
pointer their exact bytes. plotly reads markup in every text, so that names are escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from memsize.documents import Document
from memsize.documents.sections import Bars, Chart, Table, Title
from memsize.errors import OutputError, first_line
from memsize.printable import printable
from memsize.records.fields import Column, Path
from memsize.records.roles import colour, noun
from memsize.records.timeline import Timeline
from memsize.render.bars import longest_drawn
from memsize.render.cell_text import MODEL, draw_phrases
from memsize.units import format_bytes, unit_for

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS: Final = 2000
"""How many moments of a run are drawn: of each equal stretch of events the highest."""
MARKS: Final = 40
"""How many phases, or else steps, are named below a run."""
_WIDTH: Final = 1200
_HEIGHT: Final = 500
_NO_ROLE: Final = "#8a949e"
_LINE: Final = "#3b4550"
_PAPER: Final = "rgba(255, 255, 255, 0.8)"


def overview(document: Document[Any], unit: str) -> Figure:
    """Return the document's picture as a figure: a run over time, or bars. Raise `OutputError` without one."""
    picture = document.picture()
    if isinstance(picture, Chart) and len(picture.timeline):
        return _titled(document, unit, _run(picture.timeline, unit))
    if isinstance(picture, Bars) and picture.bars:
        return _titled(document, unit, _bars(picture, unit))
    raise OutputError(f"there is nothing to plot in this {document.answer.kind}: print it, or look at its tables")


def image(figure: Figure, format: str) -> bytes:
    """`figure` in a format of `memsize.render.IMAGES`, as tall as its bars need. A browser draws it."""
    bars = len(figure.layout.yaxis.ticktext or ())
    try:
        content: bytes = figure.to_image(format, width=_WIDTH, height=max(_HEIGHT, 200 + 36 * bars), scale=2)
    except Exception as error:
        raise OutputError(
            "a browser draws pictures: install Chrome or Chromium, or name it in BROWSER_PATH "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return content


def layers(document: Document[Any], unit: str) -> Figure:
    """The columns of the layer table as one treemap each, side by side; those without any bytes are left out."""
    tables = (section for section in document.sections() if isinstance(section, Table))
    table = next(table for table in tables if table.name == "layers")
    for column in table.columns[1:]:
        if column.kind != "bytes":
            raise OutputError(f"the column {column.key!r} is not of bytes, which alone can be plotted")
    shown = []
    for position, column in enumerate(table.columns[1:], 1):
        cells = ((row[0], row[position]) for row in table.rows)
        sizes = {str(path): size for path, size in cells if isinstance(path, Path) and isinstance(size, int)}
        if any(sizes.values()):
            shown.append((column, sizes))
    if not shown:
        raise OutputError("there is nothing to plot: no layer has any bytes in these columns")
    figure = _plotly().Figure()
    for position, (column, sizes) in enumerate(shown):
        left, right = ((position + side) / len(shown) for side in (0.01, 0.99))
        figure.add_trace(_areas(column, sizes, unit).update(domain={"x": [left, right]}))
    return _titled(document, unit, figure)


def _plotly() -> Any:
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise OutputError("a figure needs plotly: pip install 'memsize[plots]'") from error
    return plotly.graph_objects


def _titled(document: Document[Any], unit: str, figure: Figure) -> Figure:
    title = next(section for section in document.sections() if isinstance(section, Title))
    facts = escape(" · ".join(draw_phrases(title, unit)))
    text = {"text": escape(printable(title.name)), "subtitle": {"text": facts}}
    return figure.update_layout(template="plotly_white", title=text, margin={"t": 100})


def _bars(bars: Bars, unit: str) -> Figure:
    """One stacked bar for each row, from the top, and a line at the limit where that is near."""
    of_bytes = bars.kind == "bytes"
    drawn_in = unit_for(longest_drawn(bars), unit)
    scale = drawn_in.bytes if of_bytes else 1
    places = list(range(len(bars.bars)))
    figure = _plotly().Figure()
    for position, part in enumerate(bars.parts):
        sizes = [bar.sizes[position] for bar in bars.bars]
        figure.add_bar(
            name=escape(printable(part.title)),
            orientation="h",
            x=[size / scale for size in sizes],
            y=places,
            customdata=sizes,
            hovertemplate=f"%{{fullData.name}} %{{customdata:,}}{' B' if of_bytes else ''}<extra></extra>",
            marker={"color": colour(part.role)},
        )
    names = [escape(printable(", ".join(label.text for label in bar.labels))) for bar in bars.bars]
    title = escape(printable(f"{bars.title}, {drawn_in.name}" if of_bytes else bars.title))
    figure.update_layout(barmode="stack", xaxis={"title": title, "tickformat": ","}, legend={"traceorder": "normal"})
    figure.update_yaxes(tickvals=places, ticktext=names, autorange="reversed")
    if bars.limit and bars.limit.size <= longest_drawn(bars):
        size = format_bytes(bars.limit.size, unit) if of_bytes else f"{bars.limit.size:,}"
        text = escape(printable(f"{bars.limit.title}: {size}"))
        figure.add_vline(x=bars.limit.size / scale, line={"color": _LINE, "dash": "dash"}, annotation={"text": text})
    return figure


def _run(timeline: Timeline, unit: str) -> Figure:
    """Live bytes after each event, stacked by role, below lines of all of them and of what the allocator holds."""
    events, drawn_in = timeline.columns(POINTS), unit_for(max(timeline.reserved), unit)
    scale = drawn_in.bytes
    figure = _plotly().Figure()
    for role, column in timeline.live.items():
        area = {"stackgroup": "live", "line": {"shape": "hv", "width": 0}, "fillcolor": colour(role)}
        _add_level(figure, noun(role), column, events, scale, **area)
    where = {"text": [_where(timeline, event) for event in events], "hovertemplate": "%{y:,.2f}, in %{text}"}
    _add_level(figure, "live", timeline.total, events, scale, line=_line("solid"), **where)
    _add_level(figure, "allocated", timeline.allocated, events, scale, line=_line("dot"))
    _add_level(figure, "reserved", timeline.reserved, events, scale, line=_line("dash"))
    marks = next((marks for marks in (timeline.phases, timeline.steps) if len(marks) <= MARKS), ())
    figure.update_xaxes(title="event", tickvals=[mark.start for mark in marks], ticktext=[str(mark) for mark in marks])
    figure.update_yaxes(title=f"memory, {drawn_in.name}", rangemode="tozero", tickformat=",")
    text = f"{format_bytes(timeline.peak.bytes, unit)} live in {_where(timeline, timeline.peak.event)}"
    figure.add_annotation(x=timeline.peak.event, y=timeline.peak.bytes / scale, text=text, bgcolor=_PAPER)
    return figure.update_layout(hovermode="x unified")


def _add_level(
    figure: Figure, name: str, sizes: Sequence[int], events: Sequence[int], scale: int, **drawn: object
) -> None:
    """One line of `figure`: `sizes` after `events`, each of which holds until the next."""
    heights = [sizes[event] / scale for event in events]
    figure.add_scatter(
        **{"name": name, "x": events, "y": heights, "mode": "lines", "hovertemplate": "%{y:,.2f}"} | drawn
    )


def _line(dash: str) -> dict[str, object]:
    return {"shape": "hv", "width": 1.5, "dash": dash, "color": _LINE}


def _where(timeline: Timeline, event: int) -> str:
    layer = timeline.layer[event]
    path = timeline.layers[layer] if layer >= 0 else ""
    return escape(printable(", ".join(filter(None, (str(timeline.phase_at(event)), path, timeline.op[event])))))


def _areas(column: Column, sizes: dict[str, int], unit: str) -> Any:
    """One column of the layer table as a treemap: each module's area is its bytes with those of the modules in it."""
    whole: Counter[str] = Counter()
    for path, size in sizes.items():
        # The path and those of the modules around it, up to the model's, which is empty.
        names = path.split(".") if path else []
        whole.update(dict.fromkeys((".".join(names[:depth]) for depth in range(len(names) + 1)), size))
    paths = [path for path, size in whole.items() if size]
    heading = f"{escape(column.title)}, {format_bytes(whole[''], unit)}"
    return _plotly().Treemap(
        ids=[_shown(path) for path in paths],
        labels=[_shown(path.rpartition(".")[2]) if path else heading for path in paths],
        parents=[_shown(path.rpartition(".")[0]) if path else "" for path in paths],
        values=[whole[path] for path in paths],
        branchvalues="total",
        text=[format_bytes(whole[path], unit) for path in paths],
        hovertemplate="%{id}<br>%{value:,} B<extra></extra>",
        textinfo="label+text",
        marker={"colors": [colour(column.role) if column.role else _NO_ROLE] * len(paths)},
    )


def _shown(path: str) -> str:
    return escape(printable(path)) or MODEL
