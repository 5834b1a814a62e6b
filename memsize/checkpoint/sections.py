"""A checkpoint's report as typed sections, in reading order."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.checkpoint.breakdown import halved
from memsize.checkpoint.findings import Inspection
from memsize.checkpoint.record import PROBLEMS, Difference, FileRecord, Group, PartKind, Tensor, Use, View
from memsize.documents.sections import Cell, Column, Findings, Notes, Path, Section, Share, Specs, Table, Title, Words
from memsize.units import Bytes

MOST_DIFFERENCES = 40
MOST_VALUES = 24
MOST_FILES = 40
MOST_MODULES = 10_000
_LONGEST_VALUE = 100

_USES: tuple[tuple[Use, str, str], ...] = (
    ("metadata", "metadata", "tokenizer, settings"),
    ("pickle", "pickled objects", "all but tensor data"),
    ("headers", "headers", "names and places"),
    ("padding", "padding", "alignment"),
    ("other", "other records", "code, other files"),
    ("unclaimed", "nothing known", "in no record"),
)


def sections(report: Inspection, depth: int | None = None) -> tuple[Section, ...]:
    """`report` in reading order. `depth` cuts the module table; by default it is as deep as it can be read."""
    parts: list[Section] = [title(report), parts_table(report)]
    if len(report.breakdown.dtypes) > 1:
        parts.append(dtype_table(report))
    if report.contents.tensors:
        parts.append(module_table(report, depth))
    if len(report.contents.files) > 1:
        parts.append(file_table(report))
    if report.contents.tensors:
        parts.append(remains_table(report))
    if report.match and report.match.differences:
        parts.append(difference_table(report))
    if report.findings:
        parts.append(Findings("Why", report.findings))
    if report.contents.values:
        parts.append(Notes("Also in it", tuple(_values(report))))
    if report.contents.notes:
        parts.append(Notes("Notes", report.contents.notes))
    return tuple(parts)


def title(report: Inspection) -> Title:
    """The file, its format, its size and what it holds."""
    contents = report.contents
    tensors, files = len(contents.tensors), len(contents.files)
    phrases: list[tuple[str | Bytes, ...]] = [(contents.format,), (Bytes(contents.size), f"({contents.size:,} B)")]
    if files > 1:
        phrases.append((f"{files:,} files",))
    phrases.append((f"{tensors:,} tensor{'' if tensors == 1 else 's'}",))
    return Title(contents.path, tuple(phrases))


_COUNTS = (
    Column("tensors", "tensors", "count", 50, "how many tensors, shared ones included"),
    Column("elements", "elements", "count", 75, "their elements, shared ones once"),
)
_DTYPE = Column("dtype", "stored as", "words", 70, "the dtypes they are stored in")
_SHARE = Column("share", "% of all", "share", 85, "of the bytes of all files")


def parts_table(report: Inspection) -> Table:
    """What every byte of the files is for: the rows add up to their size."""
    breakdown, size = report.breakdown, report.contents.size
    rows = [(*_group_cells(group), Bytes(group.bytes), _share(group.bytes, size)) for group in breakdown.parts]
    rows += [(label, hint, None, None, None, Bytes(n), _share(n, size)) for label, hint, n in _rest(report)]
    columns = (
        Column("part", "part", "name", 100, "what it is for"),
        Column("where", "where", "text", 60, "the keys it stands under"),
        *_COUNTS,
        _DTYPE,
        Column("bytes", "in the file", "bytes", 95, "bytes in the files, shared ones once"),
        _SHARE,
    )
    total = ("total", None, len(report.contents.tensors), None, None, Bytes(size), None)
    return Table("parts", "Parts", columns, tuple(rows), total)


def _group_cells(group: Group) -> tuple[Cell, ...]:
    return (str(group.kind), group.name, group.tensors, group.elements, Words(group.dtypes))


def _rest(report: Inspection) -> Iterator[tuple[str, str, int]]:
    """What is no tensor's: each with a word on what it is, and its bytes."""
    breakdown, contents = report.breakdown, report.contents
    figures = [
        ("behind views", "no tensor covers it", breakdown.unneeded),
        ("unnamed", "no tensor names it", breakdown.unowned),
        ("compression", "what it saves", -contents.compressed),
    ]
    figures += [(label, hint, sum(file.bytes_for(use) for file in contents.files)) for use, label, hint in _USES]
    return (figure for figure in figures if figure[2])


