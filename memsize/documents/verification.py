"""A verification as a document: figures beside each other, then the allocations that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from memsize.documents import Document, plain, renamed
from memsize.documents.sections import Bar, Bars, Part, Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.fields import Label
from memsize.records.finding import Finding, sizes
from memsize.records.verification import (
    DIFFERENCE_FIELDS,
    FIGURE_FIELDS,
    Alignment,
    FigureComparison,
    Verification,
    VerifiedRun,
)
from memsize.units import dotted_cudnn

SCHEMA: Final = "memsize.verification/1"
MOST_DIFFERENCES: Final = 20


class VerificationDocument(Document[Verification]):
    """A verification."""

    def sections(self) -> tuple[Section, ...]:
        verification, alignment = self.answer, self.answer.alignment
        assumptions = dict.fromkeys(text for run in verification.runs for text in run.prediction.assumptions)
        rows = (row for run in verification.runs for row in _compared(run))
        table = Table.of("figures", "Figures", FIGURE_FIELDS, rows, caption="Predictions and measurements")
        work, stack = verification.runs[0].measurement.workload, verification.runs[0].measurement.stack
        trained = f"{work.optimizer}, step {work.steps}" if work.optimizer else "one inference"
        libraries = (
            ("CUDA", stack.cuda),
            ("cuDNN", stack.cudnn and dotted_cudnn(stack.cudnn)),
            ("cuBLAS", stack.cublas),
        )
        software = ", ".join(f"{name} {version}" for name, version in (("torch", stack.torch), *libraries) if version)
        return (
            Title(
                verification.model,
                ((work.scenario,), (f"batch {work.batch_size}",), (trained,), (stack.gpu,), (software,)),
            ),
            *self.opening(),
            table if len(verification.runs) > 1 else table.without("benchmark"),
            *([difference_table(alignment)] if alignment and alignment.differences else []),
            *listed("Assumed", tuple(assumptions)),
            *listed("Notes", tuple(dict.fromkeys((*_notes(verification), *verification.notes)))),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """The error of the prediction that is furthest off, and the number of allocations that match."""
        shared = [comparison for comparison in self.answer.comparisons if comparison.share is not None]
        if not shared:
            return ()
        worst = max(shared, key=lambda comparison: abs(comparison.share or 0))
        text = "Every measured figure equals the prediction or lies within its bounds."
        if worst.share:
            text = "{figure} has the largest error, {share}: {low} to {high} predicted, {measured} measured."
        values = {
            "figure": worst.figure.capitalize(),
            "share": f"{worst.share or 0:+.2%}".replace("-", "−"),
            **sizes(low=worst.predicted.low, high=worst.predicted.high, measured=worst.measured),
        }
        accuracy, alignment = Finding("accuracy", text, values), self.answer.alignment
        if alignment is None:
            return (accuracy,)
        counts = {"matched": alignment.matched, "real": alignment.real}
        text = "{matched} of the {real} allocations of the last step were predicted exactly."
        return accuracy, Finding("allocations", text, counts)

    def bars(self) -> Bars | None:
        bars: list[Bar] = []
        for comparison in self.answer.comparisons:
            if comparison.measured is not None:
                name = f"{comparison.figure}, benchmark" if comparison.benchmark else comparison.figure
                low, high = comparison.predicted
                bars.append(Bar((Label(f"{name}: predicted"),), (low, high - low, 0)))
                bars.append(Bar((Label(f"{name}: measured"),), (0, 0, comparison.measured)))
        return Bars("predicted beside measured", _PARTS, tuple(bars)) if bars else None

    def figures(self, unit: str) -> dict[str, Any]:
        verification, alignment = self.answer, self.answer.alignment
        runs = []
        for run in verification.runs:
            seen = plain(replace(run.measurement, log=None)) | {"workspaces": run.measurement.workspaces}
            del seen["log"]
            figures = [FIGURE_FIELDS.record(row) for row in _compared(run)]
            runs.append({"figures": figures, "assumptions": run.prediction.assumptions, **seen})
        differences = verification.tables()["differences"].records() if alignment else None
        return {
            "schema": SCHEMA,
            "model": verification.model,
            "runs": runs,
            "allocations": alignment
            and {"predicted": alignment.predicted, "measured": alignment.real, "matched": alignment.matched},
            "differences": None if differences is None else [renamed(row, difference="kind") for row in differences],
            "notes": verification.notes,
        }


_PARTS: Final = (
    Part("predicted", "predicted", "parameter"),
    Part("most", "upper bound", "workspace"),
    Part("measured", "measured", "activation"),
)


def _compared(run: VerifiedRun) -> Iterator[FigureComparison]:
    yield from run.comparisons
    if run.tracked is not None:
        yield run.tracked


def difference_table(alignment: Alignment) -> Table:
    """The first allocations that differ from the prediction, at most `MOST_DIFFERENCES`."""
    differences = alignment.differences
    shown = f"the first {MOST_DIFFERENCES} of {len(differences):,} (JSON has them all)"
    caption = f"Allocations of the last step that differ{', ' + shown if len(differences) > MOST_DIFFERENCES else ''}"
    return Table.of("differences", "Differences", DIFFERENCE_FIELDS, differences[:MOST_DIFFERENCES], caption=caption)


def _notes(verification: Verification) -> Iterator[str]:
    for run in verification.runs:
        seen = run.measurement
        when = " with cudnn.benchmark" if seen.workload.benchmark else ""
        if seen.error:
            yield f"the run{when} ended: {seen.error}"
        if seen.skipped:
            yield f"the GradScaler skipped {seen.skipped} steps{when}; they were run again"
        if seen.untracked:
            yield f"MemTracker could not follow the step: {seen.untracked}"
        if seen.device is not None:
            yield f"memory of the device{when} as reported by {seen.device.source}"
        yield from run.prediction.notes
