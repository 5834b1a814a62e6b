"""Every answer as a document: figures as data, flat tables, and typed sections in reading order.

One module for each kind of answer, of the same name. A document adds no fact to its answer, and knows no format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from memsize.documents.sections import (
    Bars,
    Chart,
    Findings,
    Phrase,
    ScenarioView,
    Section,
    Strip,
    Table,
    Title,
    Verdict,
)
from memsize.records.answer import Renderable
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.kinds import KINDS
from memsize.units import Bytes

A = TypeVar("A", bound=Renderable)
MOST_SENTENCES: Final = 4
"""The most findings in a verdict: few enough to read without scrolling."""
WHY: Final = "Why"
"""The title of the findings behind a verdict."""
MOST_SHORT_ROWS: Final = 12
"""The most rows of a table that is shortened."""


class Case(NamedTuple):
    """One check of `group`, at a line of a file. A failed check has a `severity`, a `code` and a `text`;
    `failed_to_run` means that it could not be carried out.
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
    """An answer to be rendered. Documents that can show more or less of their answer have fields for that."""

    indent: ClassVar[int | None] = 2
    """JSON indentation of the data; `None` writes one line, for long columns of numbers."""

    only_brief: ClassVar[bool] = True
    """Whether findings without a brief form are left out of the verdict."""

    folded: ClassVar[bool] = False
    """Whether Markdown folds everything below the verdict, as for comments on pull requests."""

    answer: A

    @abstractmethod
    def figures(self, unit: str) -> dict[str, Any]:
        """Everything but the verdict and the bars as dicts, lists, tuples and scalars, its `schema` first.

        `unit` is for sentences: figures are in bytes. A `FlatTable` stands for the list of its records, which may be
        too long to be built at once.
        """

    def data(self, unit: str) -> dict[str, Any]:
        """Everything: the verdict and the bars before the `figures`."""
        rest = self.figures(unit)
        bars = self.bars()
        return {
            "schema": rest.pop("schema"),
            "verdict": [{"code": f.code, "text": f.in_brief(unit)} for f in self.verdict()],
            "bars": bars
            and {
                "title": bars.title,
                "kind": bars.kind,
                "parts": plain(bars.parts),
                "rows": [
                    {"names": [label.text for label in bar.labels], "total": bar.total, "sizes": bar.sizes}
                    for bar in bars.bars
                ],
                "limit": plain(bars.limit),
            },
        } | rest

    @abstractmethod
    def sections(self) -> tuple[Section, ...]:
        """The sections in reading order: the title, the verdict and the bars before all others."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The answer's findings, most important first; empty for answers of a kind without findings."""
        members: tuple[Finding, ...] = getattr(self.answer, "findings", ())
        return members

    def in_short(self) -> Title:
        """The title for a single line; by default that of the sections, with a figure in place of a strip."""
        title = next((part for part in self.sections() if isinstance(part, Title)), Title(self.answer.kind, ()))
        phrases = []
        for phrase in title.phrases:
            words: list[str | Bytes] = []
            for word in phrase:
                words += word.short if isinstance(word, Strip) else (word,)
            phrases.append(tuple(words))
        return Title(title.name, tuple(phrases))

    def verdict(self) -> tuple[Finding, ...]:
        """The first `MOST_SENTENCES` findings; of some documents only those that have a brief form."""
        return tuple(finding for finding in self.findings if finding.brief or not self.only_brief)[:MOST_SENTENCES]

    @property
    def first_sentences(self) -> int:
        """How many findings of the verdict are on every screen, however low."""
        return 1

    def reasons(self, title: str = WHY) -> tuple[Section, ...]:
        """A section with all findings in full; nothing if the verdict already shows each of them in full."""
        codes = {finding.code for finding in self.verdict() if not finding.brief}
        return () if all(finding.code in codes for finding in self.findings) else (Findings(title, self.findings),)

    def bars(self) -> Bars | None:
        """Bars to compare at a glance; `None` by default."""
        return None

    def picture(self) -> Bars | Chart | None:
        """The picture of the answer: the bars, or a chart if the answer is about a run over time."""
        return self.bars()

    def shorter(self, section: Section) -> Iterator[Section]:
        """Yield shorter and shorter versions of `section`: by default of a verdict without its last sentences, of bars
        without the last ones, and of a table without its last rows and its remarks.
        """
        if isinstance(section, Verdict):
            counts = range(len(section.findings) - 1, self.first_sentences - 1, -1)
            yield from (Verdict(section.findings[:count]) for count in counts)
        if isinstance(section, Findings):
            counts = range(len(section.findings) - 1, 0, -1)
            yield from (replace(section, findings=section.findings[:count]) for count in counts)
        if isinstance(section, Bars):
            yield from (replace(section, bars=section.bars[:count]) for count in range(len(section.bars) - 1, 1, -1))
        if isinstance(section, Table):
            yield replace(section, hint="")
            counts = range(min(len(section.rows) - 2, MOST_SHORT_ROWS), 1, -1)
            yield from (replace(section.first(count), remarks=(), hint="") for count in counts)

    def main_table(self) -> str:
        """The name of the table that belongs to the first screen: by default of the first one, if there is any."""
        return next((section.name for section in self.sections() if isinstance(section, Table)), "")

    def is_verdict(self, section: Section) -> bool:
        """Whether `section` answers the question, and is on every screen."""
        return isinstance(section, Verdict)

    def opening(self) -> tuple[Section, ...]:
        """The verdict and the bars, without the ones that are empty."""
        verdict, bars = self.verdict(), self.bars()
        return (*((Verdict(verdict),) if verdict else ()), *((bars,) if bars and bars.bars else ()))

    def scenes(self) -> tuple[ScenarioView, ...]:
        """The answer's scenarios in detail, for pages on which the reader chooses one of them.

        They replace the section whose table has the same name as one of their tables.
        """
        return ()

    def versions(self) -> tuple[Phrase, ...]:
        """Lines on the PyTorch release and the simulated GPUs behind the figures; empty if the answer has neither."""
        return ()

    def tables(self) -> dict[str, FlatTable]:
        """The flat tables by name. Formats that hold a single table get the first one."""
        return self.answer.tables()

    def cases(self, unit: str) -> tuple[Case, ...]:
        """The checks, passed and failed, for the formats of continuous integration; empty by default."""
        return ()


