"""Rules about several ranks of a program: whether all fit, which needs most, how they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memsize.analysis.findings.program import eagerly, peak_in_words, request_in_words
from memsize.records.finding import Finding, Rules, sizes
from memsize.records.ranks import RankRuns, spans
from memsize.records.roles import noun

RANK_RULES: Final = Rules[RankRuns]()


@RANK_RULES.rule("ranks-failed")
def _ranks_failed(runs: RankRuns) -> Iterator[Finding]:
    for group in runs.groups:
        if group.run.failure is not None and not group.run.ran_out:
            template = "{ranks} failed: {failure}. --rank {first} shows where."
            values = {"ranks": _first(runs.named(group)), "failure": group.run.failure, "first": group.ran[0]}
            yield Finding("ranks-failed", template, values)


@RANK_RULES.rule("ranks-out-of-memory")
def _ranks_refused(runs: RankRuns) -> Iterator[Finding]:
    for group in runs.groups:
        if group.run.refused:
            first = group.run.refused[0]
            ends = "." if group.run.went_on is None else "; the script goes on."
            template = f"Out of memory on {{card}}{eagerly(group.run)} for {{ranks}} of {{size}} at {{line}}, in "
            template += f"{{where}}: {{op}} needs {{bytes}}, {{free}} is left{ends}"
            values: dict[str, object] = {"card": group.run.card.name, "ranks": runs.named(group), "size": runs.size}
            values |= request_in_words(group.run, first)
            yield Finding("ranks-out-of-memory", template, values, bytes=first.bytes)


@RANK_RULES.rule("ranks-fit")
def _ranks_fit(runs: RankRuns) -> Iterator[Finding]:
    run, peak = runs.worst.run, runs.worst.run.peak
    if run.refused or not run.trace.events or any(other.run.failure for other in runs.groups):
        return
    most = "{ranks} needs the most," if len(runs.neediest) == 1 else "{ranks} need the most,"
    template = "{all} {noun} fit on {card}: " + ("each takes" if len(runs.neediest) == runs.size else most)
    template += " {low} to {high} of {total} at the peak, in {where}."
    values: dict[str, object] = {
        "all": "Both" if runs.size == 2 else f"All {runs.size}",
        "noun": f"{runs.noun}s",
        "card": run.card.name,
    }
    values |= {"ranks": runs.counted(runs.neediest)} | peak_in_words(run)
    yield Finding(
        "ranks-fit", template, values, bytes=peak.device.high, layers=(peak.peak_layer,) if peak.peak_layer else ()
    )


@RANK_RULES.rule("ranks-differ")
def _ranks_differ(runs: RankRuns) -> Iterator[Finding]:
    most, least = runs.worst.run.peak, runs.least.run.peak
    difference = most.requested - least.requested
    if difference <= 0 or any(group.run.refused or group.run.failure for group in runs.groups):
        return
    by_role = {role: size - least.roles.get(role, 0) for role, size in most.roles.items()}
    role = max(by_role, key=by_role.__getitem__)
    values: dict[str, object] = {"least": _first(runs.named(runs.least)), "s": "" if len(runs.least.ranks) > 1 else "s"}
    values |= sizes(bytes=difference, part=by_role[role]) | {"role": noun(role)}
    template = "{least} hold{s} {bytes} less in tensors at the peak, {part} of it {role}."
    yield Finding("ranks-differ", template, values, bytes=difference)


@RANK_RULES.rule("ranks-between")
def _ranks_between(runs: RankRuns) -> Iterator[Finding]:
    ran = [rank for group in runs.groups for rank in group.ran]
    if len(ran) < runs.size:
        template = (
            "{count} of {size} {noun} were run: {ran}. Every other {one} lies between two with equal figures, and "
            "shards never grow from one {one} to the next."
        )
        values = {"count": len(ran), "size": runs.size, "noun": f"{runs.noun}s", "one": runs.noun, "ran": spans(ran)}
        yield Finding("ranks-between", template, values, brief="{count} of {size} {noun} were run: {ran}.")


def _first(text: str) -> str:
    return text[0].upper() + text[1:]
