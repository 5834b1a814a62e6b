"""Rules about precision: why a number did or did not shrink."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from memsize.analysis.findings.evidence import Crossover, Evidence, bytes_of, layers_of
from memsize.device.cards import card
from memsize.records.aggregates import attention_scores, stored_dtypes, totals
from memsize.records.dtypes import FLOATS
from memsize.records.finding import Finding, Rules, sizes
from memsize.records.trace import StoredTensor
from memsize.units import Bytes

RULES = Rules[Evidence]()
_NO_BFLOAT16 = "no fused kernel supports bfloat16 on this GPU"
SCORES_FROM = 0.1
"""The share of all that is kept for backward, or alive, from which attention scores are a finding."""


def no_fused_kernel(capability: tuple[int, int], dtypes: Container[str]) -> str:
    """Why attention over tensors of these dtypes runs PyTorch's mathematical path; its kernels take bfloat16 from
    capability 8.0 on (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return _NO_BFLOAT16 if capability < (8, 0) and "bfloat16" in dtypes else "no fused kernel supports this call"


@RULES.rule("unfused-attention")
def unfused_attention(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.gpu:
        return
    capability, sizes_by_reason = card(evidence.gpu).capability, dict[str, dict[str, int]]()
    for name, trace in evidence.runs.items():
        if name in evidence.hidden:
            continue
        size, dtypes = attention_scores(trace, lambda _, storage: storage.saved_by >= 0)
        if size > SCORES_FROM * totals(trace).saved_bytes:
            sizes_by_reason.setdefault(no_fused_kernel(capability, dtypes), {})[name] = size
    yield from attention_findings("kept for backward", sizes_by_reason)


def attention_findings(when: str, sizes_by_reason: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    """Name the scenarios with attention scores: for each reason their bytes by scenario; `when` says which bytes."""
    for reason, by_scenario in sizes_by_reason.items():
        names, size = tuple(by_scenario), max(by_scenario.values())
        text = "Under {names}, {size}" if len(names) == 1 else "Under {names}, up to {size}"
        text += f" {when} are attention scores: {reason}" + ("; float16 has one." if reason == _NO_BFLOAT16 else ".")
        yield Finding("unfused-attention", text, {"names": names, "size": Bytes(size)}, bytes=size, brief=text)


@RULES.rule("mixed-dtypes", "batch-norm-kept-fp32")
def mixed_dtypes(evidence: Evidence) -> Iterator[Finding]:
    floats: dict[str, list[StoredTensor]] = {}
    for tensor in evidence.parameters:
        if tensor.spec.dtype in FLOATS and not tensor.parts and tensor.layer not in evidence.adapters:
            floats.setdefault(tensor.spec.dtype, []).append(tensor)
    if len(floats) < 2:
        return
    widest = max(floats, key=FLOATS.index)
    layers = layers_of(floats[widest])
    types = {layer.path: layer.type for layer in evidence.as_given.layers}
    shares = ", ".join(f"{dtype} {{{dtype}}}" for dtype in floats)
    code, brief = "mixed-dtypes", f"Only part of the model was converted: {shares}."
    text = f"{brief} Still {widest}: {{layers}}."
    if all("BatchNorm" in types.get(layer, "") for layer in layers):
        code, brief = "batch-norm-kept-fp32", f"Batch norms were kept in {widest}: {shares}."
        text = f"Batch norms were kept in {widest}, as apex O2 and good practice do: {shares}. They are {{layers}}."
    values = {"layers": layers} | {dtype: Bytes(bytes_of(tensors)) for dtype, tensors in floats.items()}
    yield Finding(code, text, values, bytes=bytes_of(floats[widest]), layers=layers, brief=brief)


@RULES.rule("wrapper-misreports", severity="warning")
def wrappers_that_misreport(evidence: Evidence) -> Iterator[Finding]:
    wrong = [t for t in evidence.parameters if t.parts and t.bytes and t.bytes != t.reported_bytes]
    if not wrong:
        return
    stored, layers = bytes_of(wrong), layers_of(wrong)
    values: dict[str, object] = {"names": tuple(dict.fromkeys(tensor.wrapper or tensor.kind for tensor in wrong))}
    values |= sizes(stored=stored) | {"dtypes": tuple(stored_dtypes(wrong))}
    values |= sizes(said=sum(tensor.reported_bytes for tensor in wrong)) | {"layers": layers}
    brief = "{names} store {stored}, as {dtypes}, while PyTorch reports {said}."
    text = f"{brief} In {{layers}}, a summary reads the dtype that the wrapper reports, not the one that it stores."
    yield Finding("wrapper-misreports", text, values, bytes=stored, layers=layers, brief=brief)


@RULES.rule("summary-assumes-4-bytes")
def summary_assumes_four_bytes(evidence: Evidence) -> Iterator[Finding]:
    stored = evidence.stored
    if not stored.parameters:
        return
    texts = [f"{r.tool} reports {r.parameter_bytes / 1e6:,.2f} MB for the model as it is" for r in evidence.readings]
    values: dict[str, object] = {
        "bytes": Bytes(stored.parameter_bytes),
        "parameters": stored.parameters,
        "printed": f"{stored.parameters * 4 / 2**20:.2f}",  # torchsummary's own "%0.2f"
        "others": f"; {' and '.join(texts)}, in units of 10^6 bytes" if texts else "",
    }
    size = stored.parameter_bytes
    if size != stored.parameters * 4:
        values |= {"each": f"{size / stored.parameters:.3g}"}
        brief = "The parameters take {each} bytes each, {bytes} in all; a summary that prints {printed} MB"
    else:
        half = next((t for name in ("fp16", "bf16", "apex-O3") if (t := evidence.totals(name))), None)
        if half is None or half.parameter_bytes >= size or values["printed"] == "0.00":
            return
        values |= {"half": Bytes(half.parameter_bytes)}
        change = "halves" if half.parameter_bytes * 2 == size else "shrinks"
        brief = f"Casting to fp16 or bf16 {change} the parameters, {{bytes}} → {{half}}; a summary that still prints "
        brief += "{printed} MB"
        size -= half.parameter_bytes
    brief += " assumes 4 bytes per parameter."
    counts = "torchsummary counts 4 bytes for each of the {parameters} parameters, whatever their dtype{others}."
    text = f"{brief} {counts}"
    yield Finding("summary-assumes-4-bytes", text, values, bytes=size, brief=brief)


@RULES.rule("amp-keeps-fp32-parameters", "amp-crossover")
def amp_keeps_fp32_parameters(evidence: Evidence) -> Iterator[Finding]:
    amp, crossing = evidence.amp, evidence.crossover
    totals = evidence.totals(amp) if amp else None
    if amp is None or totals is None or not totals.parameter_bytes:
        return
    if evidence.spread and evidence.spread.shards_parameters:  # which trains by FSDP's mixed precision, not autocast
        return
    if crossing is not None and not (crossing.first or crossing.second):
        crossing = None  # nothing is kept for backward: all of the model is frozen
    pays = ""
    if crossing is not None and crossing.batch is None:
        pays = " With this input autocast needs more memory than float32 at every batch size."
    elif crossing is not None and crossing.batch != 1:
        pays = " Autocast needs less memory than float32 at batch sizes of {batch} and above."
    brief = f"Autocast leaves the parameters in float32 ({{bytes}}) and adds {{cast}} of {{dtype}} copies.{pays}"
    yield Finding(
        "amp-keeps-fp32-parameters",
        f"{brief} Gradients and optimizer state stay in float32 too.",
        sizes(bytes=totals.parameter_bytes, cast=totals.cast_bytes)
        | {"dtype": amp.removeprefix("amp-"), "batch": crossing and crossing.batch},
        bytes=totals.cast_bytes,
        layers=tuple(layer.path for layer in evidence.runs[amp].layers if layer.cast_bytes),
        brief=brief,
    )
    if crossing is not None:
        yield _amp_crossover(crossing)


def _amp_crossover(crossing: Crossover) -> Finding:
    values: dict[str, object] = {"start": crossing.start}
    values |= sizes(fp32=crossing.first, amp=crossing.second)
    values |= sizes(fp32_sample=crossing.first_per_sample, amp_sample=crossing.second_per_sample)
    values |= {"batch": crossing.batch, "before": (crossing.batch or 1) - 1}
    text = "autocast keeps more than float32 up to batch {before} and less at batch {batch} and above"
    if crossing.batch is None:
        text = "autocast keeps more than float32 at every batch size"
    elif crossing.batch == 1:
        text = "autocast keeps less than float32 at every batch size"
    text += ": at batch {start} autocast keeps {amp} for backward, float32 {fp32}"
    text += ", and each further sample adds {amp_sample} instead of {fp32_sample}" if crossing.batch is None else ""
    return Finding("amp-crossover", f"With this input {text}.", values, bytes=crossing.second - crossing.first)


@RULES.rule("activations-dominate", "parameters-dominate")
def what_binds_the_batch(evidence: Evidence) -> Iterator[Finding]:
    crossing, stored = evidence.crossover, evidence.totals("fp32")
    if crossing is None or stored is None or not stored.parameter_bytes or crossing.first_per_sample <= 0:
        return
    per_sample, parameters = crossing.first_per_sample, stored.parameter_bytes
    values = sizes(sample=per_sample, parameters=parameters, half=parameters // 2)
    values |= {"batch": -(-parameters // per_sample), "gain": parameters // 2 // per_sample}
    if parameters // 2 < per_sample:
        code = "activations-dominate"
        brief = "Activations limit the batch size: each sample keeps {sample} in float32."
        text = f"{brief} Halving the {{parameters}} of parameters frees {{half}}, less than one more sample needs."
    else:
        code = "parameters-dominate"
        brief = "Each sample keeps {sample} in float32: activations overtake parameters at batch {batch}."
        text = f"{brief} Halving the {{parameters}} of parameters makes room for {{gain}} more samples."
    yield Finding(code, text, values, bytes=per_sample, brief=brief)
