"""Two models side by side: what changed in what they store and need, what did not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memsize.analysis.differences import (
    Side,
    figure_changes,
    layer_changes,
    living_changes,
    new_findings,
    paired_tensors,
)
from memsize.analysis.findings.evidence import Evidence, layers_of
from memsize.analysis.findings.precision import mixed_dtypes, wrappers_that_misreport
from memsize.analysis.matching import matched
from memsize.records.aggregates import stored_dtypes, totals
from memsize.records.comparison import Change, Comparison, FigureChange, stored_as
from memsize.records.dtypes import is_float
from memsize.records.finding import Finding, Rules
from memsize.records.trace import Trace
from memsize.units import Bytes, signed_share

_STRUCTURAL = {"added", "removed", "resized"}
"""Changes of a layer that no conversion makes."""


class Models(NamedTuple):
    """The evidence of the rules: the traces of two models, their tensors side by side, and their figures.

    `converted` says that the second has the layers of the first: what differs is how they are stored.
    """

    before: Trace
    after: Trace
    pairs: tuple[Change, ...]
    figures: tuple[FigureChange, ...] = ()
    converted: bool = True


RULES = Rules[Models]()


def compare_sides(before: Side, after: Side) -> Comparison:
    """The comparison of all that is known of two models or files. Layers are paired by `memsize.analysis.matching`."""
    layers = matched(before.trace, after.trace)
    pairs = paired_tensors(before.trace, after.trace, layers)
    changes, figures = layer_changes(layers), figure_changes(before, after)
    peak, living = living_changes(before, after, layers)
    converted = not (before.file or after.file or any(_STRUCTURAL & {*change.how} for change in changes))
    appeared, gone = new_findings(before.findings, after.findings, layers)
    return Comparison(
        before=before.trace,
        after=after.trace,
        pairs=pairs,
        findings=RULES.findings(
            Models(before.trace, after=after.trace, pairs=pairs, figures=figures, converted=converted)
        ),
        names=(before.name, after.name),
        layer_changes=changes,
        figure_changes=figures,
        peak=peak,
        living=living,
        appeared=appeared,
        gone=gone,
        gpu=after.gpu or before.gpu,
        optimizer=after.optimizer or before.optimizer,
        notes=tuple(dict.fromkeys((*before.notes, *after.notes))),
    )


@RULES.rule("stored-changed", "stored-unchanged")
def _what_is_stored(models: Models) -> Iterator[Finding]:
    first, second = totals(models.before).stored, totals(models.after).stored
    code, text = "stored-changed", "Stored bytes: {before} → {after} ({share})."
    if first == second:
        code, text = "stored-unchanged", "Stored bytes did not change: {before}."
    yield Finding(code, text, _went(first, second), bytes=second - first)


@RULES.rule("kept-for-backward-changed")
def _what_is_kept(models: Models) -> Iterator[Finding]:
    first, second = totals(models.before).saved_bytes, totals(models.after).saved_bytes
    if first and second and first != second:
        text = "Bytes kept for backward: {before} → {after} ({share})."
        yield Finding("kept-for-backward-changed", text, _went(first, second), bytes=second - first)


@RULES.rule("peak-changed")
def _peaks(models: Models) -> Iterator[Finding]:
    moved = [
        (figure.of, figure.scenario, figure.before, figure.after)
        for figure in models.figures
        if figure.name == "allocated" and figure.before and figure.after
    ]
    trains = any(of == "training peak" for of, *_ in moved)
    of_interest = [peak for peak in moved if not trains or peak[0] == "training peak"]
    most = max(of_interest, key=lambda peak: abs(peak[3] - peak[2]), default=None)
    if most is not None and most[2] != most[3]:
        of, scenario, before, after = most
        text = f"Allocated at the {of} of {{scenario}}: {{before}} → {{after}} ({{share}})."
        yield Finding("peak-changed", text, {"scenario": scenario, **_went(before, after)}, bytes=after - before)


@RULES.rule("tensors-resized")
def _resized(models: Models) -> Iterator[Finding]:
    members = [pair for pair in models.pairs if pair.resized]
    if members:
        text = "{count} of the tensors changed shape, {before} → {after}: {layers}."
        yield _about("tensors-resized", text, members)


@RULES.rule("tensors-changed")
def _changed(models: Models) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Change]] = {}
    for pair in models.pairs:
        if pair.before and pair.after and not (pair.same or pair.resized):
            groups.setdefault((stored_as(pair.before), stored_as(pair.after)), []).append(pair)
    for (old, new), members in groups.items():
        text = "{count} of the tensors changed from {old} to {new}, {before} → {after}: {layers}."
        yield _about("tensors-changed", text, members, old=old, new=new)


@RULES.rule("tensors-unchanged")
def _unchanged(models: Models) -> Iterator[Finding]:
    groups: dict[str, list[Change]] = {}
    for pair in models.pairs if models.converted else ():
        if pair.same and pair.before and pair.before.bytes:
            cause = "nothing cast them (autocast never does, and a recipe may skip their layers)"
            if pair.before.kind == "attribute":
                cause = "they are not registered, so no conversion sees them"
            elif not is_float(pair.before.spec.dtype):
                cause = "they are integers"
            groups.setdefault(cause, []).append(pair)
    for cause, members in groups.items():
        tensors = [pair.before for pair in members if pair.before]
        size = sum(tensor.bytes for tensor in tensors)
        yield Finding(
            "tensors-unchanged",
            f"{{count}} of the tensors did not change ({{bytes}} as {{dtypes}}) in {{layers}}: {cause}.",
            {
                "count": len(members),
                "bytes": Bytes(size),
                "dtypes": stored_dtypes(tensors),
                "layers": _layers(members),
            },
            bytes=size,
            layers=_layers(members),
        )


@RULES.rule("tensors-removed", "tensors-added")
def _in_one_only(models: Models) -> Iterator[Finding]:
    for code, text, members in (
        ("tensors-removed", "Removed: {names} ({bytes}).", [p for p in models.pairs if p.after is None]),
        ("tensors-added", "Added: {names} ({bytes}).", [p for p in models.pairs if p.before is None]),
    ):
        if members:
            size = sum(abs(pair.bytes) for pair in members)
            names = tuple(pair.name for pair in members)
            yield Finding(code, text, {"names": names, "bytes": Bytes(size)}, bytes=size, layers=_layers(members))


@RULES.rule("mixed-dtypes", "batch-norm-kept-fp32", "wrapper-misreports")
def _odd_afterwards(models: Models) -> Iterator[Finding]:
    if models.converted:
        evidence = Evidence(as_given=models.after)
        yield from mixed_dtypes(evidence)
        yield from wrappers_that_misreport(evidence)


def _went(before: int, after: int) -> dict[str, object]:
    return {"before": Bytes(before), "after": Bytes(after), "share": signed_share(before, after)}


def _about(code: str, text: str, pairs: list[Change], **values: object) -> Finding:
    sizes = {
        "before": Bytes(sum(pair.before.bytes for pair in pairs if pair.before)),
        "after": Bytes(sum(pair.after.bytes for pair in pairs if pair.after)),
    }
    layers = _layers(pairs)
    values = {"count": len(pairs), **values, **sizes, "layers": layers}
    return Finding(code, text, values, bytes=sum(pair.bytes for pair in pairs), layers=layers)


def _layers(pairs: list[Change]) -> tuple[str, ...]:
    return layers_of(tensor for pair in pairs if (tensor := pair.after or pair.before))
