"""Rules about a training step: where its peak is, what could lower it, and what several GPUs add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from memsize.analysis.findings.evidence import Evidence, bytes_of
from memsize.analysis.findings.unfinished_runs import moment, out_of_memory
from memsize.records.aggregates import summit
from memsize.records.finding import Finding, Moment, Rules, join_names, optimizer_in_words, sizes
from memsize.records.gpu import GpuEstimate
from memsize.records.roles import FIXED, PER_PARAMETER, Role, noun
from memsize.units import Bytes

RULES = Rules[Evidence]()


@RULES.rule("out-of-memory", severity="error")
def does_not_fit(evidence: Evidence) -> Iterator[Finding]:
    for run, peaks in (("training", evidence.peaks), ("inference", evidence.inference)):
        short = {name: peak.shortage for name, peak in peaks.items() if peak.shortage}
        fitting = tuple(name for name in peaks if name not in short)
        for name, shortage in list(short.items())[:1]:
            shown = name if run == "training" and not evidence.spread else None
            what = f"{run} under {join_names(tuple(short))}"
            yield out_of_memory(shortage, what, gpu=evidence.gpu, scenario=shown, fitting=fitting)


@RULES.rule("training-peak", "adapters-leave-activations")
def training_peak(evidence: Evidence) -> Iterator[Finding]:
    name = _first(evidence.peaks)
    if name is None:
        return
    peak = evidence.peaks[name]
    spread = evidence.spread
    how, among = (" and {parallel}", " on one of {gpus} GPUs") if spread else ("", "")
    states, constant = (sum(peak.roles.get(role, 0) for role in roles) for roles in (PER_PARAMETER, FIXED))
    values: dict[str, object] = {"optimizer": optimizer_in_words(evidence.optimizer)}
    values |= sizes(states=states, constant=constant)
    values |= {"main": noun(max(FIXED, key=lambda role: (peak.roles.get(role, 0), role)))}
    values |= sizes(temporary=peak.roles.get("temporary"))
    values |= {"parallel": str(spread), "gpus": spread.size} if spread else {}
    advice = "Most of it grows with the batch size."
    if peak.peak_phase == "optimizer":
        advice = "The update's temporaries take {temporary} of it at any batch size; a fused optimizer has none."
    elif states * 2 > peak.requested:
        advice = "Parameters, gradients and optimizer state take {states} of it at any batch size."
    elif constant * 2 > peak.requested:
        advice = "{constant} of it is independent of the batch size, mostly {main}."
    about = Moment(name, summit(evidence.runs[name])) if name in evidence.runs and not spread else None
    what = f"A training step with {{optimizer}}{how}"
    yield _peak("training-peak", what, among, advice, evidence, evidence.peaks, values, about)
    yield from activations_stay(peak.roles, evidence.stored.frozen, "adapters-leave-activations")


@RULES.rule("inference-peak")
def inference_peak(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.peaks and not evidence.untrained and evidence.inference:
        yield _peak("inference-peak", "Inference", "", "", evidence, evidence.inference)


@RULES.rule("pipeline-phases")
def pipeline_phases(evidence: Evidence) -> Iterator[Finding]:
    """The peak of each phase of a pipeline's generation, and what offloading its parts would leave of the highest."""
    name = _first(evidence.inference)
    if name is None or not (phases := evidence.inference[name].phases):
        return
    peaks = [f"{{phase{number}}} {{peak{number}}}" for number, _ in enumerate(phases)]
    brief = f"Peak of each phase: {', '.join(peaks)}."
    highest = max(phases, key=lambda phase: phase.requested)
    advice = " During {highest} the weights of other parts take {others}: enable_model_cpu_offload() frees them."
    values: dict[str, object] = {f"phase{number}": phase.phase for number, phase in enumerate(phases)}
    values |= {"highest": highest.phase} | sizes(others=highest.other_weights)
    values |= sizes(**{f"peak{number}": phase.requested for number, phase in enumerate(phases)})
    if evidence.inference[name].shortage:
        brief = f"{brief}{advice} memsize fit tries that, and tiling and slicing in the autoencoder."
        advice = ""
    yield Finding("pipeline-phases", brief + advice, values, bytes=highest.requested, brief=brief)


