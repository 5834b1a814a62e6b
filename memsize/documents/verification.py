"""A verification as a document: figures beside each other, then the allocations that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from memsize.analysis.verify.alignment import levels_beside
from memsize.documents import Document, plain, renamed
from memsize.documents.sections import Bar, Bars, Chart, Limit, Overlay, Part, ScenarioView, Section, Table, Title
from memsize.documents.shared import listed
from memsize.records.fields import Label
from memsize.records.finding import Finding, sizes
from memsize.records.gpu import Card
from memsize.records.measurement import AllocationLog, OpLocation
from memsize.records.timeline import Phase, Timeline
from memsize.records.trace import Storage
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
    def sections(self) -> tuple[Section, ...]:
        verification, alignment = self.answer, self.answer.alignment
        assumptions = dict.fromkeys(text for run in verification.runs for text in run.prediction.assumptions)
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
            self._table,
            *([difference_table(alignment)] if alignment and alignment.differences else []),
            *listed("Assumed", tuple(assumptions)),
            *listed("Notes", tuple(dict.fromkeys((*_notes(verification), *verification.notes)))),
        )

    @property
    def _table(self) -> Table:
        rows = (row for run in self.answer.runs for row in _compared(run))
        table = Table.of("figures", "Figures", FIGURE_FIELDS, rows, caption="Predictions and measurements")
        return table if len(self.answer.runs) > 1 else table.without("benchmark")

    def scenes(self) -> tuple[ScenarioView, ...]:
        chart = last_step(self.answer.runs[0])
        return (ScenarioView("step", "the last step", lambda: (chart, self._table)),) if chart else ()

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
        stack = self.answer.runs[0].measurement.stack
        return Bars("predicted beside measured", _PARTS, tuple(bars), Limit(stack.gpu, stack.total)) if bars else None

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


def last_step(run: VerifiedRun) -> Chart | None:
    """The live bytes of the last step as predicted, with the measured ones as a line; None if no log was recorded, or
    if too little of it is as predicted.

    Both begin with the tensors from before the step, which one storage stands for: a step may free parts of them.
    """
    measured, predicted, stack = run.measurement, run.prediction, run.measurement.stack
    if measured.log is None or measured.steady is None:
        return None
    delta, real = _changes(predicted.log, predicted.steady), _changes(measured.log, measured.steady.requested)
    places = _places(predicted.log)
    levels = levels_beside(delta, real, (places, _places(measured.log))) or levels_beside(delta, real)
    if not levels:
        return None
    layers = {path: n for n, path in enumerate(dict.fromkeys(at.layer for at in places if at.layer is not None))}
    layer = tuple(-1 if location.layer is None else layers[location.layer] for location in places)
    starts = [n for n, location in enumerate(places) if n == 0 or location.phase != places[n - 1].phase]
    keys = (-1, *(max(entry.storage, -1) for entry in predicted.log.entries))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    first = {key: n for n, key in reversed([*enumerate(keys)])}
    is_older = [key < 0 for key in keys]
    timeline = Timeline(
        model=measured.workload.model,
        scenario=measured.workload.scenario,
        layers=tuple(layers),
        phases=tuple(Phase(places[start].phase, 0, start, stop) for start, stop in pairwise((*starts, len(delta)))),
        op=tuple(location.op for location in places),
        layer=layer,
        delta=delta,
        live={
            "earlier": tuple(accumulate(size if old else 0 for size, old in zip(delta, is_older, strict=True))),
            "elsewhere": tuple(accumulate(0 if old else size for size, old in zip(delta, is_older, strict=True))),
        },
        allocated=tuple(accumulate(delta)),
        reserved=(predicted.most.reserved,) * len(delta),
        storage=tuple(numbers[key] for key in keys),
        address=(0,) * len(delta),
        storages=tuple(
            Storage(delta[n], "earlier" if is_older[n] else "elsewhere", layer[n], places[n].op, "", (), -1)
            for n in map(first.__getitem__, numbers)
        ),
        card=Card(stack.gpu, stack.capability, stack.total, "measured"),
    )
    title = "Predicted live bytes of the last step, with the measured ones as a line"
    return Chart(timeline, title, other=Overlay("measured", levels))


def _places(log: AllocationLog) -> tuple[OpLocation, ...]:
    return (OpLocation("before", None, ""), *(log.places[entry.place] for entry in log.entries))


def _changes(log: AllocationLog, peak: int) -> tuple[int, ...]:
    """The changes of live bytes over a step with this `peak`: the tensors from before it, then its log."""
    changes = tuple(entry.delta for entry in log.entries)
    return (peak - max(accumulate(changes), default=0), *changes)


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
