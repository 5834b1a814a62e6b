"""A verification as a document: figures beside each other, then the allocations that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, plain, renamed
from memsize.documents.sections import Bar, Bars, Part, Section, Table, Title, listed
from memsize.records.cells import Label
from memsize.records.finding import Finding
from memsize.records.verification import (
    DIFFERENCE_FIELDS,
    FIGURE_FIELDS,
    Alignment,
    FigureComparison,
    Verification,
    VerifiedRun,
)
from memsize.units import Bytes, dotted_cudnn

SCHEMA: Final = "memsize.verification/1"
MOST_DIFFERENCES: Final = 20


class VerificationDocument(Document[Verification]):
    """A verification."""

    def sections(self) -> tuple[Section, ...]:
        """The figures beside each other, the allocations that differ, and how both were made."""
        found = self.answer
        assumptions = dict.fromkeys(text for run in found.runs for text in run.prediction.assumptions)
        return (
            title(found),
            *self.opening(),
            figure_table(found),
            *([difference_table(found.alignment)] if found.alignment and found.alignment.differences else []),
            *listed("Assumed", tuple(assumptions)),
            *listed("Notes", tuple(dict.fromkeys((*_notes(found), *found.notes)))),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """How far the predictions are off, at the figure that is off the most."""
        return tuple(_accuracy(self.answer))

    def bars(self) -> Bars | None:
        """What was predicted above what was measured, figure by figure."""
        return comparison_bars(self.answer)

    def figures(self, unit: str) -> dict[str, Any]:
        """Everything but the logs."""
        found, alignment = self.answer, self.answer.alignment
        differences = found.tables()["differences"].records()
        counts = alignment and {
            "predicted": alignment.predicted,
            "measured": alignment.real,
            "matched": alignment.matched,
        }
        return {
            "schema": SCHEMA,
            "model": found.model,
            "runs": [_run_data(run) for run in found.runs],
            "allocations": counts,
            "differences": [renamed(each, difference="kind") for each in differences] if alignment else None,
            "notes": found.notes,
        }


def _accuracy(found: Verification) -> Iterator[Finding]:
    told = [each for each in found.comparisons if each.share is not None]
    if not told:
        return
    worst = max(told, key=lambda each: abs(each.share or 0))
    if not worst.share:
        text = "Every figure is predicted exactly, or lies between the bounds."
    else:
        text = "{figure} is off most: {share}, {predicted} predicted and {measured} measured."
    values = {
        "figure": worst.figure.capitalize(),
        "share": f"{worst.share or 0:+.2%}".replace("-", "−"),
        "predicted": Bytes(worst.predicted[0]),
        "measured": Bytes(worst.measured or 0),
    }
    yield Finding("accuracy", text, values)
    alignment = found.alignment
    if alignment is not None:
        counts = {"matched": alignment.matched, "real": alignment.real}
        text = "Of {real} allocations in the last step, {matched} are as predicted."
        yield Finding("allocations", text, counts)


def _run_data(run: VerifiedRun) -> dict[str, Any]:
    seen = plain(replace(run.measurement, log=None))
    del seen["log"]
    figures = [FIGURE_FIELDS.record(row) for row in _compared(run)]
    return {"figures": figures, "assumptions": run.prediction.assumptions, **seen}


def title(found: Verification) -> Title:
    """The model, how it was run, and on what."""
    work, stack = found.runs[0].measurement.workload, found.runs[0].measurement.stack
    trained = f"{work.optimizer}, step {work.steps}" if work.optimizer else "one inference"
    libraries = (("CUDA", stack.cuda), ("cuDNN", stack.cudnn and dotted_cudnn(stack.cudnn)), ("cuBLAS", stack.cublas))
    software = ", ".join(f"{name} {version}" for name, version in (("torch", stack.torch), *libraries) if version)
    return Title(found.model, ((work.scenario,), (f"batch {work.batch_size}",), (trained,), (stack.gpu,), (software,)))


_PARTS: Final = (
    Part("predicted", "predicted", "parameter"),
    Part("most", "perhaps more", "workspace"),
    Part("measured", "measured", "activation"),
)


def comparison_bars(found: Verification) -> Bars | None:
    """Two bars for each figure that was measured: the prediction, with its interval, and the measurement."""
    bars: list[Bar] = []
    for each in found.comparisons:
        if each.measured is not None:
            name = f"{each.figure}, benchmark" if each.benchmark else each.figure
            low, high = each.predicted
            bars.append(Bar((Label(f"{name}: predicted"),), (low, high - low, 0)))
            bars.append(Bar((Label(f"{name}: measured"),), (0, 0, each.measured)))
    return Bars("predicted beside measured", _PARTS, tuple(bars)) if bars else None


def figure_table(found: Verification) -> Table:
    """One row per figure and run."""
    rows = (row for run in found.runs for row in _compared(run))
    table = Table.of("figures", "Figures", FIGURE_FIELDS, rows, caption="Predicted beside measured")
    return table if len(found.runs) > 1 else table.without("benchmark")


def _compared(run: VerifiedRun) -> Iterator[FigureComparison]:
    yield from run.comparisons
    if run.tracked is not None:
        yield run.tracked


def difference_table(alignment: Alignment) -> Table:
    """The first allocations that are not as predicted."""
    found = alignment.differences
    shown = f"the first {MOST_DIFFERENCES} of {len(found):,} (JSON has them all)"
    caption = f"Allocations of the last step that differ{', ' + shown if len(found) > MOST_DIFFERENCES else ''}"
    return Table.of("differences", "Differences", DIFFERENCE_FIELDS, found[:MOST_DIFFERENCES], caption=caption)


def _notes(found: Verification) -> Iterator[str]:
    for run in found.runs:
        seen = run.measurement
        when = " with cudnn.benchmark" if seen.workload.benchmark else ""
        if seen.error:
            yield f"the run{when} ended: {seen.error}"
        if seen.skipped:
            yield f"the GradScaler left out {seen.skipped} steps{when}, which were run again"
        if seen.untracked:
            yield f"MemTracker could not follow the step: {seen.untracked}"
        if seen.device is not None:
            yield f"the device's use{when} is told by {seen.device.source}"
        yield from run.prediction.notes
    alignment = found.alignment
    if alignment is not None:
        yield (
            f"of {alignment.real:,} allocations in the last step, {alignment.predicted:,} were predicted and "
            f"{alignment.matched:,} matched"
        )
