"""A verification in each format: text, markdown and html from its sections, json and csv from its figures."""

from __future__ import annotations

from typing import Any, Final

from memsize.documents.data import as_json, records_as_csv
from memsize.documents.verification import sections
from memsize.records.codec import plain
from memsize.records.verification import AllocationDifference, FigureComparison, Verification, VerifiedRun
from memsize.render import check_format, draw

SCHEMA: Final = "memsize.verification/1"


def render(found: Verification, format: str, *, unit: str = "MiB", width: int | None = None) -> str:
    """`found` in one of `FORMATS`, ending in a newline. json holds everything but the logs, csv the figures.

    Raises `OutputError` for an unknown format or unit.
    """
    check_format(format)
    if format == "json":
        return as_json(data(found))
    if format == "csv":
        return records_as_csv([_comparison(each) for each in found.comparisons])
    return draw(sections(found), format, unit, width)


def data(found: Verification) -> dict[str, Any]:
    """`found` as dicts, lists, strings, numbers and None; all figures in bytes."""
    alignment = found.alignment
    return {
        "schema": SCHEMA,
        "model": found.model,
        "runs": [_run(run) for run in found.runs],
        "allocations": None
        if alignment is None
        else {"predicted": alignment.predicted, "measured": alignment.real, "matched": alignment.matched},
        "differences": [difference_data(each) for each in alignment.differences] if alignment else None,
        "notes": list(found.notes),
    }


def _run(run: VerifiedRun) -> dict[str, Any]:
    seen = plain(run.measurement)
    del seen["log"]
    compared = [_comparison(each) for each in (*run.comparisons, *([run.tracked] if run.tracked else []))]
    return {"figures": compared, "assumptions": list(run.prediction.assumptions), **seen}


def _comparison(each: FigureComparison) -> dict[str, Any]:
    return {
        "figure": each.figure,
        "benchmark": each.benchmark,
        "predicted": each.predicted.low,
        "predicted_most": each.predicted.high,
        "measured": each.measured,
        "difference": each.difference,
        "share": each.share,
    }


def difference_data(each: AllocationDifference) -> dict[str, Any]:
    """One difference, as files have it."""
    return {
        "kind": each.kind,
        "phase": each.place.phase,
        "layer": each.place.layer,
        "op": each.place.op,
        "predicted": each.predicted,
        "measured": each.real,
        "at_peak": each.at_peak,
    }
