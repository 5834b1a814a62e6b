"""Typed parts that every document is made of, and that every renderer draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import Any, Literal, NamedTuple, TypeVar

from memsize.records.fields import Cell, Column, Fields, Label, Missing, Signed
from memsize.records.finding import Finding
from memsize.records.gpu import Interval
from memsize.records.roles import Role
from memsize.records.timeline import Timeline
from memsize.records.trace import Failure
from memsize.units import Bytes, Unit, unit_for


class Strip(NamedTuple):
    """One moment in all ways to count, the smallest first: ``tensors 2.2 → allocated 2.3 → reserved 2.8 → nvidia-smi
    3.5–3.8 of 14.6 GiB``. Each amount has its name; `card` is the whole of the GPU, 0 if unknown.
    """

    amounts: tuple[tuple[str, Interval], ...]
    card: int = 0

    @classmethod
    def of_peak(
        cls, requested: int, allocated: int, reserved: int, device: Interval | None = None, card: int = 0
    ) -> Strip:
        """The peak of a run; `device` is the memory of the process, where it is known."""
        sizes = {"tensors": requested, "allocated": allocated, "reserved": reserved}
        amounts = tuple((name, Interval(size, size)) for name, size in sizes.items())
        return cls((*amounts, ("nvidia-smi", device)) if device else amounts, card)

    @property
    def short(self) -> tuple[str, Bytes]:
        """One figure of it: what is reserved, or else the last."""
        amounts = {name: size.high for name, size in self.amounts}
        name = "reserved" if "reserved" in amounts else [*amounts][-1]
        return name, Bytes(amounts[name])


Phrase = tuple[str | Bytes | Strip, ...]
"""Words and sizes, drawn with a space between them."""


@dataclass(frozen=True, slots=True)
class Title:
    """The subject of a document in one line: a name, and phrases."""

    name: str
    phrases: tuple[Phrase, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer before its details: a few findings in brief, most important first."""

    findings: tuple[Finding, ...]


class Part(NamedTuple):
    """One part of which bars are made: its stable `key`, its title, and the role in whose colour it is drawn."""

    key: str
    title: str
    role: Role


class Limit(NamedTuple):
    """A size to compare bars with, such as a GPU's memory."""

    title: str
    size: int


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the labels of its rows, whose figures are (nearly) equal, and the sizes of its parts."""

    labels: tuple[Label, ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """The length of the whole bar."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars to compare at a glance. `title` says what they measure: bytes, counts of something, or per cent."""

    title: str
    parts: tuple[Part, ...]
    bars: tuple[Bar, ...]
    limit: Limit | None = None
    kind: Literal["bytes", "count", "percent"] = "bytes"

    @classmethod
    def of(cls, title: str, parts: Iterable[Part], rows: Iterable[tuple[Label, Mapping[str, int]]]) -> Bars:
        """Bars of bytes: `rows` have sizes by the key of a part. Parts that are empty in all rows are left out.

        Rows share a bar if no part differs by more than a thousandth of the longest bar; it has the first row's sizes.
        """
        pairs = list(rows)
        used = tuple(part for part in parts if any(sizes.get(part.key) for _, sizes in pairs))
        bars = [Bar((label,), tuple(sizes.get(part.key, 0) for part in used)) for label, sizes in pairs]
        alike = max((bar.total for bar in bars), default=0) // 1000
        shared: list[Bar] = []
        for bar in bars:
            for position, other in enumerate(shared):
                if max(map(abs, map(sub, bar.sizes, other.sizes)), default=0) <= alike:
                    shared[position] = replace(other, labels=other.labels + bar.labels)
                    break
            else:
                shared.append(bar)
        return cls(title, used, tuple(shared))

    @classmethod
    def of_whole(cls, title: str, rows: Iterable[tuple[Part, int]]) -> Bars:
        """One bar for each part of a whole, the largest first; those below a hundredth share the last one."""
        pairs = sorted(rows, key=lambda row: -row[1])
        rest = [size for _, size in pairs if size * 100 < sum(size for _, size in pairs)]
        if len(rest) > 1:
            pairs = [*pairs[: -len(rest)], (Part("other", "other", "elsewhere"), sum(rest))]
        parts, sizes = zip(*pairs, strict=True)
        places = range(len(parts))
        bars = (Bar((Label(parts[n].title),), tuple(sizes[n] if n == m else 0 for m in places)) for n in places)
        return cls(title, parts, tuple(bars))


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the run stopped before its end."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Remark:
    """A line about one or several rows of a table: why it has no figures."""

    row: str
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its rows, and a total where rows add up.

    If the user has `chosen` the columns, all are shown; else `hint` says how to get the ones that are left out. A
    `caption` stands above a table that its columns alone do not explain.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: tuple[Cell, ...] | None = None
    remarks: tuple[Remark, ...] = ()
    chosen: bool = False
    caption: str = ""
    hint: str = "A file or pipe has them all."

    @classmethod
    def of(
        cls, name: str, title: str, fields: Fields[Any], rows: Iterable[Any], answer: Any = None, **options: Any
    ) -> Table:
        """The table of the declared `fields` of `rows`; cells that depend on more than their row read `answer`."""
        return cls(name, title, fields.columns, tuple(fields.cells(row, answer) for row in rows), **options)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(column.key for column in self.columns)

    def units(self, name: str) -> tuple[Unit, ...]:
        """The unit of each column: the one called `name`, or with `AUTO` what suits its sizes beside the others'."""
        largest = [0] * len(self.columns)
        for row in (*self.rows, self.total or ()):
            for position, cell in enumerate(row):
                if isinstance(cell, Bytes | Signed):
                    largest[position] = max(largest[position], abs(cell))
        return tuple(unit_for(size, name, beside=max(largest, default=0)) for size in largest)

    def picked(self, keys: Iterable[str]) -> Table:
        """The table with the columns of `keys` alone, in their order."""
        places = [self.keys.index(key) for key in keys]
        return replace(
            self,
            columns=_at(places, self.columns),
            rows=tuple(_at(places, row) for row in self.rows),
            total=None if self.total is None else _at(places, self.total),
        )

    def first(self, count: int) -> Table:
        """The table with its first `count` rows, and a row that counts the others, with what they add to the total."""
        shown, rest = self.rows[:count], list[Cell]()
        for whole, *cells in zip(self.total or (None,) * len(self.columns), *shown, strict=True):
            sizes = (cell for cell in cells if isinstance(cell, int))
            rest.append(type(whole)(whole - sum(sizes)) if isinstance(whole, int) else None)
        return replace(self, rows=(*shown, (Label(f"{len(self.rows) - count:,} more"), *rest[1:])))

    def usual(self) -> Table:
        """The table without optional columns that nobody chose."""
        return self if self.chosen else self.without(*(column.key for column in self.columns if column.optional))

    def without(self, *keys: str) -> Table:
        return self.picked(key for key in self.keys if key not in keys)

    def without_empty(self, *keys: str) -> Table:
        """The table without the columns of `keys` that are empty, zero or `Missing` in all rows."""
        columns = zip(self.keys, zip(*self.rows, strict=True), strict=False)
        filled = {key for key, cells in columns if any(cell and not isinstance(cell, Missing) for cell in cells)}
        return self.without(*{*keys} - filled)


