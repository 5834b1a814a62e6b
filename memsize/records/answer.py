"""The base classes of every command's answer: a value that can be printed, shown in a notebook and written as JSON."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memsize import files
from memsize.printable import printable
from memsize.records.fields import Fields, FlatTable, field
from memsize.records.finding import Finding
from memsize.records.kinds import RENDERER

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure


class Renderable:
    """A value that `memsize.render` draws in any format. `kind` names the answer's entry in `memsize.records.kinds`."""

    __slots__ = ()

    kind: ClassVar[str]

    def tables(self) -> dict[str, FlatTable]:
        """Return all tables of the value, by name."""
        raise NotImplementedError

    def _drawn(self, format: str) -> str:
        text: str = resolve_name(f"{RENDERER}:render")(self, format)
        return text

    def _plotted(self, picture: Literal["overview", "layers"], unit: str | None, **view: object) -> Figure:
        figure: Figure = resolve_name(f"{RENDERER}:plotted")(self, picture, unit, **view)
        return figure

    def _repr_html_(self) -> str:
        return self._drawn("notebook")


class TableFrame(property):
    """A property of an answer: one of its `tables` as a DataFrame."""

    def __init__(self, table: str, help: str) -> None:
        super().__init__(lambda answer: answer.tables()[table].frame(), doc=help)

    if TYPE_CHECKING:

        def __get__(self, answer: Any, owner: type | None = None) -> DataFrame: ...  # type: ignore[override]


class FindingList(tuple[Finding, ...], Renderable):
    """The findings of an answer, most important first; it prints as numbered sentences, in a notebook as a list."""

    kind = "why"

    def tables(self) -> dict[str, FlatTable]:
        """`findings`: one row for each."""
        return {"findings": _FINDING_FIELDS.flat(self)}

    def __repr__(self) -> str:
        lines = "\n".join(f"{n}. {printable(finding.text())}" for n, finding in enumerate(self, 1))
        return lines or "nothing to explain"


_FINDING_FIELDS: Final = Fields[Finding](
    field("code"),
    field("bytes", kind="bytes"),
    field("layers", get=lambda finding: ", ".join(finding.layers)),
    field("text", get=lambda finding: finding.text()),
)


class Saveable:
    """An answer that can be saved to a file whole. `kind` is its name in the file."""

    __slots__ = ()

    kind: ClassVar[str]

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save this to `path` (``run.memsize``), with everything that it is drawn from; `memsize.load` reads it.

        A file that exists is replaced with `overwrite`, if it is a saved run. Raises `OutputError` where it can't be.
        """
        from memsize.records.run_file import write_run

        write_run(path, self, overwrite=overwrite)


class Answer(Renderable, Saveable):
    """The base of the answers."""

    __slots__ = ()

    if TYPE_CHECKING:
        # No attribute of the class: a dataclass would take it for the default of its own field.
        @property
        def findings(self) -> tuple[Finding, ...]:
            """The findings, most important first."""

    def why(self) -> FindingList:
        """The findings, most important first."""
        return FindingList(self.findings)

    def to_json(self, path: str | Path | None = None) -> str:
        """The answer as JSON text, also written to `path` when given."""
        text = self._drawn("json")
        if path is not None:
            files.write(path, text, overwrite=True)
        return text

    def plot(self, unit: str | None = None) -> Figure:
        """Return the first picture of the answer's page as a plotly figure in `unit`: bars, or a run over time.

        Raises `OutputError` without plotly, and where there is nothing to plot.
        """
        return self._plotted("overview", unit)

    def __str__(self) -> str:
        return self._drawn("text").rstrip("\n")

    def __repr__(self) -> str:
        return f"<memsize.{type(self).__name__} {self._drawn('line').rstrip()}>"
