"""Rules about how a model holds its tensors, and what a conversion or a summary leaves out.

Quantized, unregistered, pruned, tied and unused tensors; integers, master weights and buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from memsize.analysis.findings.evidence import Evidence, bytes_of, layers_of
from memsize.records.aggregates import stored_dtypes
from memsize.records.finding import Finding, Rules, join_names
from memsize.records.trace import Storage, StoredTensor
from memsize.units import Bytes

RULES = Rules[Evidence]()
_TOLD_FROM: Final = 0.1
"""What share of all that is kept for backward functions must keep for this to be told."""
_LINES: Final = 3
"""How many of the lines that keep most are named."""


@RULES.rule("quantization-leaves-layers")
def quantization_leaves_layers(evidence: Evidence) -> Iterator[Finding]:
    for name, skipped in evidence.skipped_layers.items():
        trace = evidence.runs[name]
        unquantized = [t for t in trace.tensors if t.kind == "parameter" and not t.parts and t.bytes]
        size = bytes_of(unquantized)
        done = [t for t in trace.tensors if t.kind == "packed" or (t.parts and t.kind == "parameter")]
        if not done or not skipped:
            continue
        yield Finding(
            "quantization-leaves-layers",
            "{name} shrinks {done} to {small} and does not convert {left} ({reason}): {size} stay in {dtypes}.",
            {
                "name": name,
                "done": layers_of(done),
                "small": Bytes(bytes_of(done)),
                "left": tuple(skipped),
                "reason": "; ".join(dict.fromkeys(skipped.values())),
                "size": Bytes(size),
                "dtypes": stored_dtypes(unquantized),
            },
            bytes=size,
            layers=tuple(skipped),
            brief="{name} does not convert {left}: {size} stay in {dtypes}.",
        )


@RULES.rule("quantized-weights-unpacked")
def quantized_weights_unpacked(evidence: Evidence) -> Iterator[Finding]:
    for name in evidence.skipped_layers:
        trace = evidence.runs[name]
        weights = {(t.layer, t.spec.shape) for t in trace.tensors if t.kind == "parameter" and t.parts}
        saved = [s for s in trace.storages if s.op == "_to_copy" and s.saved_by >= 0 and s.layer >= 0]
        copies = [s for s in saved if (trace.layers[s.layer].path, s.shape) in weights]
        size = sum(copy.bytes for copy in copies)
        if size:
            layers = tuple(dict.fromkeys(trace.layers[copy.layer].path for copy in copies))
            dtypes = tuple(dict.fromkeys(copy.dtype for copy in copies))
            yield Finding(
                "quantized-weights-unpacked",
                "{name} unpacks the weights of {layers} to {dtypes} for each product and keeps these copies for "
                "backward: {bytes}. Inference frees them one by one.",
                {"name": name, "layers": layers, "dtypes": dtypes, "bytes": Bytes(size)},
                bytes=size,
                layers=layers,
            )


@RULES.rule("low-bits-in-wide-containers")
def low_bits_in_wide_containers(evidence: Evidence) -> Iterator[Finding]:
    for name in ("as-given", *evidence.skipped_layers):
        trace = evidence.as_given if name == "as-given" else evidence.runs.get(name)
        # torchao keeps such a tensor unpacked: the class name says so, and each value takes one int8.
        wide = [
            tensor
            for tensor in (trace.tensors if trace else ())
            if "UnpackedToInt8" in (tensor.wrapper or "") and any(part.spec.dtype == "int8" for part in tensor.parts)
        ]
        if wide:
            size = bytes_of(wide)
            yield Finding(
                "low-bits-in-wide-containers",
                "{name} stores {count} weights of fewer than 8 bits in 8-bit containers, {bytes} in all, which saves "
                "nothing beyond int8.",
                {"name": name, "count": sum(tensor.elements for tensor in wide), "bytes": Bytes(size)},
                bytes=size,
                layers=layers_of(wide),
            )


@RULES.rule("kept-by-functions")
def kept_by_functions(evidence: Evidence) -> Iterator[Finding]:
    trace = evidence.as_given
    saved = [s for s in trace.storages if s.saved_by >= 0]
    between = [s for s in saved if s.saved_at >= 0 and not trace.layers[s.saved_by].leaf]
    size, all_saved = sum(s.bytes for s in between), sum(s.bytes for s in saved)
    if not size or size < _TOLD_FROM * all_saved:
        return
    by_line = Counter[int]()
    for storage in between:
        by_line[storage.saved_at] += storage.bytes
    lines = by_line.most_common(_LINES)
    named = {f"line{number}": _with_ops(between, line, trace.lines[line]) for number, (line, _) in enumerate(lines)}
    shares = ", ".join(f"{{bytes{number}}} at {{line{number}}}" for number in range(len(lines)))
    rest = f" and the rest at {len(by_line) - _LINES} more lines." if len(by_line) > _LINES else "."
    layers = tuple(dict.fromkeys(trace.layers[s.saved_by].path for s in between))
    yield Finding(
        "kept-by-functions",
        "Functions keep {size} of the {all} for backward, which the table counts for the modules that call them, "
        "{layers}: " + shares + rest,
        {
            "size": Bytes(size),
            "all": Bytes(all_saved),
            "layers": layers,
            **named,
            **{f"bytes{number}": Bytes(line_bytes) for number, (_, line_bytes) in enumerate(lines)},
        },
        bytes=size,
        layers=layers,
    )


def _with_ops(storages: Iterable[Storage], line: int, name: str) -> str:
    ops = dict.fromkeys(storage.op for storage in storages if storage.saved_at == line and storage.op)
    return f"{name} (results of {join_names(tuple(ops))})" if ops else name


@RULES.rule("unregistered-tensors")
def unregistered(evidence: Evidence) -> Iterator[Finding]:
    hidden = [t for t in evidence.as_given.tensors if t.kind == "attribute" and t.bytes and not _computed(t, evidence)]
    if hidden:
        yield _about(
            hidden,
            "unregistered-tensors",
            "{names} ({bytes}) are not registered: parameters(), state_dict(), .to() and .half() do not see them. "
            "nn.ModuleList, nn.Parameter and register_buffer make them part of the model.",
        )


@RULES.rule("pruned-parameters-grow")
def pruned(evidence: Evidence) -> Iterator[Finding]:
    names = {tensor.name for tensor in evidence.as_given.tensors}
    masked = {name.removesuffix("_orig") + "_mask" for name in names if name.endswith("_orig")}
    masks = [t for t in evidence.as_given.tensors if t.name in masked]
    if masks:
        computed = [t for t in evidence.as_given.tensors if _computed(t, evidence)]
        extra = bytes_of(masks) + bytes_of(computed)
        yield Finding(
            "pruned-parameters-grow",
            "Pruning makes the model larger: it adds a mask and the computed weight to each original weight, {extra} "
            "in all, in {layers}. torch.nn.utils.prune.remove makes it permanent and drops both.",
            {"extra": Bytes(extra), "layers": layers_of(masks)},
            bytes=extra,
            layers=layers_of(masks),
        )


def _computed(tensor: StoredTensor, evidence: Evidence) -> bool:
    """Whether a plain attribute is a weight that a pruning or a weight norm computes from registered ones."""
    names = {other.name for other in evidence.as_given.tensors}
    return tensor.kind == "attribute" and bool({f"{tensor.name}_orig", f"{tensor.name}_v"} & names)


@RULES.rule("no-gradient-flows")
def without_gradient(evidence: Evidence) -> Iterator[Finding]:
    cut = [t for t in evidence.parameters if t.trainable and t.used and t.differentiable is False and t.tied_to is None]
    if cut and any(t.differentiable for t in evidence.parameters):
        yield _about(
            cut,
            "no-gradient-flows",
            "{names} ({bytes}) are used but get no gradient: they are read through .data or detach, or under no_grad.",
        )


@RULES.rule("tied-parameters")
def tied(evidence: Evidence) -> Iterator[Finding]:
    ties = [t for t in evidence.parameters if t.tied_to is not None]
    if ties:
        saved = sum(tensor.reported_bytes for tensor in ties)
        yield Finding(
            "tied-parameters",
            "{names} {verb} tied to {owners}: the shared bytes are stored and counted once, which saves {saved}.",
            {
                "names": tuple(tensor.name for tensor in ties),
                "verb": "is" if len(ties) == 1 else "are",
                "owners": tuple(dict.fromkeys(str(tensor.tied_to) for tensor in ties)),
                "saved": Bytes(saved),
            },
            bytes=saved,
            layers=layers_of(ties),
        )


@RULES.rule("unused-parameters")
def unused(evidence: Evidence) -> Iterator[Finding]:
    idle = [t for t in evidence.parameters if t.used is False and t.tied_to is None and t.bytes]
    if idle:
        yield _about(
            idle,
            "unused-parameters",
            "The forward never reads {names}: {bytes} are stored, cast and saved with the model, and get no gradient.",
        )


@RULES.rule("halving-leaves-integers")
def what_halving_cannot_halve(evidence: Evidence) -> Iterator[Finding]:
    buffers = [t for t in evidence.as_given.tensors if t.kind == "buffer" and "float" not in t.spec.dtype]
    fixed = [t for t in buffers if t.bytes >= 1024]
    inputs = [i for i in evidence.as_given.inputs if "float" not in i.spec.dtype]
    parts = ["integer buffers ({buffers})"] if fixed else []
    parts += ["inputs of integers ({inputs}: {names})"] if inputs else []
    if parts:
        input_bytes = sum(i.bytes for i in inputs)
        yield Finding(
            "halving-leaves-integers",
            f"Halving cannot halve {' and '.join(parts)}.",
            {
                "buffers": Bytes(bytes_of(fixed)),
                "inputs": Bytes(input_bytes),
                "names": tuple(f"{i.name} {i.spec}" for i in inputs),
            },
            bytes=bytes_of(fixed) + input_bytes,
            layers=layers_of(fixed),
        )


@RULES.rule("apex-o2-keeps-master-weights")
def norms_kept_in_fp32(evidence: Evidence) -> Iterator[Finding]:
    trace = evidence.runs.get("apex-O2")
    if trace is None:
        return
    float32 = [t for t in trace.tensors if t.spec.dtype == "float32" and t.kind in ("parameter", "buffer")]
    half = sum(t.elements for t in trace.tensors if t.spec.dtype == "float16" and t.trainable and not t.tied_to)
    yield Finding(
        "apex-o2-keeps-master-weights",
        "apex O2 stores float16 weights, but its optimizer adds {master} of float32 master weights"
        + (", and batch norms stay float32 ({kept})." if float32 else "."),
        {"master": Bytes(half * 4), "kept": Bytes(bytes_of(float32))},
        bytes=half * 4,
        layers=layers_of(float32),
    )


@RULES.rule("buffers-count-too")
def buffers(evidence: Evidence) -> Iterator[Finding]:
    tensors = [t for t in evidence.as_given.tensors if t.kind == "buffer"]
    size, parameters = bytes_of(tensors), evidence.stored.parameter_bytes
    if size and size * 100 >= parameters:
        yield Finding(
            "buffers-count-too",
            "Buffers take {bytes} in addition to the parameters; torchsummary and torchinfo do not count them.",
            {"bytes": Bytes(size)},
            bytes=size,
            layers=layers_of(tensors),
        )


@RULES.rule("summary-counts-differently")
def torchinfo_counts_differently(evidence: Evidence) -> Iterator[Finding]:
    ours, tensors = evidence.stored.parameters, evidence.parameters
    reason = "it adds up the layers that were called"
    if any(tensor.kind == "packed" for tensor in tensors):
        reason = "it does not see packed weights"
    elif any(tensor.tied_to for tensor in tensors):
        reason = "it counts tied parameters once for each layer"
    elif any(tensor.used is False for tensor in tensors):
        reason = "it leaves out layers that are never called"
    for reading in evidence.readings:
        if reading.parameters != ours:
            values = {"tool": reading.tool, "theirs": reading.parameters, "ours": ours, "reason": reason}
            text = "{tool} counts {theirs} parameters, the model stores {ours}: {reason}."
            yield Finding("summary-counts-differently", text, values)


def _about(tensors: Sequence[StoredTensor], code: str, text: str) -> Finding:
    values = {"names": tuple(tensor.name for tensor in tensors), "bytes": Bytes(bytes_of(tensors))}
    return Finding(code, text, values, bytes=bytes_of(tensors), layers=layers_of(tensors))