T = TypeVar("T")


def _at(places: Sequence[int], items: Sequence[T]) -> tuple[T, ...]:
    return tuple(items[position] for position in places)


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer: findings, most important first."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Notes:
    """Lines that qualify what stands above them."""

    title: str
    lines: tuple[str, ...]


class Overlay(NamedTuple):
    """Another run in the picture of one: its name, and its live bytes at each event of that."""

    name: str
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """The live bytes of a run that has events, over its events; `title` says what ran.

    `stacks` are the calls that led to each of the timeline's lines, outermost first, where they are known; `moment` is
    the event to begin with, where that is not the peak. `other` is a run to compare with.
    """

    timeline: Timeline
    title: str = "Live bytes over the run"
    stacks: tuple[tuple[str, ...], ...] = ()
    moment: int | None = None
    other: Overlay | None = None


class Line(NamedTuple):
    """Memory by size: the sizes that ran with their bytes, ascending, and the `answer`, the largest that fits."""

    names: tuple[str, ...]
    points: tuple[tuple[int, int], ...]
    answer: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory against the size of a run, called `axis`, with lines at `limits`."""

    title: str
    axis: str
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...]


class ScenarioView(NamedTuple):
    """One scenario in detail. Its sections are made only when they are drawn, since they cost a replay."""

    name: str
    hint: str
    sections: Callable[[], tuple[Table | Chart | Curve, ...]]


Section = Title | Verdict | Bars | Chart | Stop | Table | Findings | Notes


def without_repeats(sections: Iterable[Section]) -> tuple[Section, ...]:
    """`sections` whose findings lack the sentences of the verdict, for formats that are read from top to bottom."""
    sections = tuple(sections)
    verdict = tuple(f for section in sections if isinstance(section, Verdict) for f in section.findings)
    left: list[Section] = []
    for section in sections:
        if isinstance(section, Findings):
            rest = (_rest(finding) if finding in verdict else finding for finding in section.findings)
            section = replace(section, findings=tuple(finding for finding in rest if finding.template))
        if not isinstance(section, Findings) or section.findings:
            left.append(section)
    return tuple(left)


def _rest(finding: Finding) -> Finding:
    """`finding` without the sentences that it has in a verdict: all of it, if its brief form is not where it begins."""
    brief = finding.brief or finding.template
    if not finding.template.startswith(brief):
        return finding
    return replace(finding, template=finding.template.removeprefix(brief).strip(), brief="")
