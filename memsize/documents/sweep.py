"""A sweep as a document: what fits where in short, the largest batches that do, and every cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, findings_data, values_of
from memsize.documents.sections import Bars, Limit, Remark, Section, Table, Title
from memsize.documents.shared import listed, role_part
from memsize.records.fields import Cell, Column, ColumnKind, Label, Load, Missing
from memsize.records.roles import TITLES
from memsize.records.sweep import SETTING_FIELDS, SWEEP_FIELDS, SWEEP_TABLE, Sweep, SweepRow, phrase_of, setting_cell

SCHEMA: Final = "memsize.sweep/1"
MOST_BARS: Final = 12
"""The most cells that are drawn: the ones with the largest peaks."""


class SweepDocument(Document[Sweep]):
    def sections(self) -> tuple[Section, ...]:
        sweep = self.answer
        count = len(sweep.sweep_rows)
        settings = sweep.sweep_rows[0].settings if count else {}
        same = [key for key in sweep.used if key not in sweep.varying]
        cells = f"{count:,} cell{'' if count == 1 else 's'}"
        opening = (Title(sweep.name, ((cells,), *((phrase_of(settings, [key]),) for key in same))), *self.opening())
        if not count:
            return opening
        return (
            *opening,
            *([batch_table(sweep)] if "batch_size" in sweep.varying else []),
            *([load_table(sweep)] if "gpu" in sweep.varying else []),
            cell_table(sweep),
            *self.reasons(),
            *listed("Notes", tuple(_notes(sweep))),
        )

    def bars(self) -> Bars | None:
        sweep = self.answer
        ways = tuple(key for key in sweep.varying if key != "gpu") or ("gpu",)
        largest = _largest_peaks(sweep, ways)
        title = "alive at the peak"
        if len(largest) > MOST_BARS:
            is_of_models = "target" in ways
            largest = _largest_peaks(sweep, ("target",)) if is_of_models else largest
            title += ", each model's largest" if is_of_models and len(largest) <= MOST_BARS else ", the largest"
            largest = dict(sorted(largest.items(), key=lambda item: -(item[1].reserved or 0))[:MOST_BARS])
        if not largest:
            return None
        bars = Bars.of(title, map(role_part, TITLES), ((Label(name), row.roles) for name, row in largest.items()))
        cards = {(str(row.settings["gpu"]), row.gpu_bytes or 0) for row in sweep.sweep_rows}
        return replace(bars, limit=Limit(*cards.pop())) if len(cards) == 1 else bars

    def shorter(self, section: Section) -> Iterator[Section]:
        """Yield the table with only its first rows: 40, 20, 10 and 5."""
        if isinstance(section, Table):
            for count in (40, 20, 10, 5):
                if count < len(section.rows):
                    caption = f"{section.title}: the first {count} of {len(section.rows):,} rows"
                    yield replace(section, rows=section.rows[:count], remarks=(), caption=caption)

    def figures(self, unit: str) -> dict[str, Any]:
        sweep = self.answer
        rows = zip(sweep.tables()["rows"].records(), sweep.sweep_rows, strict=True)
        return {
            "schema": SCHEMA,
            **values_of(sweep, "name", "varying", "reused"),
            "cells": [record | {"roles": dict(row.roles), "notes": row.notes} for record, row in rows],
            "findings": findings_data(sweep.findings, unit),
            "missing": sweep.missing,
        }


def _largest_peaks(sweep: Sweep, keys: Sequence[str]) -> dict[str, SweepRow]:
    """Return the cell with the largest peak for each combination of the settings `keys`, by their values in words.

    As for the findings, the largest is that with most reserved.
    """
    largest: dict[str, SweepRow] = {}
    for row in sweep.sweep_rows:
        name = " ".join(_in_words(key, row) for key in keys)
        if row.reserved is not None and (name not in largest or row.reserved > (largest[name].reserved or 0)):
            largest[name] = row
    return largest


def batch_table(sweep: Sweep) -> Table:
    """The largest of the batches that fits each GPU, for each model and way to run it."""
    keys = [key for key in sweep.varying if key not in ("batch_size", "gpu")] or ["target"]
    columns, rows = _by_gpu(sweep, keys, "count", "the largest batch that fits {gpu}", _largest)
    return Table("batches", "Batches", columns, rows, caption="The largest of these batches that fits")


def load_table(sweep: Sweep) -> Table:
    """The share of each GPU's memory that a cell takes at most: a heat map on pages."""
    keys = [key for key in sweep.varying if key != "gpu"] or ["target"]
    columns, rows = _by_gpu(sweep, keys, "share", "the part of {gpu} that nvidia-smi shows at most", _load)
    return Table("loads", "GPU shares", columns, rows, caption="Share of each GPU that the peak takes")


