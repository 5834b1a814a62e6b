"""The tables of the README and of docs/accuracy.md, and docs/measurement*.csv, from the stored predictions alone."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final, get_args

from benchmarks.published.rows import COUNTS, FOLDER, Compared, compared
from benchmarks.published.shared import Gap
from benchmarks.published.sources import NOT_COUNTED, SOURCES, Kind
from memsize.units import MiB

RANKS: Final = FOLDER.parents[1] / "docs" / "ranks_published.csv"
"""What was compared of ranks of several GPUs."""
GAPS: Final = FOLDER / "gaps.csv"
"""The errors of the rows whose figures are not part of the project."""
LOW: Final = 0.01
"""From this share on, a prediction below the measurement counts as too low."""

_OUTSIDE: Final = ("device", "outside", "graphs")
"""What PyTorch does not allocate: predicted as intervals."""
_LISTED: Final = "gpumemnet/convolutional"
"""Some of the networks whose errors are kept."""
_ROUNDING: Final = 1e-6
_WHOLE_CARDS: Final = {
    "outside": "outside PyTorch, in vLLM's logs",
    "graphs": "CUDA graphs, in vLLM's logs",
    "device": "GPUMemNet's transformers, A100 40GB",
}
_ORDER: Final = get_args(Kind)
_ELSEWHERE: Final = {
    "gpumemnet": ("GPUMemNet's perceptrons", "device", "A100 40GB", "medium"),
    "gpumemnet-cnn": ("GPUMemNet's convolutional networks", "device", "A100 40GB", "medium"),
    "xmem": ("xMem's runs that did not run out of memory", "reserved", "RTX 3060 12GB, A100", "low"),
}


@dataclass(frozen=True, slots=True)
class Error:
    """One row as the tables count it: signed shares of what was measured."""

    kind: str
    figure: str
    source: str
    error: float
    outside: float


@dataclass(frozen=True, slots=True)
class Group:
    """What a line of a table says of its rows."""

    count: int
    sources: int
    median: float
    most: float
    worst: float
    low: int
    uncovered: int

    @classmethod
    def of(cls, errors: Sequence[Error]) -> Group:
        """The figures of some rows: `most` is the error that 95 % of them keep below, `uncovered` counts what is too
        low even from the interval's upper end.
        """
        sizes = sorted(abs(error.error) for error in errors)
        return cls(
            len(errors),
            len({_published(error.source) for error in errors}),
            median(sizes),
            sizes[math.ceil(0.95 * len(sizes)) - 1],
            max((error.error for error in errors), key=abs),
            sum(error.error < -LOW for error in errors),
            sum(error.outside < -LOW for error in errors),
        )


def _published(source: str) -> str:
    """Where a source was published: the first part of its name, but for servers, whose logs have a source each."""
    return source if source.startswith("server/") else source.partition("/")[0]


def errors() -> list[Error]:
    """Every predicted row: those of the figures here, and those whose errors alone are kept."""
    own = [Error(row.row.source.kind, _figure(row), row.row.source.name, row.error, row.outside) for row in compared()]
    return [*own, *(Error(gap.kind, _ELSEWHERE[gap.source][1], gap.source, gap.error, gap.outside) for gap in gaps())]


def measured() -> list[Error]:
    """What PyTorch or a server measured, without what lies outside PyTorch: the rows here, and of the ranks of
    docs/ranks_published.csv those that no setting was chosen to match.
    """
    own = [error for error in errors() if error.figure not in _OUTSIDE]
    with RANKS.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["error"] or " to " in line["memsize"]]
    return [*own, *(_of_ranks(line) for line in lines)]


def _of_ranks(line: Mapping[str, str]) -> Error:
    published = float(line["published"])
    ends = [float(end) / published - 1 for end in line["memsize"].split(" to ")]
    outside = 0.0 if ends[0] <= 0 <= ends[-1] else min(ends, key=abs)
    return Error("one rank of several GPUs", line["figure"], line["program"], sum(ends) / len(ends), outside)


def _figure(row: Compared) -> str:
    """The figure of a line: a server's are its cache, in any unit, and the weights and steps beside it."""
    if row.row.source.kind != "servers" or row.row.figure in _OUTSIDE:
        return row.row.figure
    return "cache" if row.row.figure in ("cache", *COUNTS) else "weights, step"


