"""A checkpoint's report as a document: what every byte of the files is for, what would remain, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from memsize.checkpoints.checkpoint_report import (
    DIFFERENCE_FIELDS,
    DTYPE_FIELDS,
    FILE_FIELDS,
    MODULE_FIELDS,
    PART_FIELDS,
    REMAINING_FIELDS,
    USE_FIELDS,
    CheckpointReport,
    FileRow,
)
from memsize.checkpoints.contents import PROBLEMS, USES, Group, Match, View
from memsize.documents import MOST_SENTENCES, Document, findings_data, plain, values_of
from memsize.documents.sections import Bars, Part, Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.fields import FlatTable, Path, Share
from memsize.records.finding import Finding
from memsize.records.roles import Role
from memsize.units import Bytes

SCHEMA: Final = "memsize.checkpoint/1"
MOST_DIFFERENCES = 40
MOST_VALUES = 24
MOST_FILES = 40
MOST_MODULES = 10_000
_LONGEST_VALUE = 100


@dataclass(frozen=True)
class CheckpointDocument(Document[CheckpointReport]):
    """A checkpoint's report. `depth` cuts the module table, by default to what can be read; files list each tensor."""

    depth: int | None = None

    def sections(self) -> tuple[Section, ...]:
        report, contents = self.answer, self.answer.contents
        groups, size = report.breakdown.dtypes, contents.size
        fields = DTYPE_FIELDS.only("dtype", "tensors", "elements", "bytes", "share")
        total = fields.total("total", _sum(groups), size)
        dtypes = Table.of("dtypes", "Dtypes", fields, groups, size, total=total)
        remains = Table.of("remains", "What remains", REMAINING_FIELDS, report.remaining(), size)
        return (
            title(report),
            *self.opening(),
            parts_table(report),
            *([dtypes] if len(groups) > 1 else []),
            *([module_table(report, self.depth)] if contents.tensors else []),
            *([file_table(report)] if len(contents.files) > 1 else []),
            *([remains] if contents.tensors else []),
            *([difference_table(report.match)] if report.match and report.match.differences else []),
            *self.reasons(),
            *listed("Also in it", tuple(_values(report))),
            *listed("Notes", contents.notes),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """The size of the weights, then findings on how to shrink the file or why it does not load."""
        verdict, groups = super().verdict(), [part for part in self.answer.breakdown.parts if part.kind == "model"]
        size = sum(group.bytes for group in groups)
        if not size:
            return verdict
        dtypes = tuple(dict.fromkeys(dtype for group in groups for dtype in group.dtypes))
        values = {"bytes": Bytes(size), "share": self.answer.share(size), "dtypes": dtypes}
        text = "The model's weights take {bytes}, {share} of the file, stored as {dtypes}."
        return (Finding("weights", text, values, bytes=size), *verdict)[:MOST_SENTENCES]

    def bars(self) -> Bars | None:
        report = self.answer
        sizes = [
            *((str(group.kind), group.bytes) for group in report.breakdown.parts),
            *((label, size) for label, _, size in _rest(report)),
        ]
        rows = [(Part(name, name, _ROLES.get(name, "workspace")), size) for name, size in sizes if size > 0]
        return Bars.of_whole("in the file", rows) if rows else None

    def tables(self) -> dict[str, FlatTable]:
        return self.answer.tables() | {"modules": self.answer.module_table(self.depth)}

    def figures(self, unit: str) -> dict[str, Any]:
        report, contents, breakdown = self.answer, self.answer.contents, self.answer.breakdown
        tables = report.tables()
        return {
            "schema": SCHEMA,
            "path": contents.path,
            "format": contents.format,
            "bytes": contents.size,
            "uses": {use: sum(file.bytes_for(use) for file in contents.files) for use in USES},
            "behind_views": breakdown.unneeded,
            "unnamed": breakdown.unowned,
            "saved_by_compression": contents.compressed,
            "files": [
                {"name": file.name, "format": file.format, "bytes": file.size, "tensors": file.tensors}
                | {"uses": dict(zip(USES, file.uses, strict=True))}
                for file in contents.files
            ],
            **{name: tables[name] for name in ("parts", "dtypes", "tensors")},
            "remains": dict(report.remaining()),
            "against": plain(report.match),
            "findings": findings_data(report.findings, unit),
            "values": dict(contents.values),
            **values_of(contents, "classes", "missing", "notes"),
        }


_ROLES: Final[dict[str, Role]] = {"model": "parameter", "EMA": "master weight", "optimizer": "optimizer state"}
"""The roles in whose colours parts are drawn; all others share one."""


def title(report: CheckpointReport) -> Title:
    """The file, its format, its size and what it holds."""
    contents = report.contents
    tensors, files = len(contents.tensors), len(contents.files)
    several = ((f"{files:,} files",),) if files > 1 else ()
    size = (Bytes(contents.size), f"({contents.size:,} B)")
    count = (f"{tensors:,} tensor{'' if tensors == 1 else 's'}",)
    return Title(contents.path, ((contents.format,), size, *several, count))


def parts_table(report: CheckpointReport) -> Table:
    """The bytes of the files by use; the rows add up to the size of the files."""
    breakdown, size = report.breakdown, report.contents.size
    fields = PART_FIELDS.without("unneeded")
    total = ("total", None, len(report.contents.tensors), None, None, Bytes(size), None)
    table = Table.of("parts", "Parts", fields, breakdown.parts, size, total=total)
    rest = tuple(
        (label, hint, None, None, None, Bytes(count), Share(count / size) if size else None)
        for label, hint, count in _rest(report)
    )
    return replace(table, rows=table.rows + rest)


def _rest(report: CheckpointReport) -> Iterator[tuple[str, str, int]]:
    """Bytes that belong to no tensor: label, explanation and size of each kind. Compression has a negative size."""
    breakdown, contents = report.breakdown, report.contents
    figures = [
        ("behind views", "no tensor covers it", breakdown.unneeded),
        ("unnamed", "no tensor names it", breakdown.unowned),
        ("compression", "bytes saved", -contents.compressed),
    ]
    figures += [(use.title, use.help, use.get(FileRow("", contents.files))) for use in USE_FIELDS]
    return (figure for figure in figures if figure[2])


def module_table(report: CheckpointReport, depth: int | None = None) -> Table:
    """The tensors by module, down to `depth` below their part; the rows add up to the tensors' bytes."""
    view = report.breakdown.fitting_view if depth is None else View(depth)
    groups, size = tuple(report.breakdown.modules(view)), report.contents.size
    roots = Counter(kind for kind, _ in {(group.kind, group.root) for group in groups})

    def named(group: Group, _: object) -> Path:
        """Leave out the keys of a part, unless the part stands under several."""
        return Path(group.name.removeprefix(f"{group.root}.") if roots[group.kind] == 1 and group.root else group.name)

    fields = MODULE_FIELDS.only("module", "part", "tensors", "elements", "dtypes", "bytes", "unneeded", "share").drawn(
        module=named
    )
    table = Table.of("modules", "Modules", fields, groups[:MOST_MODULES], size)
    if more := groups[MOST_MODULES:]:
        label = Path(f"{len(more):,} more (JSON has them all)")
        table = replace(table, rows=(*table.rows, fields.total(label, _sum(more), size)))
    total = fields.total("total", _sum(groups), size)
    caption = "Modules" if view.depth is None else f"Modules to depth {view.depth}"
    caption += ", numbered ones together" if view.folded else ""
    return replace(table, total=total, caption=caption).without_empty("unneeded")


def _sum(groups: tuple[Group, ...]) -> Group:
    names = ("tensors", "elements", "bytes", "unneeded")
    return Group("other", "", dtypes=(), **{name: sum(getattr(group, name) for group in groups) for name in names})


def file_table(report: CheckpointReport) -> Table:
    files = report.contents.files
    rows = [FileRow(file.name, (file,)) for file in files[:MOST_FILES]]
    if len(files) > MOST_FILES:
        rows.append(FileRow(f"{len(files) - MOST_FILES:,} more", files[MOST_FILES:]))
    total = FILE_FIELDS.total("total", FileRow("", files))
    return Table.of("files", "Files", FILE_FIELDS, rows, total=total).without_empty(*(use.name for use in USE_FIELDS))


def difference_table(match: Match) -> Table:
    """The differences from the model's own tensors, the most serious first."""
    rows = sorted(match.differences, key=lambda difference: PROBLEMS.index(difference.problem))
    more = len(rows) - MOST_DIFFERENCES
    caption = f"Differences from {match.model}"
    caption += f", the first {MOST_DIFFERENCES} of {len(rows):,} (JSON has them all)" if more > 0 else ""
    return Table.of("differences", "Differences", DIFFERENCE_FIELDS, rows[:MOST_DIFFERENCES], caption=caption)


def _values(report: CheckpointReport) -> Iterator[str]:
    values = report.contents.values
    for name, value in values[:MOST_VALUES]:
        shown = value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"
        yield f"{name}: {shown}"
    if len(values) > MOST_VALUES:
        yield f"{len(values) - MOST_VALUES:,} more values (JSON has them all)"
