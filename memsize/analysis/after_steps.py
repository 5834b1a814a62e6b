"""The peaks of what a program does after its steps, and what each batch of its evaluation leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from memsize.errors import first_line
from memsize.records.aggregates import alive, live_bytes, split_phase
from memsize.records.program import AfterSteps
from memsize.records.trace import Trace
from memsize.workloads import after_steps as workload


def after_steps(
    after: workload.AfterSteps, trace: Trace, ends: Sequence[int], failing_line: Callable[[BaseException], str | None]
) -> AfterSteps | None:
    """The record of what followed the steps, which end at `ends`; None where nothing did."""
    end = ends[-1] if ends else 0
    levels = live_bytes(trace.events)
    evaluating = [levels[i] for i in range(end, len(levels)) if _is_evaluation(trace, i)]
    collecting = [levels[i - 1] for numbers in after.checkpoints for i in numbers if 0 < i <= len(levels)]
    if not (evaluating or collecting or after.failure) or not end:
        return None
    record = AfterSteps(
        max(levels[:end]),
        max(evaluating, default=None),
        max(collecting, default=None),
    )
    if (error := after.failure) is not None:
        failure = f"{type(error).__name__}: {first_line(error)}"
        record = record._replace(failure=failure, failed_at=failing_line(error))
    evaluated = max(after.evaluations, key=lambda evaluated: len(evaluated.marks), default=None)
    if not evaluating or evaluated is None:
        return record
    batches = min(len(evaluated.marks), workload.BATCHES)
    per_batch, line = _growth(trace, levels, evaluated.marks)
    return record._replace(batches=batches, of=evaluated.batches, per_batch=per_batch, line=line)


def _is_evaluation(trace: Trace, index: int) -> bool:
    return split_phase(trace.phases[trace.events[index].phase])[0] == "evaluation"


def _growth(trace: Trace, levels: Sequence[int], marks: Sequence[int]) -> tuple[int, str | None]:
    """The bytes that each batch of an evaluation leaves behind, from the second on, and the line that makes most."""
    at = [levels[mark - 1] for mark in marks if 0 < mark <= len(levels)][1:]
    if len(at) < 3 or any(later <= earlier for earlier, later in pairwise(at)):
        return 0, None
    born = {event.storage: index for index, event in enumerate(trace.events) if event.delta > 0}
    sizes = Counter[str | None]()
    for storage, size in alive(trace, marks[len(at)] - 1).items():
        if born[storage] >= marks[1]:
            sizes[trace.line_of(storage)] += size
    per_batch = int(median(later - earlier for earlier, later in pairwise(at)))
    return per_batch, max(sizes, key=sizes.__getitem__, default=None)
