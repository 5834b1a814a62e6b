"""Two models side by side: what changed in what they store, what did not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memsize.analysis.findings.evidence import Evidence, layers_of
from memsize.analysis.findings.precision import mixed_dtypes, wrappers_that_misreport
from memsize.records.aggregates import stored_dtypes, totals
from memsize.records.comparison import Change, Comparison, stored_as
from memsize.records.finding import Finding, Rules
from memsize.records.trace import Trace
from memsize.units import Bytes

_FLOATING = ("float64", "float32", "float16", "bfloat16")


class Models(NamedTuple):
    """What the rules look at: the traces of two models, and their tensors side by side."""

    before: Trace
    after: Trace
    pairs: tuple[Change, ...]


RULES = Rules[Models]()


def compare_traces(before: Trace, after: Trace) -> Comparison:
    """The comparison of two traces of models with the same tensor names, or some of them."""
    first, second = ({tensor.name: tensor for tensor in trace.tensors} for trace in (before, after))
    # A packed module holds its weight under another name than the module it was converted from.
    pairs = tuple(Change(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second]))
    return Comparison(before, after, pairs, RULES.findings(Models(before, after, pairs)))


@RULES.rule("stored-changed", "stored-unchanged")
def what_is_stored(models: Models) -> Iterator[Finding]:
    """What both models store in total."""
    first, second = totals(models.before), totals(models.after)
    same = first.stored == second.stored
    text = (
        "What is stored did not change: {before}."
        if same
        else "What is stored went from {before} to {after} ({share})."
    )
    yield Finding(
        "stored-unchanged" if same else "stored-changed",
        second.stored - first.stored,
        (),
        text,
        {
            "before": Bytes(first.stored),
            "after": Bytes(second.stored),
            "share": f"{second.stored / first.stored:.0%}" if first.stored else "from nothing",
        },
    )


@RULES.rule("kept-for-backward-changed")
def what_is_kept(models: Models) -> Iterator[Finding]:
    """What both models keep for backward, where both were run."""
    kept = (totals(models.before).saved_bytes, totals(models.after).saved_bytes)
    if all(kept) and kept[0] != kept[1]:
        yield Finding(
            "kept-for-backward-changed",
            kept[1] - kept[0],
            (),
            "What is kept for backward went from {before} to {after}.",
            {"before": Bytes(kept[0]), "after": Bytes(kept[1])},
        )


@RULES.rule("tensors-changed")
def changed(models: Models) -> Iterator[Finding]:
    """Tensors that the second model stores differently, grouped by how they were and are stored."""
    groups: dict[tuple[str, str], list[Change]] = {}
    for pair in models.pairs:
        if pair.before and pair.after and not pair.same:
            groups.setdefault((stored_as(pair.before), stored_as(pair.after)), []).append(pair)
    for (old, new), members in groups.items():
        yield Finding(
            "tensors-changed",
            sum(pair.bytes for pair in members),
            _layers(members),
            "{count} of the tensors went from {old} to {new}, {before} → {after}: {layers}.",
            {
                "count": len(members),
                "old": old,
                "new": new,
                "before": Bytes(sum(pair.before.bytes for pair in members if pair.before)),
                "after": Bytes(sum(pair.after.bytes for pair in members if pair.after)),
                "layers": _layers(members),
            },
        )


@RULES.rule("tensors-unchanged")
def unchanged(models: Models) -> Iterator[Finding]:
    """Tensors that both models store alike, grouped by the likely cause."""
    groups: dict[str, list[Change]] = {}
    for pair in models.pairs:
        if pair.same and pair.before and pair.before.bytes:
            groups.setdefault(_cause(pair), []).append(pair)
    for cause, members in groups.items():
        yield Finding(
            "tensors-unchanged",
            sum(pair.before.bytes for pair in members if pair.before),
            _layers(members),
            f"{{count}} did not change ({{bytes}} as {{dtypes}}): {cause}. {{layers}}.",
            {
                "count": len(members),
                "bytes": Bytes(sum(pair.before.bytes for pair in members if pair.before)),
                "dtypes": stored_dtypes(pair.before for pair in members if pair.before),
                "layers": _layers(members),
            },
        )


def _cause(pair: Change) -> str:
    tensor = pair.before
    if tensor is None or tensor.kind == "attribute":
        return "they are not registered, so no conversion sees them"
    if tensor.spec.dtype not in _FLOATING:
        return "they are not floating"
    return "nothing cast them (autocast never does; a recipe may leave their layers alone)"


@RULES.rule("tensors-removed", "tensors-added")
def in_one_only(models: Models) -> Iterator[Finding]:
    """Tensors that only one of the models has."""
    for code, text, members in (
        ("tensors-removed", "Only before: {names} ({bytes}).", [p for p in models.pairs if p.after is None]),
        ("tensors-added", "Only after: {names} ({bytes}).", [p for p in models.pairs if p.before is None]),
    ):
        if members:
            size = sum(abs(pair.bytes) for pair in members)
            names = tuple(pair.name for pair in members)
            yield Finding(code, size, _layers(members), text, {"names": names, "bytes": Bytes(size)})


@RULES.rule("mixed-dtypes", "batch-norm-kept-fp32", "wrapper-misreports")
def odd_afterwards(models: Models) -> Iterator[Finding]:
    """What a report would say of the second model's dtypes."""
    evidence = Evidence(given=models.after)
    yield from mixed_dtypes(evidence)
    yield from wrappers_that_misreport(evidence)


def _layers(pairs: list[Change]) -> tuple[str, ...]:
    return layers_of(tensor for pair in pairs if (tensor := pair.after or pair.before))