def _first(peaks: Mapping[str, GpuEstimate]) -> str | None:
    return next((name for name in ("as-given", "fp32", *peaks) if name in peaks), None)


def _peak(
    code: str,
    what: str,
    among: str,
    advice: str,
    evidence: Evidence,
    peaks: Mapping[str, GpuEstimate],
    values: Mapping[str, object] = MappingProxyType({}),
    about: Moment | None = None,
) -> Finding:
    """Say where `what` peaks in the first scenario, in which it peaks lowest (to 0.1 %), and what most of it is."""
    name = _first(peaks)
    assert name is not None
    peak = peaks[name]
    least = min(other.requested for other in peaks.values())
    best = tuple(name for name, other in peaks.items() if (other.requested - least) * 1000 <= peak.requested)
    lowest = "" if name in best else f" {{best}} peak{'s' * (len(best) == 1)} lowest, at {{least}}."
    largest = [(role, size) for role, size in peak.roles.items() if size * 20 >= peak.requested][:4]
    shares = ", ".join(f"{noun(role)} {{r{number}}}" for number, (role, _) in enumerate(largest))
    brief = f"{what} in {{name}} fits on {{gpu}}: it peaks"
    if peak.shortage:  # `does_not_fit` says where it ends
        brief = f"With enough memory, {what[:1].lower()}{what[1:]} in {{name}} peaks"
    brief += f" at {{requested}}{among}, in the {{where}}.{lowest}"
    return Finding(
        code,
        f"{brief} The peak is mostly {shares}. {advice}".rstrip(),
        {**values, "name": name, "gpu": evidence.gpu, "best": best, "where": moment(peak.peak_phase, peak.peak_layer)}
        | sizes(requested=peak.requested, low=peak.device.low, high=peak.device.high, total=evidence.gpu_bytes)
        | sizes(least=least, **{f"r{number}": size for number, (_, size) in enumerate(largest)}),
        bytes=peak.requested,
        layers=(peak.peak_layer,) if peak.peak_layer else (),
        brief=brief,
        moment=about,
    )


_FROZEN: Final = 0.9
"""From this share of frozen parameters on, little is left to save by freezing."""


def activations_stay(roles: Mapping[Role, int], frozen: float, code: str) -> Iterator[Finding]:
    """Say that most of a peak grows with the batch although few parameters are trained (peft#2196)."""
    total, grows = sum(roles.values()), sum(size for role, size in roles.items() if role not in FIXED)
    if frozen < _FROZEN or grows * 4 < total * 3:
        return
    states = sum(roles.get(role, 0) for role in ("gradient", "optimizer state", "master weight"))
    saved = ", so gradients and optimizer state take {states};" if states else ","  # none before the first backward
    text = (
        f"Only {{trained}} % of the parameters are trained{saved} but {{share}} % "
        "of the peak ({grows}) grows with the batch, and adapters do not change that. Activation checkpointing, a "
        "shorter input or a smaller batch reduces it."
    )
    values: dict[str, object] = {"trained": f"{100 * (1 - frozen):.2g}", "share": round(100 * grows / total)}
    yield Finding(code, text, values | sizes(states=states, grows=grows), bytes=grows, brief=text)


@RULES.rule("no-training-step")
def _not_trained(evidence: Evidence) -> Iterator[Finding]:
    if evidence.untrained and not evidence.peaks:
        reason = next(iter(evidence.untrained.values()))
        text = "There is no training step to show: {reason}."
        yield Finding("no-training-step", text, {"reason": reason}, brief=text)


@RULES.rule("data-parallel-replicas", severity="warning")
def data_parallel(evidence: Evidence) -> Iterator[Finding]:
    paths = tuple(layer.path for layer in evidence.as_given.layers if layer.type == "DataParallel")
    if not paths:
        return
    registered = [tensor for tensor in evidence.as_given.tensors if tensor.kind in ("parameter", "buffer")]
    below = "" if "" in paths else tuple(f"{path}." for path in paths)
    copied = bytes_of(tensor for tensor in registered if tensor.name.startswith(below))
    yield Finding(
        "data-parallel-replicas",
        "The figures are for one GPU; --train adamw --parallel dp=4 simulates four. On n GPUs, each gets "
        "1/n of the batch and keeps 1/n of the {saved} for backward. Every GPU but the first also holds a copy of the "
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
