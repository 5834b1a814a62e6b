"""A snapshot explained: which moment matters, what was alive then, where it was made, and what the allocator held."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from memsize.analysis.explain.history import Category, History, Life, categories, python_calls
from memsize.analysis.explain.snapshot_file import Segment, Snapshot, read_snapshot
from memsize.analysis.findings.explanation import RULES
from memsize.analysis.step import StepTrace
from memsize.errors import InputError
from memsize.records.explanation import (
    UNKNOWN,
    Alive,
    Explanation,
    FailedRequest,
    How,
    Moment,
    Place,
    Predicted,
    Reserved as ReservedBytes,
)
from memsize.records.gpu import GpuEstimate
from memsize.records.program import ProgramRun
from memsize.records.report import Report
from memsize.records.roles import ROLES

_MOST_CALLS: Final = 24
"""Calls of a stack that are kept; those around them start the program."""


def explain(path: str | os.PathLike[str], beside: Any = None, device: int | None = None) -> Explanation:
    """The explanation of the snapshot at `path`, beside the prediction that is a saved run's answer.

    Of several GPUs it is the one that ran out of memory, else the one that holds most, unless `device` is given.
    """
    prediction = None if beside is None else predicted(beside)
    snapshot = read_snapshot(path)
    number = _chosen(snapshot) if device is None else device
    entries = snapshot.histories[number] if 0 <= number < len(snapshot.histories) else ()
    history = History(entries, tuple(segment for segment in snapshot.segments if segment.device == number))
    if not history.segments and not history.entries:
        raise InputError(f"{snapshot.name} has nothing on GPU {number}")
    moment, last = _moment(history)
    lives = zip(history.lives, categories(history), strict=True)
    live = [(life, category) for life, category in lives if life.alive_at(last)]
    explanation = Explanation(
        snapshot=snapshot.name,
        device=number,
        moment=moment,
        requested=sum(life.bytes for life, _ in live),
        reserved_then=history.reserved_at(last),
        line=None if moment == "end" else history.summary(history.entries[last].stack).line,
        alive=tuple(_alive(live, prediction.estimate if prediction else None)),
        places=tuple(_places(history, live)),
        reserved=_reserved(history.segments),
        failed=_failed(history),
        entries=len(history.entries),
        predicted=prediction.named if prediction else None,
        notes=tuple(_notes(snapshot, number, history)),
    )
    return replace(explanation, findings=RULES.findings(explanation))


def _chosen(snapshot: Snapshot) -> int:
    for number, entries in enumerate(snapshot.histories):
        if any(entry.action == "oom" for entry in entries):
            return number
    reserved = Counter({0: 0})
    for segment in snapshot.segments:
        reserved[segment.device] += segment.size
    return max(reserved, key=reserved.__getitem__)


def _moment(history: History) -> tuple[Moment, int]:
    """The moment to explain, and the last entry that counts: what is alive after it is explained."""
    if history.failures:
        return "out of memory", history.failures[-1]
    levels, end = history.requested, max(len(history.entries) - 1, 0)
    highest = max(range(len(levels)), key=levels.__getitem__)
    return ("end", end) if levels[highest] == levels[end] else ("peak", highest)


def _failed(history: History) -> FailedRequest | None:
    if not history.failures:
        return None
    last = history.entries[history.failures[-1]]
    summary = history.summary(last.stack)
    return FailedRequest(
        bytes=last.size,
        # PyTorch records the request as it was rounded up, and writes what is free where an address stands otherwise.
        free=last.free or last.address,
        line=summary.line,
        function=summary.function,
        stage=history.stage(last.stack),
        times=len(history.failures),
    )


def _places(history: History, live: Iterable[tuple[Life, Category]]) -> list[Place]:
    groups: dict[tuple[str, int], list[Life]] = {}
    for life, category in live:
        groups.setdefault((category.name, id(life.stack) if life.stack else 0), []).append(life)
    # Blocks whose stacks differ in C++ alone are one place.
    joined: dict[tuple[str, str, tuple[str, ...]], Place] = {}
    for (name, _), lives in groups.items():
        summary = history.summary(lives[0].stack)
        calls = tuple(map(str, python_calls(lives[0].stack)[:_MOST_CALLS]))
        sizes = [life.bytes for life in lives]
        key = (name, summary.function, calls)
        former = joined.get(key)
        joined[key] = Place(
            bytes=sum(sizes) + (former.bytes if former else 0),
            blocks=len(sizes) + (former.blocks if former else 0),
            largest=max([*sizes, former.largest if former else 0]),
            category=name,
            line=summary.line,
            function=summary.function,
            called_from=summary.called_from,
            calls=calls,
        )
    return sorted(joined.values(), key=lambda stack_place: -stack_place.bytes)


def _reserved(segments: Iterable[Segment]) -> ReservedBytes:
    requested = rounding = waiting = pieces = cached = largest = 0
    for segment in segments:
        free = [block.size for block in segment.blocks if block.state == "inactive"]
        used = [block for block in segment.blocks if block.state == "active_allocated"]
        requested += sum(block.requested for block in used)
        rounding += sum(block.size - block.requested for block in used)
        pending = segment.size - sum(free) - sum(block.size for block in used)
        waiting += pending
        if used or pending:
            pieces += sum(free)
        else:
            cached += sum(free)
        largest = max([largest, *free])
    return ReservedBytes(
        requested=requested, rounding=rounding, waiting=waiting, pieces=pieces, cached=cached, largest=largest
    )


def _alive(live: Iterable[tuple[Life, Category]], estimate: GpuEstimate | None) -> list[Alive]:
    categories: dict[str, Alive] = {}
    for life, (name, how) in live:
        total = categories.get(name, Alive(name, bytes=0, blocks=0, how=how))
        weakest = max(total.how, how, key=_CERTAINTY.index)
        categories[name] = total._replace(bytes=total.bytes + life.bytes, blocks=total.blocks + 1, how=weakest)
    if estimate is not None:
        for role, size in estimate.roles.items():
            categories[role] = categories.get(role, Alive(role, bytes=0, blocks=0, how="unknown"))._replace(
                predicted=size
            )
    return [categories[name] for name in (*ROLES, *UNKNOWN) if name in categories]


_CERTAINTY: Final[tuple[How, ...]] = ("recorded", "stack", "lifetime", "size", "unknown")


def _notes(snapshot: Snapshot, number: int, history: History) -> Iterable[str]:
    others = sorted({segment.device for segment in snapshot.segments} - {number})
    if others:
        yield f"the snapshot also has GPU {', '.join(map(str, others))}: --device shows another"
    if not snapshot.whole:
        yield (
            "its history is longer than memsize reads, so this is the end alone, and neither the peak nor a request "
            "that failed; torch.cuda.memory._record_memory_history(max_entries=100000) keeps the history short"
        )
    elif not any(entry.action == "alloc" for entry in history.entries):
        yield (
            "no history was recorded: call torch.cuda.memory._record_memory_history() before the model is made, and "
            "the snapshot also tells the peak and what each block is for"
        )


class _Prediction(NamedTuple):
    named: Predicted
    estimate: GpuEstimate


def predicted(answer: Any) -> _Prediction:
    """The peak that a saved run predicts; raises `InputError` for a run that predicts none."""
    match answer:
        case StepTrace():
            model, scenario, estimate = answer.trace.model, answer.trace.scenario, answer.peak
        case ProgramRun():
            model, scenario, estimate = answer.program, "as-given", answer.peak
        case Report(scenario_results=results) if peaks := [
            (result.name, peak) for result in results if (peak := result.training or result.inference)
        ]:
            model, (scenario, estimate) = answer.model, peaks[0]
        case _:
            raise InputError(
                f"this saved {getattr(answer, 'kind', 'run')} predicts no peak: save memsize run, memsize timeline, or "
                "memsize report --train"
            )
    named = Predicted(model, scenario=scenario, requested=estimate.requested, reserved=estimate.reserved)
    return _Prediction(named, estimate)
