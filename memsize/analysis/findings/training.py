"""Rules about a training step: where its peak is, what could lower it, and what several GPUs add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from memsize.analysis.findings.evidence import Evidence, bytes_of
from memsize.analysis.findings.unfinished_runs import moment, out_of_memory
from memsize.records.aggregates import summit
from memsize.records.finding import Finding, Moment, Rules, optimizer_in_words, sizes
from memsize.records.roles import FIXED, PER_PARAMETER, Role, noun
from memsize.units import Bytes

RULES = Rules[Evidence]()


@RULES.rule("out-of-memory")
def does_not_fit(evidence: Evidence) -> Iterator[Finding]:
    for run, peaks in (("training", evidence.peaks), ("inference", evidence.inference)):
        short = {name: peak.shortage for name, peak in peaks.items() if peak.shortage}
        for name, shortage in list(short.items())[:1]:
            others = f" (and under {more} other scenario{'s' if more > 1 else ''})" if (more := len(short) - 1) else ""
            shown = name if run == "training" and not evidence.spread else None
            yield out_of_memory(shortage, what=f"{run} under {name}{others}", gpu=evidence.gpu, scenario=shown)


@RULES.rule("training-peak", "adapters-leave-activations")
def training_peak(evidence: Evidence) -> Iterator[Finding]:
    name = next((name for name in ("as-given", "fp32", *evidence.peaks) if name in evidence.peaks), None)
    if name is None:
        return
    peak = evidence.peaks[name]
    best = min(evidence.peaks, key=lambda other: (evidence.peaks[other].requested, other != name))
    least = evidence.peaks[best].requested
    lowest = " {best} peaks lowest, at {least}." if (peak.requested - least) * 1000 > peak.requested else ""
    largest = [(role, size) for role, size in peak.roles.items() if size * 20 >= peak.requested][:4]
    spread = evidence.spread
    how, among = (" and {parallel}", " on one of {gpus} GPUs") if spread else ("", "")
    shares = ", ".join(f"{noun(role)} {{r{number}}}" for number, (role, _) in enumerate(largest))
    states, constant = (sum(peak.roles.get(role, 0) for role in roles) for roles in (PER_PARAMETER, FIXED))
    values: dict[str, object] = {"optimizer": optimizer_in_words(evidence.optimizer), "name": name}
    values |= sizes(requested=peak.requested) | {"where": moment(peak.peak_phase, peak.peak_layer)}
    values |= sizes(states=states, constant=constant)
    values |= {"main": noun(max(FIXED, key=lambda role: (peak.roles.get(role, 0), role)))}
    values |= sizes(temporary=peak.roles.get("temporary"), low=peak.device.low, high=peak.device.high)
    values |= {"gpu": evidence.gpu} | sizes(total=evidence.gpu_bytes) | {"best": best} | sizes(least=least)
    values |= {"parallel": str(spread), "gpus": spread.size} if spread else {}
    values |= sizes(**{f"r{number}": size for number, (_, size) in enumerate(largest)})
    advice = "Most of it grows with the batch size."
    if peak.peak_phase == "optimizer":
        advice = "The update's temporaries take {temporary} of it at any batch size; a fused optimizer has none."
    elif states * 2 > peak.requested:
        advice = "Parameters, gradients and optimizer state take {states} of it at any batch size."
    elif constant * 2 > peak.requested:
        advice = "{constant} of it is independent of the batch size, mostly {main}."
    peaks = "peaks" if peak.shortage else "fits on {gpu}: it peaks"  # `out-of-memory` tells of a shortage
    brief = f"A training step with {{optimizer}}{how} in {{name}} {peaks} at {{requested}}{among}, "
    brief += f"in the {{where}}.{lowest}"
    yield Finding(
        "training-peak",
        f"{brief} The peak is mostly {shares}. {advice}",
        values,
        bytes=peak.requested,
        layers=(peak.peak_layer,) if peak.peak_layer else (),
        brief=brief,
        moment=Moment(name, summit(evidence.runs[name])) if name in evidence.runs and not evidence.spread else None,
    )
    yield from activations_stay(peak.roles, evidence.stored.frozen, "adapters-leave-activations")


_FROZEN: Final = 0.9
"""From this share of frozen parameters on, little is left to save by freezing."""


def activations_stay(roles: Mapping[Role, int], frozen: float, code: str) -> Iterator[Finding]:
    """Say that most of a peak grows with the batch although few parameters are trained (peft#2196)."""
    total, grows = sum(roles.values()), sum(size for role, size in roles.items() if role not in FIXED)
    if frozen < _FROZEN or grows * 4 < total * 3:
        return
    text = (
        "Only {trained} % of the parameters are trained, so gradients and optimizer state are {states}; but {share} % "
        "of the peak, {grows}, grows with the batch, and adapters do not change it. Activation checkpointing, a "
        "shorter input or a smaller batch does."
    )
    states = sum(roles.get(role, 0) for role in ("gradient", "optimizer state", "master weight"))
    values: dict[str, object] = {"trained": f"{100 * (1 - frozen):.2g}", "share": round(100 * grows / total)}
    yield Finding(code, text, values | sizes(states=states, grows=grows), bytes=grows, brief=text)


@RULES.rule("no-training-step")
def _not_trained(evidence: Evidence) -> Iterator[Finding]:
    if evidence.untrained and not evidence.peaks:
        reason = next(iter(evidence.untrained.values()))
        text = "There is no training step to show: {reason}."
        yield Finding("no-training-step", text, {"reason": reason}, brief=text)


@RULES.rule("data-parallel-replicas")
def data_parallel(evidence: Evidence) -> Iterator[Finding]:
    paths = tuple(layer.path for layer in evidence.as_given.layers if layer.type == "DataParallel")
    if not paths:
        return
    registered = [tensor for tensor in evidence.as_given.tensors if tensor.kind in ("parameter", "buffer")]
    below = "" if "" in paths else tuple(f"{path}." for path in paths)
    copied = bytes_of(tensor for tensor in registered if tensor.name.startswith(below))
    yield Finding(
        "data-parallel-replicas",
        "The figures are for one GPU; --train adamw --parallel dp=4 simulates four. On n GPUs, DataParallel gives each "
        "1/n of the batch, and so of the {saved} kept for backward. Every GPU but the first also holds a copy of the "
        "{copied} of parameters and buffers during forward and backward; only the first holds the whole input and "
        "output, the summed gradients and the optimizer state.",
        sizes(saved=evidence.stored.saved_bytes, copied=copied),
        bytes=copied,
        layers=paths,
    )


@RULES.rule("gradient-buckets")
def distributed(evidence: Evidence) -> Iterator[Finding]:
    if evidence.buckets is None:
        return
    size, views = evidence.buckets
    on_top = "gradient buckets take another {size} (gradient_as_bucket_view=True makes the gradients views of them)"
    if views:
        on_top = "its gradients are views of {size} of buckets, which are never freed"
    text = f"The figures are those of one process of DistributedDataParallel with its own batch: {on_top}."
    yield Finding("gradient-buckets", text, {"size": Bytes(size)}, bytes=size)
