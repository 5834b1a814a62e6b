"""Two models side by side: what changed in what they store, what did not, and why."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.analysis.findings.evidence import Evidence
from memsize.analysis.findings.precision import mixed_dtypes, wrappers_that_misreport
from memsize.records.aggregates import stored_dtypes, totals
from memsize.records.comparison import Change, Comparison, stored_as
from memsize.records.finding import Finding
from memsize.records.trace import Trace
from memsize.units import Bytes

_FLOATING = ("float64", "float32", "float16", "bfloat16")


def compare_traces(before: Trace, after: Trace) -> Comparison:
    """The comparison of two traces of models with the same tensor names, or some of them."""
    pairs = tuple(_paired(before, after))
    found = (*_summary(before, after), *_changed(pairs), *_unchanged(pairs), *_gone(pairs))
    evidence = Evidence(given=after)
    return Comparison(before, after, pairs, (*found, *mixed_dtypes(evidence), *wrappers_that_misreport(evidence)))


def _paired(before: Trace, after: Trace) -> Iterator[Change]:
    first, second = ({tensor.name: tensor for tensor in trace.tensors} for trace in (before, after))
    # A packed module holds its weight under another name than the module it was converted from.
    for name in dict.fromkeys([*first, *second]):
        yield Change(name, first.get(name), second.get(name))


def _summary(before: Trace, after: Trace) -> Iterator[Finding]:
    first, second = totals(before), totals(after)
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
    kept = (first.saved_bytes, second.saved_bytes)
    if all(kept) and kept[0] != kept[1]:
        yield Finding(
            "kept-for-backward-changed",
            kept[1] - kept[0],
            (),
            "What is kept for backward went from {before} to {after}.",
            {"before": Bytes(kept[0]), "after": Bytes(kept[1])},
        )


def _changed(pairs: tuple[Change, ...]) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Change]] = {}
    for pair in pairs:
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


def _unchanged(pairs: tuple[Change, ...]) -> Iterator[Finding]:
    same = [pair for pair in pairs if pair.same and pair.before and pair.before.bytes]
    if not same:
        return
    groups: dict[str, list[Change]] = {}
    for pair in same:
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


def _gone(pairs: tuple[Change, ...]) -> Iterator[Finding]:
    for code, text, members in (
        ("tensors-removed", "Only before: {names} ({bytes}).", [p for p in pairs if p.after is None]),
        ("tensors-added", "Only after: {names} ({bytes}).", [p for p in pairs if p.before is None]),
    ):
        if members:
            size = sum(abs(pair.bytes) for pair in members)
            names = tuple(pair.name for pair in members)
            yield Finding(code, size, _layers(members), text, {"names": names, "bytes": Bytes(size)})


def _layers(pairs: list[Change]) -> tuple[str, ...]:
    tensors = [pair.after or pair.before for pair in pairs]
    return tuple(dict.fromkeys(tensor.layer for tensor in tensors if tensor))
