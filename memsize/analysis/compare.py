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
from memsize.records.finding import Finding, Rules
from memsize.records.trace import Trace
from memsize.units import Bytes, signed_share

_FLOATING = ("float64", "float32", "float16", "bfloat16")
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
def what_is_stored(models: Models) -> Iterator[Finding]:
    """The bytes that both models store in total."""
    first, second = totals(models.before), totals(models.after)
    same = first.stored == second.stored
    text = (
        "What is stored did not change: {before}."
        if same
        else "What is stored went from {before} to {after} ({share})."
    )
    yield Finding(
        "stored-unchanged" if same else "stored-changed",
        text,
        _went(first.stored, second.stored),
        bytes=second.stored - first.stored,
    )


@RULES.rule("kept-for-backward-changed")
def what_is_kept(models: Models) -> Iterator[Finding]:
    """The bytes that both models keep for backward, if both were run."""
    saved = (totals(models.before).saved_bytes, totals(models.after).saved_bytes)
    if all(saved) and saved[0] != saved[1]:
        yield Finding(
            "kept-for-backward-changed",
            "What is kept for backward went from {before} to {after} ({share}).",
            _went(*saved),
            bytes=saved[1] - saved[0],
        )


@RULES.rule("peak-changed")
def peaks(models: Models) -> Iterator[Finding]:
    """The largest change of what the allocator needs at the peak: of training where there is one, else of inference."""
    changed = [figure for figure in models.figures if figure.name == "allocated" and figure.before and figure.after]
    of = "training peak" if any(figure.of == "training peak" for figure in changed) else "inference peak"
    moved = [
        (figure.after - figure.before, figure)
        for figure in changed
        if figure.of == of and figure.before and figure.after
    ]
    change, figure = max(moved, key=lambda figure: abs(figure[0]), default=(0, None))
    if figure is not None and change:
        yield Finding(
            "peak-changed",
            f"The {of} of {{scenario}} went from {{before}} to {{after}} ({{share}}).",
            {"scenario": figure.scenario, **_went(figure.before or 0, figure.after or 0)},
            bytes=change,
        )


@RULES.rule("tensors-resized")
def resized(models: Models) -> Iterator[Finding]:
    """Tensors that have another shape in the second model."""
    members = [pair for pair in models.pairs if pair.resized]
    if members:
        yield Finding(
            "tensors-resized",
            "{count} of the tensors changed shape, {before} → {after}: {layers}.",
            {"count": len(members), **_sizes(members)},
            bytes=sum(pair.bytes for pair in members),
            layers=_layers(members),
        )


@RULES.rule("tensors-changed")
def changed(models: Models) -> Iterator[Finding]:
    """Tensors that the second model stores differently, grouped by how they were and are stored."""
    groups: dict[tuple[str, str], list[Change]] = {}
    for pair in models.pairs:
        if pair.before and pair.after and not (pair.same or pair.resized):
            groups.setdefault((stored_as(pair.before), stored_as(pair.after)), []).append(pair)
    for (old, new), members in groups.items():
        yield Finding(
            "tensors-changed",
            "{count} of the tensors went from {old} to {new}, {before} → {after}: {layers}.",
            {"count": len(members), "old": old, "new": new, **_sizes(members)},
            bytes=sum(pair.bytes for pair in members),
            layers=_layers(members),
        )


@RULES.rule("tensors-unchanged")
def unchanged(models: Models) -> Iterator[Finding]:
    """Tensors that a conversion left as they were, grouped by the likely cause."""
    groups: dict[str, list[Change]] = {}
    for pair in models.pairs if models.converted else ():
        if pair.same and pair.before and pair.before.bytes:
            groups.setdefault(_cause(pair), []).append(pair)
    for cause, members in groups.items():
        yield Finding(
            "tensors-unchanged",
            f"{{count}} did not change ({{bytes}} as {{dtypes}}): {cause}. {{layers}}.",
            {
                "count": len(members),
                "bytes": Bytes(sum(pair.before.bytes for pair in members if pair.before)),
                "dtypes": stored_dtypes(pair.before for pair in members if pair.before),
                "layers": _layers(members),
            },
            bytes=sum(pair.before.bytes for pair in members if pair.before),
            layers=_layers(members),
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
            yield Finding(code, text, {"names": names, "bytes": Bytes(size)}, bytes=size, layers=_layers(members))


@RULES.rule("mixed-dtypes", "batch-norm-kept-fp32", "wrapper-misreports")
def odd_afterwards(models: Models) -> Iterator[Finding]:
    """The findings of a report on the dtypes of a converted model."""
    if models.converted:
        evidence = Evidence(as_given=models.after)
        yield from mixed_dtypes(evidence)
        yield from wrappers_that_misreport(evidence)


def _went(before: int, after: int) -> dict[str, object]:
    return {"before": Bytes(before), "after": Bytes(after), "share": signed_share(before, after)}


def _sizes(pairs: list[Change]) -> dict[str, object]:
    return {
        "before": Bytes(sum(pair.before.bytes for pair in pairs if pair.before)),
        "after": Bytes(sum(pair.after.bytes for pair in pairs if pair.after)),
        "layers": _layers(pairs),
    }


def _layers(pairs: list[Change]) -> tuple[str, ...]:
    return layers_of(tensor for pair in pairs if (tensor := pair.after or pair.before))