def document(answer: Renderable, **view: Any) -> Document[Any]:
    """The document of `answer`. `view` are the document's own fields, such as a report's `depth` and `columns`.

    Raises `OutputError` for an unknown column or an invalid depth.
    """
    shown: Document[Any] = KINDS[answer.kind].document_type(answer, **view)
    return shown


def plain(value: Any) -> Any:
    """A frozen record as dicts, lists and scalars; a field `spec` becomes the fields `dtype` and `shape`."""
    names = [field.name for field in fields(value)] if is_dataclass(value) else getattr(value, "_fields", None)
    if names is not None:
        members: dict[str, Any] = {}
        for name in names:
            part = plain(getattr(value, name))
            members |= part if name == "spec" else {name: part}
        return members
    if isinstance(value, Mapping):
        return dict(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def renamed(data: dict[str, Any], **names: str) -> dict[str, Any]:
    """`data` with the fields in `names` called otherwise, in their places: ``renamed(data, specs="output")``."""
    return {names.get(name, name): value for name, value in data.items()}


def values_of(record: Any, *names: str) -> dict[str, Any]:
    """The attributes of `record` with these names, as `plain` data."""
    return {name: plain(getattr(record, name)) for name in names}


def findings_data(findings: Iterable[Finding], unit: str) -> list[dict[str, Any]]:
    return [
        {"code": f.code, "layers": f.layers, "bytes": f.bytes, "text": f.text(unit)}
        | ({"moment": plain(f.moment)} if f.moment else {})
        for f in findings
    ]
