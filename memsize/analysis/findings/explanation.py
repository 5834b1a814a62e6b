"""Rules about a memory snapshot: why memory ran out, what most of it was, and whether it was fragmented."""

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
def _moment(explanation: Explanation) -> Iterator[Finding]:
    failed, line = explanation.failed, explanation.line
    values: dict[str, object] = {
        "requested": Bytes(explanation.requested),
        "reserved": Bytes(explanation.reserved_then),
        "line": line,
    }
    if failed is not None:
        text = (
            "Out of memory{at}: PyTorch requested {bytes}, {free} were free on the GPU. Tensors held {requested} "
            "of the {reserved} that PyTorch had reserved."
        )
        text += " It was the last of {times} failed requests." if failed.times > 1 else ""
        values |= {"at": f" at {failed.line}" if failed.line else ""}
        values |= {"bytes": Bytes(failed.bytes), "free": Bytes(failed.free), "times": failed.times}
        yield Finding("snapshot-out-of-memory", text, values, bytes=failed.bytes)
    elif explanation.moment == "peak":
        text = "The peak of the recorded history was {requested}{at}; {left} were alive at the end."
        values |= {"at": f", at {line}" if line else "", "left": Bytes(explanation.reserved.requested)}
        yield Finding("snapshot-peak", text, values, bytes=explanation.requested)
    else:
        before = ", the most so far" if explanation.entries else ""
        text = f"Tensors held {{requested}} of {{reserved}} reserved when the snapshot was taken{before}."
        yield Finding("snapshot-end", text, values, bytes=explanation.requested)


@RULES.rule("snapshot-mostly")
def _mostly(explanation: Explanation) -> Iterator[Finding]:
    categories = [category for category in explanation.alive if category.category not in UNKNOWN and category.blocks]
    most = max(categories, key=lambda category: category.bytes, default=None)
    if most is None or most.bytes < explanation.requested * _WORTH_TELLING:
        return
    template = "The most bytes are in {noun}: {bytes} ({share:.0%}) in {blocks} blocks"
    stack = next(category for category in explanation.places if category.category == most.category)
    if stack.line is not None:
        template += "; {here} of them were made at {line}" + (", in {function}" if stack.function else "")
    values = {
        "noun": category_noun(most.category),
        "bytes": Bytes(most.bytes),
        "share": most.bytes / explanation.requested,
        "blocks": most.blocks,
        "here": Bytes(stack.bytes),
        "line": stack.line,
        "function": stack.function,
    }
    yield Finding("snapshot-mostly", template + ".", values, bytes=most.bytes)


@RULES.rule("snapshot-fragmented", "snapshot-not-fragmented")
def _fragmentation(explanation: Explanation) -> Iterator[Finding]:
    reserved = explanation.reserved
    free = reserved.pieces + reserved.cached
    values = {"free": Bytes(free), "largest": Bytes(reserved.largest), "reserved": Bytes(reserved.bytes)}
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
        template = "{pieces} of the {reserved} reserved are free but fragmented; the largest free block is {largest}."
        yield Finding(
            "snapshot-fragmented", template, values | {"pieces": Bytes(reserved.pieces)}, bytes=reserved.pieces
        )


@RULES.rule("snapshot-untold")
def _untold(explanation: Explanation) -> Iterator[Finding]:
    earlier = next((category for category in explanation.alive if category.category == "earlier"), None)
    if earlier is None or earlier.bytes < explanation.requested * _WORTH_TELLING:
        return
    template = (
        "{bytes} were allocated before the history begins, so their stacks are unknown; usually these are parameters. "
        "Call torch.cuda.memory._record_memory_history() before the model is made."
    )
    yield Finding("snapshot-untold", template, {"bytes": Bytes(earlier.bytes)}, bytes=earlier.bytes)


@RULES.rule("snapshot-predicted")
def _predicted(explanation: Explanation) -> Iterator[Finding]:
    if explanation.predicted is None or not explanation.requested:
        return
    off = explanation.predicted.requested - explanation.requested
    gaps = [category for category in explanation.alive if category.predicted is not None]
    widest = max(gaps, key=lambda category: abs(category.bytes - (category.predicted or 0)), default=None)
    template = "The prediction for {model} is {predicted}, {share} compared with the snapshot"
    values = {"predicted": Bytes(explanation.predicted.requested), "model": explanation.predicted.model}
    values |= {"share": signed_share(explanation.requested, explanation.predicted.requested)}
    if widest is not None and abs(off) >= explanation.requested * _WORTH_TELLING:
        template += "; the widest gap is in {noun}, {there} predicted and {here} found"
        values |= {"noun": category_noun(widest.category), "there": Bytes(widest.predicted or 0)}
        values |= {"here": Bytes(widest.bytes)}
    yield Finding("snapshot-predicted", template + ".", values, bytes=off)