def dtype_table(report: Inspection) -> Table:
    """The tensors by dtype."""
    groups, size = report.breakdown.dtypes, report.contents.size
    columns = (
        Column("dtype", "dtype", "name", 100, "how elements are stored"),
        *_COUNTS,
        Column("bytes", "needed", "bytes", 95, "bytes that the tensors need, shared ones once"),
        _SHARE,
    )
    rows = tuple(
        (group.name, group.tensors, group.elements, Bytes(group.bytes), _share(group.bytes, size)) for group in groups
    )
    return Table("dtypes", "Dtypes", columns, rows, _total(groups, size, named=1))


def module_table(report: Inspection, depth: int | None = None) -> Table:
    """The tensors by module, down to `depth` below their part; the rows add up to the tensors' bytes."""
    view = report.breakdown.fitting_view if depth is None else View(depth)
    groups, size = report.breakdown.modules(view), report.contents.size
    behind = any(group.unneeded for group in groups)
    columns = (
        Column("module", "module", "name", 100, "the names' common prefix"),
        Column("part", "part", "text", 55, "the part it belongs to"),
        *_COUNTS,
        _DTYPE,
        Column("bytes", "needed", "bytes", 95, "bytes that its tensors need, shared ones once"),
        *([Column("unneeded", "behind views", "bytes", 90, "storage that no tensor covers")] if behind else []),
        _SHARE,
    )
    roots = {(group.kind, group.root) for group in groups}
    rows = []
    for group in groups[:MOST_MODULES]:
        extra = (Bytes(group.unneeded),) if behind else ()
        dtypes = Words(group.dtypes)
        figures = (group.tensors, group.elements, dtypes, Bytes(group.bytes), *extra, _share(group.bytes, size))
        rows.append((Path(_below(group, roots)), str(group.kind), *figures))
    if len(groups) > MOST_MODULES:
        more = groups[MOST_MODULES:]
        extra = (Bytes(sum(group.unneeded for group in more)),) if behind else ()
        _, *sums, share = _total(more, size, named=2, blank=1)
        rows.append((Path(f"{len(more):,} more (JSON has them all)"), *sums, *extra, share))
    total = list(_total(groups, size, named=2, blank=1))
    if behind:
        total.insert(-1, Bytes(sum(group.unneeded for group in groups)))
    caption = "Modules" if view.depth is None else f"Modules to depth {view.depth}"
    caption += ", numbered ones together" if view.folded else ""
    return Table("modules", "Modules", columns, tuple(rows), tuple(total), caption=caption)


def _below(group: Group, roots: set[tuple[PartKind, str]]) -> str:
    """A module's name without the keys of its part, unless the part stands under several."""
    alone = sum(kind == group.kind for kind, _ in roots) == 1
    return group.name.removeprefix(f"{group.root}.") if alone and group.root else group.name


def _total(groups: tuple[Group, ...], size: int, named: int, blank: int = 0) -> tuple[Cell, ...]:
    """The total of `groups`, behind `named` columns of names and before `blank` ones without a sum."""
    needed = sum(group.bytes for group in groups)
    counts = (sum(group.tensors for group in groups), sum(group.elements for group in groups))
    return ("total", *[None] * (named - 1), *counts, *[None] * blank, Bytes(needed), _share(needed, size))


