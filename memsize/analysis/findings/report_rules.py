"""The rules of a report, most important first, and how serious each of their findings is to a check.

Those here come after those on precision and training. They are about how a model holds its tensors, and what a
conversion or a summary leaves out: quantized, unregistered, pruned, tied and unused tensors; integers, master weights
and buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from memsize.analysis.findings import compiled, precision, training
from memsize.analysis.findings.evidence import Evidence, bytes_of, layers_of
from memsize.records.aggregates import stored_dtypes
from memsize.records.finding import Finding, Severity, join_names, sizes
from memsize.records.trace import StoredTensor
from memsize.units import Bytes

RULES = precision.RULES + training.RULES + compiled.RULES
_TOLD_FROM: Final = 0.1
"""What share of all that is kept for backward functions must keep for this to be told."""
_LINES: Final = 3
"""How many of the lines that keep most are named."""


@RULES.rule("quantization-unties", severity="warning")
def quantization_unties(evidence: Evidence) -> Iterator[Finding]:
    owners = {tensor.name: tensor.tied_to for tensor in evidence.parameters if tensor.tied_to is not None}
    for name in evidence.skipped_layers:
        tensors = {tensor.name: tensor for tensor in evidence.runs[name].tensors}
        copies = [
            tensor
            for tied, owner in owners.items()
            if (tensor := tensors.get(tied)) and tensor.parts and owner in tensors and not tensors[owner].parts
        ]
        if copies:
            values: dict[str, object] = {"name": evidence.quantizing(name), "size": Bytes(bytes_of(copies))}
            values |= {"copies": tuple(tensor.name for tensor in copies)}
            values |= {"owners": tuple(dict.fromkeys(str(owners[tensor.name]) for tensor in copies))}
            text = "{name} stores {copies} a second time, {size}: {owners}, to which it was tied, stays as it is."
            yield Finding(
                "quantization-unties", text, values, bytes=bytes_of(copies), layers=layers_of(copies), brief=text
            )


@RULES.rule("quantization-leaves-layers")
def quantization_leaves_layers(evidence: Evidence) -> Iterator[Finding]:
    for name, skipped in evidence.skipped_layers.items():
        trace = evidence.runs[name]
        stored = [t for t in trace.tensors if t.kind == "parameter" and t.layer in skipped]
        unquantized = [t for t in stored if not t.parts and t.bytes]
        size = bytes_of(unquantized)
        done = [t for t in trace.tensors if t.kind == "packed" or (t.parts and t.kind == "parameter")]
        if not done or not skipped:
            continue
        values: dict[str, object] = {
            "name": evidence.quantizing(name),
            "done": layers_of(done),
            "small": Bytes(bytes_of(done)),
        }
        values |= {"left": tuple(skipped), "reason": "; ".join(dict.fromkeys(skipped.values()))}
        values |= {"size": Bytes(size), "dtypes": stored_dtypes(unquantized)}
        brief = "{name} does not convert {left}: {size} stay in {dtypes}."
        plain = {tensor.name for tensor in evidence.parameters if tensor.tied_to is None}
        shrinks = any(tensor.kind == "packed" or tensor.name in plain for tensor in done)
        text = "shrinks {done} to" if shrinks else "stores {done} in"
        text = f"{brief} {{name}} {text} {{small}} and leaves the others as they are ({{reason}})."
        yield Finding("quantization-leaves-layers", text, values, bytes=size, layers=tuple(skipped), brief=brief)


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
            values = {"name": evidence.quantizing(name), "layers": layers, "dtypes": dtypes, "bytes": Bytes(size)}
            text = (
                "{name} unpacks the weights of {layers} to {dtypes} for each product and keeps these copies for "
                "backward: {bytes}. Inference frees them one by one."
            )
            yield Finding("quantized-weights-unpacked", text, values, bytes=size, layers=layers)


@RULES.rule("low-bits-in-wide-containers", severity="warning")
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
            values = {"name": name, "count": sum(tensor.elements for tensor in wide), "bytes": Bytes(size)}
            text = (
                "{name} stores {count} weights of fewer than 8 bits in 8-bit containers: {bytes} in all, no less than "
                "int8 takes."
            )
            yield Finding("low-bits-in-wide-containers", text, values, bytes=size, layers=layers_of(wide))


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
    layers = tuple(dict.fromkeys(trace.layers[s.saved_by].path for s in between))
    values = sizes(size=size, all=all_saved) | {"layers": layers}
    for number, (line, _) in enumerate(lines):
        ops = tuple(dict.fromkeys(storage.op for storage in between if storage.saved_at == line and storage.op))
        values[f"line{number}"] = f"{trace.lines[line]} (results of {join_names(ops)})" if ops else trace.lines[line]
    values |= sizes(**{f"bytes{number}": line_bytes for number, (_, line_bytes) in enumerate(lines)})
    shares = ", ".join(f"{{bytes{number}}} at {{line{number}}}" for number in range(len(lines)))
    rest = f" and the rest at {len(by_line) - _LINES} more lines." if len(by_line) > _LINES else "."
    text = "Functions keep {size} of the {all} for backward; the table attributes it to their modules, {layers}: "
    yield Finding("kept-by-functions", text + shares + rest, values, bytes=size, layers=layers)


@RULES.rule("unregistered-tensors", severity="warning")
def unregistered(evidence: Evidence) -> Iterator[Finding]:
    hidden = [t for t in evidence.as_given.tensors if t.kind == "attribute" and t.bytes and not _computed(t, evidence)]
    text = "{names} ({bytes}) are not registered: parameters(), state_dict(), .to() and .half() do not see them. "
    text += "nn.ModuleList, nn.Parameter and register_buffer make them part of the model."
    yield from _about(hidden, "unregistered-tensors", text)


@RULES.rule("pruned-parameters-grow", severity="warning")
def pruned(evidence: Evidence) -> Iterator[Finding]:
    names = {tensor.name for tensor in evidence.as_given.tensors}
    masked = {name.removesuffix("_orig") + "_mask" for name in names if name.endswith("_orig")}
    masks = [t for t in evidence.as_given.tensors if t.name in masked]
    if masks:
        computed = [t for t in evidence.as_given.tensors if _computed(t, evidence)]
        extra, layers = bytes_of(masks) + bytes_of(computed), layers_of(masks)
        text = (
            "Pruning makes the model larger: it adds a mask and the computed weight to each original weight, {extra} "
            "in all, in {layers}. torch.nn.utils.prune.remove makes it permanent and drops both."
        )
        values = {"extra": Bytes(extra), "layers": layers}
        yield Finding("pruned-parameters-grow", text, values, bytes=extra, layers=layers)


def _computed(tensor: StoredTensor, evidence: Evidence) -> bool:
    """Whether a plain attribute is a weight that a pruning or a weight norm computes from registered ones."""
    names = {other.name for other in evidence.as_given.tensors}
    return tensor.kind == "attribute" and bool({f"{tensor.name}_orig", f"{tensor.name}_v"} & names)


@RULES.rule("no-gradient-flows", severity="warning")
def without_gradient(evidence: Evidence) -> Iterator[Finding]:
    cut = [t for t in evidence.parameters if t.trainable and t.used and t.differentiable is False and t.tied_to is None]
    if any(t.differentiable for t in evidence.parameters):
        text = (
            "{names} ({bytes}) are used but get no gradient: they are read through .data or detach, or under no_grad."
        )
        yield from _about(cut, "no-gradient-flows", text)


@RULES.rule("tied-parameters")
def tied(evidence: Evidence) -> Iterator[Finding]:
    ties = [t for t in evidence.parameters if t.tied_to is not None]
    if ties:
        saved = sum(tensor.reported_bytes for tensor in ties)
        owners = tuple(dict.fromkeys(str(tensor.tied_to) for tensor in ties))
        values = {"names": tuple(tensor.name for tensor in ties), "owners": owners, "saved": Bytes(saved)}
        values |= {"verb": "is" if len(ties) == 1 else "are"}
        text = "{names} {verb} tied to {owners}: the shared bytes are stored and counted once, which saves {saved}."
        yield Finding("tied-parameters", text, values, bytes=saved, layers=layers_of(ties))


@RULES.rule("unused-parameters", severity="warning")
def unused(evidence: Evidence) -> Iterator[Finding]:
    idle = [t for t in evidence.parameters if t.used is False and t.tied_to is None and t.bytes]
    text = "The forward never reads {names}: {bytes} are stored, cast and saved with the model, and get no gradient."
    yield from _about(idle, "unused-parameters", text)


@RULES.rule("halving-leaves-integers")
def what_halving_cannot_halve(evidence: Evidence) -> Iterator[Finding]:
    buffers = [t for t in evidence.as_given.tensors if t.kind == "buffer" and "float" not in t.spec.dtype]
    fixed = [t for t in buffers if t.bytes >= 1024]
    inputs = [i for i in evidence.as_given.inputs if "float" not in i.spec.dtype]
    parts = ["integer buffers ({buffers})"] if fixed else []
    parts += ["integer inputs ({inputs}: {names})"] if inputs else []
    if parts:
        of_buffers, of_inputs = bytes_of(fixed), sum(i.bytes for i in inputs)
        values = sizes(buffers=of_buffers, inputs=of_inputs) | {"names": tuple(f"{i.name} {i.spec}" for i in inputs)}
        text = f"Half precision does not shrink {' and '.join(parts)}."
        yield Finding("halving-leaves-integers", text, values, bytes=of_buffers + of_inputs, layers=layers_of(fixed))


@RULES.rule("apex-o2-keeps-master-weights")
def norms_kept_in_fp32(evidence: Evidence) -> Iterator[Finding]:
    trace = evidence.runs.get("apex-O2")
    if trace is None:
        return
    float32 = [t for t in trace.tensors if t.spec.dtype == "float32" and t.kind in ("parameter", "buffer")]
    half = [t.elements for t in trace.tensors if t.spec.dtype == "float16" and t.trainable and not t.tied_to]
    master, values = 4 * sum(half), sizes(master=4 * sum(half), kept=bytes_of(float32))
    text = "apex O2 stores float16 weights, but its optimizer adds {master} of float32 master weights"
    text += ", and batch norms stay float32 ({kept})." if float32 else "."
    yield Finding("apex-o2-keeps-master-weights", text, values, bytes=master, layers=layers_of(float32))


@RULES.rule("buffers-count-too")
def buffers(evidence: Evidence) -> Iterator[Finding]:
    tensors = [t for t in evidence.as_given.tensors if t.kind == "buffer"]
    size, parameters = bytes_of(tensors), evidence.stored.parameter_bytes
    if size and size * 100 >= parameters:
        text = "Buffers take {bytes} in addition to the parameters; torchsummary and torchinfo do not count them."
        yield Finding("buffers-count-too", text, {"bytes": Bytes(size)}, bytes=size, layers=layers_of(tensors))


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


def _about(tensors: Sequence[StoredTensor], code: str, text: str) -> Iterator[Finding]:
    if tensors:
        values = {"names": tuple(tensor.name for tensor in tensors), "bytes": Bytes(bytes_of(tensors))}
        yield Finding(code, text, values, bytes=bytes_of(tensors), layers=layers_of(tensors))


OWN: Final[Mapping[str, Severity]] = {
    "over-limit": "error",
    "does-not-fit": "error",
    "grew": "error",
    "shrank": "note",
}
"""What a check itself finds."""

SEVERITY: Final[Mapping[str, Severity]] = {**OWN, **RULES.severity, "no-input": "note"}
"""The severity of every code that a check may name. A report's notes explain and are no problem: a check that is not
asked for them leaves them out."""
