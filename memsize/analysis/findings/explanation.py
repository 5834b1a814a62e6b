"""What a snapshot says: why the memory ran out, what most of it was, and whether fragmentation is to blame."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memsize.records.explanation import UNKNOWN, Explanation, category_noun
from memsize.records.finding import Finding, Rules
from memsize.units import Bytes, signed_share

RULES: Final = Rules[Explanation]()
_WORTH_TELLING: Final = 0.05
"""The part of what is alive, or reserved, from which on something is told."""


@RULES.rule("snapshot-out-of-memory", "snapshot-peak", "snapshot-end")
def _moment(found: Explanation) -> Iterator[Finding]:
    held = {"requested": Bytes(found.requested), "reserved": Bytes(found.reserved_then), "line": found.line}
    if found.failed is not None:
        failed = found.failed
        template = (
            "Out of memory{at}: PyTorch asked for {bytes} where {free} were free on the GPU. Tensors held {requested} "
            "of the {reserved} that PyTorch had reserved."
        )
        if failed.times > 1:
            template += " It is the last of {times} requests that failed."
        values = held | {
            "at": f" at {failed.line}" if failed.line else "",
            "bytes": Bytes(failed.bytes),
            "free": Bytes(failed.free),
            "times": failed.times,
        }
        yield Finding("snapshot-out-of-memory", failed.bytes, (), template, values)
    elif found.moment == "peak":
        left = Bytes(found.reserved.requested)
        template = "The peak of the recorded history was {requested}{at}; {left} were alive at the end."
        at = f", at {found.line}" if found.line else ""
        yield Finding("snapshot-peak", found.requested, (), template, held | {"at": at, "left": left})
    else:
        template = "Tensors held {requested} of {reserved} reserved when the snapshot was taken, and no more before."
        if not found.entries:
            template = "Tensors held {requested} of {reserved} reserved when the snapshot was taken."
        yield Finding("snapshot-end", found.requested, (), template, held)


@RULES.rule("snapshot-mostly")
def _mostly(found: Explanation) -> Iterator[Finding]:
    known = [each for each in found.alive if each.category not in UNKNOWN and each.blocks]
    most = max(known, key=lambda each: each.bytes, default=None)
    if most is None or most.bytes < found.requested * _WORTH_TELLING:
        return
    template = "The most bytes are in {noun}: {bytes} ({share:.0%}) in {blocks} blocks"
    place = next(each for each in found.places if each.category == most.category)
    if place.line is not None:
        template += "; {here} of them were made at {line}, in {function}"
    values = {
        "noun": category_noun(most.category),
        "bytes": Bytes(most.bytes),
        "share": most.bytes / found.requested,
        "blocks": most.blocks,
        "here": Bytes(place.bytes),
        "line": place.line,
        "function": place.function,
    }
    yield Finding("snapshot-mostly", most.bytes, (), template + ".", values)


@RULES.rule("snapshot-fragmented", "snapshot-not-fragmented")
def _fragmentation(found: Explanation) -> Iterator[Finding]:
    held = found.reserved
    free = held.pieces + held.cached
    values = {"free": Bytes(free), "largest": Bytes(held.largest), "reserved": Bytes(held.bytes)}
    if found.failed is not None:
        wanted = found.failed.bytes
        values |= {"wanted": Bytes(wanted)}
        if held.largest < wanted <= free + found.failed.free:
            template = (
                "Fragmentation is to blame: {free} lie free inside of reserved segments, the largest block has "
                "{largest}, and {wanted} were wanted in one piece. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
                "lets PyTorch use them."
            )
            yield Finding("snapshot-fragmented", free, (), template, values)
        elif free + found.failed.free < wanted:
            template = "Fragmentation is not to blame: {free} lie free inside of reserved segments, too little for it."
            yield Finding("snapshot-not-fragmented", free, (), template, values)
    elif held.bytes and held.pieces >= held.bytes * _WORTH_TELLING:
        template = (
            "{pieces} of {reserved} reserved lie free between blocks in use; the largest free block has {largest}."
        )
        yield Finding("snapshot-fragmented", held.pieces, (), template, values | {"pieces": Bytes(held.pieces)})


@RULES.rule("snapshot-untold")
def _untold(found: Explanation) -> Iterator[Finding]:
    earlier = next((each for each in found.alive if each.category == "earlier"), None)
    if earlier is None or earlier.bytes < found.requested * _WORTH_TELLING:
        return
    template = (
        "{bytes} were made before the history begins, so their stacks are not known: they are parameters as a rule. "
        "Call torch.cuda.memory._record_memory_history() before the model is made."
    )
    yield Finding("snapshot-untold", earlier.bytes, (), template, {"bytes": Bytes(earlier.bytes)})


@RULES.rule("snapshot-predicted")
def _predicted(found: Explanation) -> Iterator[Finding]:
    if found.predicted is None or not found.requested:
        return
    off = found.predicted.requested - found.requested
    gaps = [each for each in found.alive if each.predicted is not None]
    widest = max(gaps, key=lambda each: abs(each.bytes - (each.predicted or 0)), default=None)
    template = "The prediction for {model} is {predicted}, {share} of what is here"
    values = {"predicted": Bytes(found.predicted.requested), "model": found.predicted.model}
    values |= {"share": signed_share(found.requested, found.predicted.requested)}
    if widest is not None and abs(off) >= found.requested * _WORTH_TELLING:
        template += "; the widest gap is in {noun}, {there} predicted and {here} found"
        values |= {"noun": category_noun(widest.category), "there": Bytes(widest.predicted or 0)}
        values |= {"here": Bytes(widest.bytes)}
    yield Finding("snapshot-predicted", off, (), template + ".", values)