def gaps() -> list[Gap]:
    """The stored errors."""
    with GAPS.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        Gap(e["source"], int(e["row"]), e["kind"], float(e["error"]), float(e["outside"]), int(e["width"]))
        for e in lines
    ]


def keep(stored: Iterable[Gap]) -> None:
    """Write the errors."""
    with GAPS.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("source", "row", "kind", "error", "outside", "width"))
        lines.writerows((e.source, e.row, e.kind, f"{e.error:.6f}", f"{e.outside:.6f}", e.width) for e in stored)


def grouped() -> dict[tuple[str, str], Group]:
    """The lines of the first table by kind and figure."""
    ordered = sorted(measured(), key=lambda error: (_ORDER.index(error.kind), error.figure))
    return {key: Group.of(list(rows)) for key, rows in groupby(ordered, key=lambda error: (error.kind, error.figure))}


def summary() -> str:
    """A line for each kind of workload and figure."""
    head = [
        "workloads",
        "figure",
        "rows",
        "sources",
        "median error",
        "95 % within",
        "worst",
        "too low by more than 1 %",
    ]
    lines = [
        [kind, figure, str(g.count), str(g.sources), _share(g.median), _share(g.most), _signed(g.worst), _low(g)]
        for (kind, figure), g in grouped().items()
    ]
    return _markdown(head, lines, "llrrrrrr")


_GROUPS: Final = {
    "transformers, whole steps": "language models, whole steps",
    "transformers, inference": "generation and inference",
    "LoRA and adapters": "fine-tuning with adapters",
    "diffusion transformers, adapters": "fine-tuning with adapters",
    "diffusion transformers, forward and backward": "diffusion pipelines and steps",
    "diffusion pipelines": "diffusion pipelines and steps",
    "gated MLPs": "gated MLPs and experts",
    "mixtures of experts": "gated MLPs and experts",
    "norms and rotary embeddings": "norms, rotary embeddings, losses",
    "losses of language models": "norms, rotary embeddings, losses",
}
"""The README's names for kinds of workload: those that are alike share a line."""


def short() -> str:
    """The README's table: a line for each group of workloads, whichever figure was measured."""
    groups: dict[str, list[Error]] = {}
    for error in sorted(measured(), key=lambda error: _ORDER.index(error.kind)):
        groups.setdefault(_GROUPS.get(error.kind, error.kind), []).append(error)
    head = ["workloads", "rows", "sources", "median error", "95 % within", "worst", "too low by more than 1 %"]
    lines = []
    for name, of_group in groups.items():
        g = Group.of(of_group)
        lines.append([name, str(g.count), str(g.sources), _share(g.median), _share(g.most), _signed(g.worst), _low(g)])
    return _markdown(head, lines, "lrrrrrr")


def devices() -> str:
    """A line for each kind of figures of the whole card, and one for all: how many lie inside their interval."""
    found: dict[str, list[tuple[bool, int]]] = {}
    for gap in gaps():
        title, figure, gpu, _ = _ELSEWHERE[gap.source]
        if figure in _OUTSIDE:
            found.setdefault(f"{title}, {gpu}", []).append((_covered(gap.outside), gap.width))
    for row in compared():
        if row.row.figure in _OUTSIDE and row.row.source.name != _LISTED:
            title = _WHOLE_CARDS[row.row.figure]
            found.setdefault(title, []).append((_covered(row.outside), row.interval.high - row.interval.low))
    found["all"] = [one for family in found.values() for one in family]
    lines = []
    for title, family in found.items():
        inside = [covered for covered, _ in family]
        width = median(width for _, width in family) / MiB
        lines.append(
            [title, str(len(family)), str(sum(inside)), _share(sum(inside) / len(inside)), f"{width:,.0f} MiB"]
        )
    return _markdown(["figures", "rows", "inside", "share", "median width"], lines, "lrrrr")


