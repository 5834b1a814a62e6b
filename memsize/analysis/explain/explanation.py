"""A snapshot explained: which moment matters, what was alive then, where it was made, what the allocator held; and the
findings: why memory ran out, what most of it was, and whether it was fragmented.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from memsize.analysis.explain.blocks import block_history
from memsize.analysis.explain.history import Category, History, Life, categories, python_calls
from memsize.analysis.explain.snapshot_file import Segment, Snapshot, read_snapshot
from memsize.analysis.step import StepTrace, predicted_peak
from memsize.analysis.verify.alignment import levels_beside
from memsize.errors import InputError
from memsize.records.aggregates import split_phase
from memsize.records.explanation import (
    Alive,
    BlockHistory,
    Explanation,
    FailedRequest,
    How,
    Moment,
    Place,
    Predicted,
    Reserved as ReservedBytes,
)
from memsize.records.finding import Finding, Rules, sizes
from memsize.records.program import ProgramRun
from memsize.records.roles import ROLES, UNKNOWN, noun
from memsize.records.trace import Trace
from memsize.units import Bytes, signed_share

_MOST_CALLS: Final = 24
"""Calls of a stack that are kept; those around them start the program."""


def explain(path: str | os.PathLike[str], beside: Any = None, device: int | None = None) -> Explanation:
    """The explanation of the snapshot at `path`, compared with another, or with the prediction of a saved run's answer.

    Of several GPUs it is the one that ran out of memory, else the one that holds most, unless `device` is given.
    """
    other, roles = (None, {}) if beside is None else predicted(beside)
    snapshot = read_snapshot(path)
    number = _chosen(snapshot) if device is None else device
    entries = snapshot.histories[number] if 0 <= number < len(snapshot.histories) else ()
    history = History(entries, tuple(segment for segment in snapshot.segments if segment.device == number))
    if not history.segments and not history.entries:
        raise InputError(f"{snapshot.name} has nothing on GPU {number}")
    moment, last = _moment(history)
    named_lives = categories(history)
    lives = zip(history.lives, named_lives, strict=True)
    live = [(life, category) for life, category in lives if life.alive_at(last)]
    blocks = block_history(history, named_lives, last)
    explanation = Explanation(
        snapshot=snapshot.name,
        device=number,
        moment=moment,
        requested=sum(life.bytes for life, _ in live),
        reserved_then=history.reserved_at(last),
        line=None if moment == "end" else history.summary(history.entries[last].stack).line,
        alive=tuple(_alive(live, roles)),
        places=tuple(_compared(_places(history, live), beside)),
        reserved=_reserved(history.segments),
        failed=_failed(history),
        entries=len(history.entries),
        predicted=other and other._replace(levels=_levels(beside, blocks)),
        history=blocks,
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
    groups: dict[tuple[str, str, int], list[Life]] = {}
    for life, category in live:
        groups.setdefault((category.name, life.region, id(life.stack) if life.stack else 0), []).append(life)
    # Blocks whose stacks differ in C++ alone are one place.
    joined: dict[tuple[str, str, str, tuple[str, ...]], Place] = {}
    for (name, region, _), lives in groups.items():
        summary = history.summary(lives[0].stack)
        calls = tuple(map(str, python_calls(lives[0].stack)[:_MOST_CALLS]))
        sizes = [life.bytes for life in lives]
        key = (name, region, summary.function, calls)
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
            region=region or None,
        )
    return sorted(joined.values(), key=lambda stack_place: -stack_place.bytes)


def _compared(places: list[Place], other: Any) -> list[Place]:
    """The places with what they hold in another snapshot, if `other` is one: the widest differences first."""
    if not isinstance(other, Explanation):
        return places
    before = {_key(stack): stack for stack in other.places}
    both: list[Place] = []
    for stack in places:
        there = before.pop(_key(stack), None)
        both.append(stack._replace(before=there.bytes if there else 0))
    both += (stack._replace(bytes=0, blocks=0, largest=0, before=stack.bytes) for stack in before.values())
    return sorted(both, key=lambda stack: (-abs(stack.growth), -stack.bytes))


def _key(stack: Place) -> tuple[str, str, tuple[str, ...]]:
    """The identity of a place in any snapshot."""
    return stack.category, stack.function, stack.calls


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


def _alive(live: Iterable[tuple[Life, Category]], predicted_roles: Mapping[str, int]) -> list[Alive]:
    categories: dict[str, Alive] = {}
    for life, (name, how) in live:
        total = categories.get(name, Alive(name, bytes=0, blocks=0, how=how))
        weakest = max(total.how, how, key=_CERTAINTY.index)
        categories[name] = total._replace(bytes=total.bytes + life.bytes, blocks=total.blocks + 1, how=weakest)
    for role in predicted_roles.keys() | (categories.keys() - {*UNKNOWN} if predicted_roles else set()):
        of_role = categories.get(role, Alive(role, bytes=0, blocks=0, how="unknown"))
        categories[role] = of_role._replace(predicted=predicted_roles.get(role, 0))
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


def predicted(answer: Any) -> tuple[Predicted, Mapping[str, int]]:
    """The peak that a saved run predicts or another snapshot has, with its bytes by role; raises `InputError` for a run
    that predicts none.
    """
    if isinstance(answer, Explanation):
        there = Predicted(answer.snapshot, scenario="", requested=answer.requested, reserved=answer.reserved_then)
        return there, {row.category: row.bytes for row in answer.alive}
    model, scenario, estimate = predicted_peak(answer)
    peak = Predicted(model, scenario=scenario, requested=estimate.requested, reserved=estimate.reserved)
    return peak, estimate.roles


def _levels(beside: Any, history: BlockHistory | None) -> tuple[int, ...]:
    """The live bytes of the run to compare with at each event of `history`; none where only its peak is known."""
    if history is None:
        return ()
    real = [change for _, change in history.events]
    match beside:
        case Explanation(history=BlockHistory() as other):
            return levels_beside(real, [change for _, change in other.events])
        case StepTrace() | ProgramRun():
            return levels_beside(real, _as_long(beside.trace, sum(change > 0 for change in real)))
    return ()


def _as_long(trace: Trace, allocations: int) -> list[int]:
    """The changes of live bytes in `trace`, its last step repeated until there are as many `allocations`."""
    steps = [split_phase(phase)[1] for phase in trace.phases]
    of_last = [max(steps, default=0) == steps[event.phase] > 0 for event in trace.events]
    changes = [event.delta for event in trace.events]
    step = [change for change, is_last in zip(changes, of_last, strict=True) if is_last]
    missing, length = allocations - sum(change > 0 for change in changes), sum(change > 0 for change in step)
    end = len(of_last) - of_last[::-1].index(True) if step else 0
    return changes[:end] + step * (-(-missing // length) if missing > 0 and length else 0) + changes[end:]


# -- findings ----------------------------------------------------------------------------------------------------------

RULES: Final = Rules[Explanation]()
_WORTH_TELLING: Final = 0.05
"""The part of what is alive, or reserved, from which on something is told."""


@RULES.rule("snapshot-out-of-memory", "snapshot-peak", "snapshot-end")
def _what_happened(explanation: Explanation) -> Iterator[Finding]:
    failed, line = explanation.failed, explanation.line
    values = sizes(requested=explanation.requested, reserved=explanation.reserved_then) | {"line": line}
    if failed is not None:
        yield out_of_memory("snapshot-out-of-memory", failed, values)
    elif explanation.moment == "peak":
        text = "At the peak{at}, tensors held {requested} of {reserved} reserved; {left} were alive at the end."
        values |= {"at": f", at {line}" if line else "", "left": Bytes(explanation.reserved.requested)}
        yield Finding("snapshot-peak", text, values, bytes=explanation.requested)
    else:
        before = ", the most so far" if explanation.entries else ""
        text = f"Tensors held {{requested}} of {{reserved}} reserved when the snapshot was taken{before}."
        yield Finding("snapshot-end", text, values, bytes=explanation.requested)


def out_of_memory(code: str, failed: FailedRequest, values: dict[str, object]) -> Finding:
    """The finding `code` about a request that failed; `values` has the bytes ``requested`` by tensors and
    ``reserved``.
    """
    text = (
        "Out of memory{at}: PyTorch requested {bytes} and {free} were free on the GPU. "
        "Tensors held {requested} of the {reserved} that PyTorch had reserved."
    )
    text += " This was the last of {times} failed requests." if failed.times > 1 else ""
    values |= {"at": f" at {failed.line}" if failed.line else "", "times": failed.times}
    values |= sizes(bytes=failed.bytes, free=failed.free)
    return Finding(code, text, values, bytes=failed.bytes)


@RULES.rule("snapshot-mostly")
def _mostly(explanation: Explanation) -> Iterator[Finding]:
    categories = [category for category in explanation.alive if category.category not in UNKNOWN and category.blocks]
    most = max(categories, key=lambda category: category.bytes, default=None)
    if most is None or most.bytes < explanation.requested * _WORTH_TELLING:
        return
    template = "The largest part is {noun}: {bytes} ({share:.0%}) in {blocks} blocks"
    of_role = (stack for stack in explanation.places if stack.category == most.category)
    stack = max(of_role, key=lambda stack: stack.bytes)
    if stack.line is not None:
        template += "; {here} of it was allocated at {line}" + (", in {function}" if stack.function else "")
    values: dict[str, object] = {"noun": noun(most.category), "bytes": Bytes(most.bytes)}
    values |= {"share": most.bytes / explanation.requested, "blocks": most.blocks, "here": Bytes(stack.bytes)}
    values |= {"line": stack.line, "function": stack.function}
    yield Finding("snapshot-mostly", template + ".", values, bytes=most.bytes)


@RULES.rule("snapshot-compiled")
def _compiled(explanation: Explanation) -> Iterator[Finding]:
    """Say what compiled code has made, where the history tells."""
    regions: Counter[str] = Counter()
    for stack in explanation.places:
        if stack.region is not None:
            regions[stack.region] += stack.bytes
    whole = regions.total()
    if whole < explanation.requested * _WORTH_TELLING or not whole:
        return
    (region, most), *others = regions.most_common()
    template = "Code compiled by torch.compile made {bytes} ({share:.0%}) of what was alive, in region {region}."
    if others:
        template = (
            "Code compiled by torch.compile made {bytes} ({share:.0%}) of what was alive, {most} in region {region}."
        )
    values = {"bytes": Bytes(whole), "share": whole / explanation.requested, "most": Bytes(most), "region": region}
    yield Finding("snapshot-compiled", template, values, bytes=whole)


@RULES.rule("snapshot-fragmented", "snapshot-not-fragmented")
def _fragmentation(explanation: Explanation) -> Iterator[Finding]:
    reserved = explanation.reserved
    free = reserved.pieces + reserved.cached
    values = sizes(free=free, largest=reserved.largest, reserved=reserved.bytes)
    if explanation.failed is not None:
        wanted = explanation.failed.bytes
        values |= {"wanted": Bytes(wanted)}
        if reserved.largest < wanted <= free + explanation.failed.free:
            template = (
                "Fragmentation is the cause: {free} are free inside reserved segments, but the largest block is "
                "{largest} and the request needs {wanted} in one piece. "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets PyTorch use them."
            )
            yield Finding("snapshot-fragmented", template, values, bytes=free)
        elif free + explanation.failed.free < wanted:
            template = "Fragmentation is not the cause: only {free} are free inside reserved segments."
            yield Finding("snapshot-not-fragmented", template, values, bytes=free)
    elif reserved.bytes and reserved.pieces >= reserved.bytes * _WORTH_TELLING:
        template = (
            "At the end, {pieces} of the {reserved} reserved are free but fragmented; "
            "the largest free block is {largest}."
        )
        values |= {"pieces": Bytes(reserved.pieces)}
        yield Finding("snapshot-fragmented", template, values, bytes=reserved.pieces)


@RULES.rule("snapshot-untold")
def _untold(explanation: Explanation) -> Iterator[Finding]:
    earlier = next((category for category in explanation.alive if category.category == "earlier"), None)
    if earlier is None or earlier.bytes < explanation.requested * _WORTH_TELLING:
        return
    template = (
        "{bytes} were allocated before the history begins, so their stacks are unknown; usually these are parameters. "
        "Call torch.cuda.memory._record_memory_history() before you build the model."
    )
    yield Finding("snapshot-untold", template, {"bytes": Bytes(earlier.bytes)}, bytes=earlier.bytes)


@RULES.rule("snapshot-predicted")
def _predicted(explanation: Explanation) -> Iterator[Finding]:
    if explanation.predicted is None or explanation.predicted.is_snapshot or not explanation.requested:
        return
    off = explanation.predicted.requested - explanation.requested
    gaps = [category for category in explanation.alive if category.predicted is not None]
    widest = max(gaps, key=lambda category: abs(category.bytes - (category.predicted or 0)), default=None)
    share = signed_share(explanation.requested, explanation.predicted.requested)
    template = "The prediction for {model} is {predicted}, {share} compared with the snapshot"
    if share.endswith("0.0%"):
        template = "The prediction for {model} is {predicted}, as in the snapshot"
    values = {"predicted": Bytes(explanation.predicted.requested), "model": explanation.predicted.model}
    values |= {"share": share}
    if widest is not None and abs(off) >= explanation.requested * _WORTH_TELLING:
        template += "; the largest gap is in {noun}: {there} predicted, {here} found"
        values |= {"noun": noun(widest.category), "there": Bytes(widest.predicted or 0)}
        values |= {"here": Bytes(widest.bytes)}
    yield Finding("snapshot-predicted", template + ".", values, bytes=off)


@RULES.rule("snapshot-compared")
def _other_snapshot(explanation: Explanation) -> Iterator[Finding]:
    other = explanation.predicted
    if other is None or not other.is_snapshot:
        return
    off = explanation.requested - other.requested
    widest = next(iter(explanation.places), None)
    template = "Tensors held {here}, as in {other}"
    values = {"other": other.model, "there": Bytes(other.requested), "here": Bytes(explanation.requested)}
    if off:
        template = "Tensors held {here} instead of the {there} in {other} ({share})"
        values["share"] = signed_share(other.requested, explanation.requested)
    if widest is not None and widest.growth:
        template += "; the largest difference is {at}: {before} → {after}"
        values |= {"at": f"at {widest.line}" if widest.line else f"in {noun(widest.category)}"}
        values |= {"before": Bytes(widest.before or 0), "after": Bytes(widest.bytes)}
    yield Finding("snapshot-compared", template + ".", values, bytes=off)
