"""Rules about precision: why a number did or did not shrink."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.analysis.findings.evidence import Crossover, Evidence, bytes_of, layers_of
from memsize.records.aggregates import stored_dtypes
from memsize.records.finding import Finding, Rules
from memsize.records.trace import StoredTensor
from memsize.units import Bytes

RULES = Rules[Evidence]()

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@RULES.rule("mixed-dtypes", "batch-norm-kept-fp32")
def mixed_dtypes(evidence: Evidence) -> Iterator[Finding]:
    floats: dict[str, list[StoredTensor]] = {}
    for tensor in evidence.parameters:
        if tensor.spec.dtype in _FLOATS and not tensor.parts:
            floats.setdefault(tensor.spec.dtype, []).append(tensor)
    if len(floats) < 2:
        return
    widest = max(floats, key=_FLOATS.index)
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


@RULES.rule("wrapper-misreports")
def wrappers_that_misreport(evidence: Evidence) -> Iterator[Finding]:
    wrong = [t for t in evidence.parameters if t.parts and t.bytes and t.bytes != t.reported_bytes]
    if not wrong:
        return
    yield Finding(
        "wrapper-misreports",
        "{names} in {layers} store {stored}, as {dtypes}, while PyTorch reports {said}. A summary reads the dtype "
        "that the wrapper reports, not the one that it stores.",
        {
            "names": tuple(dict.fromkeys(tensor.wrapper or tensor.kind for tensor in wrong)),
            "stored": Bytes(bytes_of(wrong)),
            "dtypes": tuple(stored_dtypes(wrong)),
            "said": Bytes(sum(tensor.reported_bytes for tensor in wrong)),
            "layers": layers_of(wrong),
        },
        bytes=bytes_of(wrong),
        layers=layers_of(wrong),
        brief="{names} store {stored}, as {dtypes}, while PyTorch reports {said}.",
    )


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
    if stored.parameter_bytes != stored.parameters * 4:
        yield Finding(
            "summary-assumes-4-bytes",
            "The parameters take {each} bytes each, {bytes} in all. A summary that prints {printed} "
            "MB assumes 4 bytes for each of the {parameters} parameters, whatever their dtype, as torchsummary "
            "does{others}.",
            values | {"each": f"{stored.parameter_bytes / stored.parameters:.3g}"},
            bytes=stored.parameter_bytes,
            brief="The parameters take {each} bytes each, {bytes} in all; a summary that prints {printed} MB assumes 4 "
            "bytes per parameter.",
        )
        return
    half = next((t for name in ("fp16", "bf16", "apex-O3") if (t := evidence.totals(name))), None)
    if half is None or half.parameter_bytes >= stored.parameter_bytes:
        return
    halved = half.parameter_bytes * 2 == stored.parameter_bytes
    yield Finding(
        "summary-assumes-4-bytes",
        "Casting to fp16 or bf16 shrinks the parameters, {bytes} → {half}. A summary that still prints "
        "{printed} MB afterwards assumes 4 bytes for each of the {parameters} parameters, whatever their dtype, "
        "as torchsummary does{others}.",
        values | {"half": Bytes(half.parameter_bytes)},
        bytes=stored.parameter_bytes - half.parameter_bytes,
        brief=f"Casting to fp16 or bf16 {'halves' if halved else 'shrinks'} the parameters, {{bytes}} → {{half}}; a "
        "summary that still prints {printed} MB assumes 4 bytes per parameter.",
    )


@RULES.rule("amp-keeps-fp32-parameters", "amp-crossover")
def amp_keeps_fp32_parameters(evidence: Evidence) -> Iterator[Finding]:
    amp, crossing = evidence.amp, evidence.crossover
    totals = evidence.totals(amp) if amp else None
    if amp is None or totals is None or not totals.parameter_bytes:
        return
    if evidence.spread and evidence.spread.shards_parameters:  # which trains by FSDP's mixed precision, not autocast
        return
    pays = ""
    if crossing is not None and crossing.batch is None:
        pays = " With this input autocast needs more memory than float32 at every batch size."
    elif crossing is not None and crossing.batch != 1:
        pays = " Autocast needs less memory than float32 at batch sizes of {batch} and above."
    yield Finding(
        "amp-keeps-fp32-parameters",
        "Autocast leaves the parameters ({bytes}), their gradients and the optimizer state in float32, and each "
        "forward adds {cast} of {dtype} copies.",
        {
            "bytes": Bytes(totals.parameter_bytes),
            "cast": Bytes(totals.cast_bytes),
            "dtype": amp.removeprefix("amp-"),
            "batch": crossing and crossing.batch,
        },
        bytes=totals.cast_bytes,
        layers=tuple(layer.path for layer in evidence.runs[amp].layers if layer.cast_bytes),
        brief="Autocast leaves the parameters in float32 ({bytes}) and adds {cast} of {dtype} copies." + pays,
    )
    if crossing is not None:
        yield _amp_crossover(crossing)


def _amp_crossover(crossing: Crossover) -> Finding:
    values: dict[str, object] = {
        "start": crossing.start,
        "fp32": Bytes(crossing.first),
        "amp": Bytes(crossing.second),
        "fp32_sample": Bytes(crossing.first_per_sample),
        "amp_sample": Bytes(crossing.second_per_sample),
        "batch": crossing.batch,
        "before": (crossing.batch or 1) - 1,
    }
    shown = "at batch {start} autocast keeps {amp} for backward, float32 {fp32}"
    if crossing.batch is None:
        text = (
            f"With this input autocast keeps more than float32 at every batch size: {shown}, "
            "and each further sample adds {amp_sample} instead of {fp32_sample}."
        )
    elif crossing.batch == 1:
        text = f"With this input autocast keeps less than float32 at every batch size: {shown}."
    else:
        text = (
            "With this input autocast keeps more than float32 up to batch {before} and less at batch {batch} and "
            "above: "
            f"{shown}."
        )
    return Finding("amp-crossover", text, values, bytes=crossing.second - crossing.first)


@RULES.rule("activations-dominate", "parameters-dominate")
def what_binds_the_batch(evidence: Evidence) -> Iterator[Finding]:
    crossing, stored = evidence.crossover, evidence.totals("fp32")
    if crossing is None or stored is None or not stored.parameter_bytes or crossing.first_per_sample <= 0:
        return
    per_sample, parameters = crossing.first_per_sample, stored.parameter_bytes
    values = {
        "sample": Bytes(per_sample),
        "parameters": Bytes(parameters),
        "half": Bytes(parameters // 2),
        "batch": -(-parameters // per_sample),
        "gain": parameters // 2 // per_sample,
    }
    if parameters // 2 < per_sample:
        code = "activations-dominate"
        brief = "Activations limit the batch size: each sample keeps {sample} in float32."
        text = (
            "Activations limit the batch size: each sample keeps {sample} in float32. Halving the "
            "{parameters} of parameters frees {half}, less than one more sample needs."
        )
    else:
        code = "parameters-dominate"
        brief = "Each sample keeps {sample} in float32: activations overtake parameters at batch {batch}."
        text = (
            "Parameters take {parameters} in float32 and each sample keeps {sample}: activations overtake "
            "parameters at batch {batch}. Halving the parameters makes room for {gain} more samples."
        )
    yield Finding(code, text, values, bytes=per_sample, brief=brief)