def _covered(outside: float) -> bool:
    """Whether a figure is inside but for rounding."""
    return abs(outside) < _ROUNDING


def by_source() -> str:
    """A line of comma-separated values for each table of figures, with what is known of its setting."""
    lines = []
    ordered = sorted(errors(), key=lambda error: (_position(error.source), error.figure))
    for (name, figure), of_source in groupby(ordered, key=lambda error: (error.source, error.figure)):
        g = Group.of(list(of_source))
        if name in SOURCES:
            source = SOURCES[name]
            on = (source.title, source.gpu, source.stack, source.confidence)
            setting = (source.where, source.script, source.environment or "", source.inferred)
        else:
            title, _, gpu, confidence = _ELSEWHERE[name]
            on, setting = (title, gpu, "", confidence), ("", "", "", "")
        lines.append([name, *on[:3], figure, g.count, on[3], f"{g.median:.2%}", f"{g.worst:+.2%}", *setting])
    head = "source,workload,gpu,stack,figure,rows,confidence,median error,worst,published,script,built from,inferred"
    return _values(head.split(","), lines)


def _position(name: str) -> int:
    return list(SOURCES).index(name) if name in SOURCES else len(SOURCES)


def left_out() -> str:
    """Published figures that are not counted, and why."""
    return _values(["figures", "published", "why they are left out"], NOT_COUNTED)


def every_row() -> str:
    """The figures with their predictions as comma-separated values, in bytes (or in what `figure` counts)."""
    lines = []
    for row in compared():
        setting = row.row.setting.replace(f" figure={row.row.figure}", "")
        figures = (row.row.figure, round(row.row.measured), round(row.predicted), f"{row.error:+.2%}")
        lines.append((row.row.source.name, setting, *figures))
    return _values(["source", "setting", "figure", "measured", "predicted", "error"], lines)


def _values(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *lines])
    return file.getvalue()


def _share(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def _signed(value: float) -> str:
    return (
        f"{value:+.2%}".replace("%", " %").replace("-", "−").replace("+0.00 %", "0.00 %").replace("−0.00 %", "0.00 %")
    )


def _low(group: Group) -> str:
    covered = group.low - group.uncovered
    return f"{group.low}" + (f" ({covered} inside the interval)" if covered else "")


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]], sides: str) -> str:
    marks = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, marks, *lines]) + "\n"


# -- the pages ---------------------------------------------------------------------------------------------------------

_SUMMARY: Final = re.compile(r"(<!-- published: summary -->\n).*?(<!-- /published: summary -->)", re.DOTALL)
_DEVICES: Final = re.compile(r"(<!-- published: device -->\n).*?(<!-- /published: device -->)", re.DOTALL)
_TABLE: Final = re.compile(r"^\| workloads \|.*\n(?:\|.*\n)+", re.MULTILINE)
"""The README's table, which stands without marks."""


def written(root: Path) -> dict[Path, str]:
    """Each page and file with its tables as the stored predictions have them."""
    readme, page, docs = root / "README.md", root / "docs" / "accuracy.md", root / "docs"
    text = page.read_text(encoding="utf-8")
    for place, lines in ((_SUMMARY, summary()), (_DEVICES, devices())):
        text, count = place.subn(lambda match, lines=lines: f"{match[1]}\n{lines}\n{match[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"docs/accuracy.md has no place for {place.pattern}")
    return {
        readme: _TABLE.sub(lambda _: short(), readme.read_text(encoding="utf-8")),
        page: text,
        docs / "measurements.csv": every_row(),
        docs / "measurement_sources.csv": by_source(),
        docs / "measurements_left_out.csv": left_out(),
    }


def update(root: Path) -> list[Path]:
    """Write the pages that differ; their paths."""
    changed = {
        path: text for path, text in written(root).items() if not path.exists() or path.read_text("utf-8") != text
    }
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return list(changed)