def _by_gpu(
    sweep: Sweep, keys: Sequence[str], kind: ColumnKind, meaning: str, cell: Callable[[Sequence[SweepRow]], Cell]
) -> tuple[tuple[Column, ...], tuple[tuple[Cell, ...], ...]]:
    """Columns and rows of a table with the settings `keys` down and the GPUs across; `cell` draws the rows of both."""
    gpus = list(dict.fromkeys(str(row.settings["gpu"]) for row in sweep.sweep_rows))
    ways: dict[tuple[str, ...], dict[str, list[SweepRow]]] = {}
    for row in sweep.sweep_rows:
        names = tuple(_in_words(key, row) for key in keys)
        ways.setdefault(names, {}).setdefault(str(row.settings["gpu"]), []).append(row)
    columns = (
        *SETTING_FIELDS.only(*keys).weighted(100),
        *(Column(gpu, gpu, kind, 90, meaning.format(gpu=gpu)) for gpu in gpus),
    )
    rows = (
        (Label(names[0]), *names[1:], *(cell(by_gpu.get(gpu, ())) for gpu in gpus)) for names, by_gpu in ways.items()
    )
    return columns, tuple(rows)


def _load(rows: Sequence[SweepRow]) -> Cell:
    """The highest load of cells on one GPU; more than 1 where `device` exceeds it."""
    failed = next((row for row in rows if row.outcome == "failed"), None)
    loads = [Load(row.device.high / row.gpu_bytes) for row in rows if row.device and row.gpu_bytes]
    return max(loads, default=Missing(failed.reason or "failed") if failed else None)


def _largest(rows: Sequence[SweepRow]) -> Cell:
    fitting = [row.settings.get("batch_size") for row in rows if row.outcome == "fits"]
    if sizes := [size for size in fitting if isinstance(size, int)]:
        return max(sizes)
    failed = next((row for row in rows if row.outcome == "failed"), None)
    return Missing(failed.reason or "failed") if failed else "none" if rows else None


def cell_table(sweep: Sweep) -> Table:
    """Every cell: its peak, whether it fits, and where the peak is. Settings that all share are in the title."""
    keys = sweep.varying or ("target",)
    fields = SWEEP_FIELDS.only(*SWEEP_TABLE).after(*SETTING_FIELDS.only(*keys).weighted(100))
    remarks = tuple(
        Remark(phrase_of(row.settings, keys), "failed", row.reason or "") for row in sweep.sweep_rows if row.reason
    )
    return Table.of("cells", "Cells", fields, sweep.sweep_rows, remarks=remarks)


def _in_words(key: str, row: SweepRow) -> str:
    value = setting_cell(key, row)
    return "–" if value is None else str(value)


def _notes(sweep: Sweep) -> Iterator[str]:
    ran = [row for row in sweep.sweep_rows if row.outcome != "failed"]
    for note, count in Counter(note for row in ran for note in row.notes).items():
        yield note if count == len(ran) else f"{count:,} of {len(ran):,} cells: {note}"
    if sweep.reused:
        yield f"{sweep.reused:,} of the cells were in the results file already"
