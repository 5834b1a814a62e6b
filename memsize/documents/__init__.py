"""Every answer as a document: figures as data, flat tables, and typed sections in reading order.

One module for each kind of answer, of the same name. A document adds no fact to its answer, and knows no format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from memsize.documents.sections import Bars, Chart, Findings, Phrase, ScenarioView, Section, Verdict
from memsize.records.answer import Renderable
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.kinds import KINDS

A = TypeVar("A", bound=Renderable)
MOST_SENTENCES: Final = 4
"""How many a verdict has at most: what is read before one scrolls."""


class Case(NamedTuple):
    """One thing that was checked about `group`, at a line of a file; what is wrong has a `severity`, a `code` and a
    `text`. `failed_to_run`: it could not be checked.
    """

    group: str
    name: str
    file: str
    line: int
    severity: str | None = None
    code: str = ""
    text: str = ""
    failed_to_run: bool = False


@dataclass(frozen=True)
class Document(ABC, Generic[A]):
    """One answer for its readers. A document that can show more or less of it has that as further fields."""

    indent: ClassVar[int | None] = 2
    """How far JSON indents the data; None is for long columns of numbers, in one line."""

    answer: A

    @abstractmethod
    def figures(self, unit: str) -> dict[str, Any]:
        """Everything but the verdict and the bars as dicts, lists, tuples and scalars, its `schema` first.

        `unit` is for sentences: figures are in bytes. A `FlatTable` stands for the list of its records, which may be
        too many to be made at once.
        """

    def data(self, unit: str) -> dict[str, Any]:
        """Everything: the verdict and the bars before the `figures`."""
        rest = self.figures(unit)
        verdict = [{"code": f.code, "text": f.in_brief(unit)} for f in self.verdict()]
        return {"schema": rest.pop("schema"), "verdict": verdict, "bars": _bars_data(self.bars())} | rest

    @abstractmethod
    def sections(self) -> tuple[Section, ...]:
        """What is shown, in reading order: the title, the verdict and the bars before all else."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What its answer found out, most important first; of some answers there is nothing to find out."""
        members: tuple[Finding, ...] = getattr(self.answer, "findings", ())
        return members

    def verdict(self) -> tuple[Finding, ...]:
        """The answer in a few short sentences: of the findings those that say it in brief, most important first."""
        return tuple(finding for finding in self.findings if finding.brief)[:MOST_SENTENCES]

    def reasons(self, title: str = "Why") -> tuple[Section, ...]:
        """The findings in full, unless the verdict has told each of them so."""
        codes = {finding.code for finding in self.verdict() if not finding.brief}
        return () if all(finding.code in codes for finding in self.findings) else (Findings(title, self.findings),)

    def bars(self) -> Bars | None:
        """What there is to compare at a glance."""
        return None

    def picture(self) -> Bars | Chart | None:
        """What a figure draws of it: the bars, unless it is about a run over time."""
        return self.bars()

    def shorter(self, section: Section) -> Iterator[Section]:
        """The same section in fewer lines and fewer, where it can be had so."""
        yield from ()

    def opening(self) -> tuple[Section, ...]:
        """The verdict and the bars, as far as there are any."""
        verdict, bars = self.verdict(), self.bars()
        return (*((Verdict(verdict),) if verdict else ()), *((bars,) if bars and bars.bars else ()))

    def scenes(self) -> tuple[ScenarioView, ...]:
        """What a page has room for: the answer's scenarios from the inside, of which its reader chooses one.

        They are shown in the place of the section that is a table of the same name as one of theirs.
        """
        return ()

    def versions(self) -> tuple[Phrase, ...]:
        """What the figures were made with, as far as the answer has it: PyTorch, and the GPUs that were simulated."""
        return ()

    def tables(self) -> dict[str, FlatTable]:
        """The flat tables by name. The first is the one that a format of a single table holds."""
        return self.answer.tables()

    def cases(self, unit: str) -> tuple[Case, ...]:
        """What was checked, and what is wrong, for the formats of continuous integration; nothing by default."""
        return ()


def _bars_data(bars: Bars | None) -> dict[str, Any] | None:
    if bars is None:
        return None
    return {
        "title": bars.title,
        "kind": bars.kind,
        "parts": [part._asdict() for part in bars.parts],
        "rows": [
            {"names": [label.text for label in bar.labels], "total": bar.total, "sizes": bar.sizes} for bar in bars.bars
        ],
        "limit": bars.limit and bars.limit._asdict(),
    }


def document(answer: Renderable, **view: Any) -> Document[Any]:
    """The document of `answer`. `view` are the document's own fields, such as a report's `depth` and `columns`.

    Raises `OutputError` for a column or a depth that there is not.
    """
    shown: Document[Any] = KINDS[answer.kind].document_type(answer, **view)
    return shown


def plain(value: Any) -> Any:
    """A frozen record, at any depth, as dicts, lists and scalars. A field `spec` becomes the fields `dtype` and
    `shape` in its place.
    """
    if is_dataclass(value):
        members: dict[str, Any] = {}
        for field in fields(value):
            part = plain(getattr(value, field.name))
            members |= part if field.name == "spec" else {field.name: part}
        return members
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def renamed(data: dict[str, Any], **names: str) -> dict[str, Any]:
    """`data` with the fields in `names` called otherwise, in their places: ``renamed(data, specs="output")``."""
    return {names.get(name, name): value for name, value in data.items()}


def findings_data(findings: Iterable[Finding], unit: str) -> list[dict[str, Any]]:
    """Findings, their sentences in `unit`."""
    return [
        {"code": f.code, "layers": f.layers, "bytes": f.bytes, "text": f.text(unit)}
        | ({"moment": f.moment._asdict()} if f.moment else {})
        for f in findings
    ]
