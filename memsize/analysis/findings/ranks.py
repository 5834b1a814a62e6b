"""Rules about several ranks of one program: whether all fit, which needs most, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memsize.analysis.findings.program import eagerly, peak_in_words, request_in_words
from memsize.records.finding import Finding, Rules
from memsize.records.ranks import RankRuns, spans
from memsize.records.roles import noun
from memsize.units import Bytes

RULES: Final = Rules[RankRuns]()


@RULES.rule("ranks-failed")
def _failed(runs: RankRuns) -> Iterator[Finding]:
    for group in runs.groups:
        if group.run.failure is not None and not group.run.ran_out:
            template = "{ranks} failed: {failure}. --rank {first} shows where."
            values = {"ranks": _first(runs.named(group)), "failure": group.run.failure, "first": group.ran[0]}
            yield Finding("ranks-failed", template, values)


@RULES.rule("ranks-out-of-memory")
def _refused(runs: RankRuns) -> Iterator[Finding]:
    for group in runs.groups:
        if group.run.refused:
            first = group.run.refused[0]
            template = (
                "{card} is too small"
                + eagerly(group.run)
                + " for {ranks} of {size}: at {line}, in {where}, {op} asks for "
                "{bytes} where {free} are left"
            ) + ("." if group.run.went_on is None else "; the program goes on.")
            values = {
                "card": group.run.card.name,
                "ranks": runs.named(group),
                "size": runs.size,
                **request_in_words(first),
            }
            yield Finding("ranks-out-of-memory", template, values, bytes=first.bytes)


@RULES.rule("ranks-fit")
def _fit(runs: RankRuns) -> Iterator[Finding]:
    group = runs.worst
    run, peak = group.run, group.run.peak
    if run.refused or not run.trace.events or any(other.run.failure for other in runs.groups):
        return
    most = "{ranks} needs most," if len(runs.neediest) == 1 else "{ranks} need most,"
    template = "All {size} {noun} fit on {card}: " + ("each takes" if len(runs.neediest) == runs.size else most)
    template += " {low} to {high} of {total} at the peak, in {where}."
    values = {
        "size": runs.size,
        "noun": f"{runs.noun}s",
        "card": run.card.name,
        "ranks": runs.counted(runs.neediest),
        **peak_in_words(run),
    }
    layers = (peak.peak_layer,) if peak.peak_layer else ()
    yield Finding("ranks-fit", template, values, bytes=peak.device.high, layers=layers)


@RULES.rule("ranks-differ")
def _differ(runs: RankRuns) -> Iterator[Finding]:
    most, least = runs.worst, runs.least
    if any(group.run.refused or group.run.failure for group in runs.groups):
        return
    difference = most.run.peak.requested - least.run.peak.requested
    if difference <= 0:
        return
    sizes = {role: most.run.peak.roles.get(role, 0) - least.run.peak.roles.get(role, 0) for role in most.run.peak.roles}
    role = max(sizes, key=sizes.__getitem__)
    template = "{least} hold{s} {bytes} less of tensors at the peak, {part} of it {role}."
    values = {
        "least": _first(runs.named(least)),
        "s": "" if len(least.ranks) > 1 else "s",
        "bytes": Bytes(difference),
        "part": Bytes(sizes[role]),
        "role": noun(role),
    }
    yield Finding("ranks-differ", template, values, bytes=difference)


@RULES.rule("ranks-between")
def _between(runs: RankRuns) -> Iterator[Finding]:
    ran = [rank for group in runs.groups for rank in group.ran]
    if len(ran) < runs.size:
        template = (
            "{count} of {size} {noun} were run: {ran}. Each of the others lies between two that hold the same, and "
            "shards never grow from one {one} to the next."
        )
        values = {"count": len(ran), "size": runs.size, "noun": f"{runs.noun}s", "one": runs.noun, "ran": spans(ran)}
        yield Finding("ranks-between", template, values, brief="{count} of {size} {noun} were run: {ran}.")


def _first(text: str) -> str:
    """With a capital, as a sentence begins."""
    return text[0].upper() + text[1:]