def file_table(report: Inspection) -> Table:
    """The files, and what the bytes of each are for."""
    files = report.contents.files
    others = tuple(entry for entry in _USES if any(file.bytes_for(entry[0]) for file in files))
    columns = (
        Column("file", "file", "name", 100, "its name"),
        Column("tensors", "tensors", "count", 50, "how many tensors it has"),
        Column("data", "tensor data", "bytes", 90, "bytes of tensor data"),
        *(Column(use, label, "bytes", 60, hint) for use, label, hint in others),
        Column("size", "size", "bytes", 95, "its size"),
    )

    def cells(name: str, group: tuple[FileRecord, ...]) -> tuple[Cell, ...]:
        uses = (Bytes(sum(file.bytes_for(use) for file in group)) for use, _, _ in others)
        data = Bytes(sum(file.bytes_for("tensors") for file in group))
        return (name, sum(f.tensors for f in group), data, *uses, Bytes(sum(f.size for f in group)))

    rows = [cells(file.name, (file,)) for file in files[:MOST_FILES]]
    if len(files) > MOST_FILES:
        rows.append(cells(f"{len(files) - MOST_FILES:,} more", files[MOST_FILES:]))
    return Table("files", "Files", columns, tuple(rows), cells("total", files))


def remains_table(report: Inspection) -> Table:
    """What is left when only some of it is kept."""
    size = report.contents.size
    columns = (
        Column("kept", "if you keep only", "name", 100, "what is kept"),
        Column("bytes", "remains", "bytes", 95, "bytes of tensor data; headers come on top"),
        Column("share", "% of now", "share", 85, "of the bytes of all files"),
    )
    rows = tuple((name, Bytes(count), _share(count, size)) for name, count in remains(report))
    return Table("remains", "What remains", columns, rows)


def remains(report: Inspection) -> Iterator[tuple[str, int]]:
    """What is kept, and the bytes of tensor data that it takes: the tensors, the model's, the same in float16."""
    breakdown = report.breakdown
    everything = list(report.contents.tensors)
    yield "the tensors", sum(tensor.bytes for tensor in everything)
    for kind in ("model", "EMA"):
        held = breakdown.of(kind)
        if held and (kind == "model" or breakdown.of("model")):
            weights = _alone(held)
            size = sum(tensor.bytes for tensor in weights)
            if len(held) < len(everything):
                yield f"the {kind}'s weights", size
            if halved(weights) < size:
                yield f"the {kind}'s weights in float16", halved(weights)


def _alone(tensors: list[Tensor]) -> list[Tensor]:
    """`tensors` when what they share with others outside is theirs to keep, as near as it can be told."""
    names = {tensor.name for tensor in tensors}
    return [
        tensor if tensor.shared_with is None or tensor.shared_with in names else _whole(tensor) for tensor in tensors
    ]


def _whole(tensor: Tensor) -> Tensor:
    from dataclasses import replace

    from memsize.checkpoint.dtypes import BITS

    bits = BITS.get(tensor.spec.dtype, 0)
    return replace(tensor, bytes=tensor.elements * bits + 7 >> 3)


def difference_table(report: Inspection) -> Table:
    """What is not as the model wants it, the most serious first."""
    assert report.match is not None
    rows = sorted(report.match.differences, key=lambda difference: PROBLEMS.index(difference.problem))
    columns = (
        Column("name", "tensor", "name", 100, "its name in the model, or in the file if the model has none"),
        Column("problem", "problem", "text", 95, "what load_state_dict would complain about"),
        Column("file", "in the file", "specs", 80, "what the file has"),
        Column("model", "in the model", "specs", 85, "what the model has"),
    )
    more = len(rows) - MOST_DIFFERENCES
    caption = f"Differences from {report.match.model}"
    caption += f", the first {MOST_DIFFERENCES} of {len(rows):,} (JSON has them all)" if more > 0 else ""
    cells = tuple(map(_difference, rows[:MOST_DIFFERENCES]))
    return Table("differences", "Differences", columns, cells, caption=caption)


def _difference(row: Difference) -> tuple[Cell, ...]:
    return (
        Path(row.name),
        row.problem,
        Specs((row.file,) if row.file else ()),
        Specs((row.model,) if row.model else ()),
    )


def _values(report: Inspection) -> Iterator[str]:
    values = report.contents.values
    for name, value in values[:MOST_VALUES]:
        shown = value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"
        yield f"{name}: {shown}"
    if len(values) > MOST_VALUES:
        yield f"{len(values) - MOST_VALUES:,} more values (JSON has them all)"


def _share(count: int, size: int) -> Share | None:
    return Share(count / size) if size else None
