"""Rules about what a conversion or a summary leaves out: integers, master weights, buffers, tied and idle layers."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.analysis.findings.evidence import Evidence, bytes_of, layers_of
from memsize.records.finding import Finding, Rules
from memsize.units import Bytes

RULES = Rules[Evidence]()


@RULES.rule("halving-leaves-integers")
def what_halving_cannot_halve(evidence: Evidence) -> Iterator[Finding]:
    """Integer buffers and inputs, which `.half()` leaves as they are, and tensors that it does not reach."""
    fixed = [
        t for t in evidence.given.tensors if t.kind == "buffer" and "float" not in t.spec.dtype and t.bytes >= 1024
    ]
    inputs = [i for i in evidence.given.inputs if "float" not in i.spec.dtype]
    parts = []
    if fixed:
        parts.append("integer buffers ({buffers})")
    if inputs:
        parts.append("inputs that are not floating ({inputs}: {names})")
    if parts:
        yield Finding(
            "halving-leaves-integers",
            bytes_of(fixed) + sum(i.bytes for i in inputs),
            layers_of(fixed),
            f"Halving cannot halve {' and '.join(parts)}.",
            {
                "buffers": Bytes(bytes_of(fixed)),
                "inputs": Bytes(sum(i.bytes for i in inputs)),
                "names": tuple(f"{i.name} {i.spec}" for i in inputs),
            },
        )


@RULES.rule("apex-o2-keeps-master-weights")
def norms_kept_in_fp32(evidence: Evidence) -> Iterator[Finding]:
    """apex O2's batch norms: what they keep in float32, and what the optimizer's master weights add."""
    trace = evidence.runs.get("apex-O2")
    if trace is None:
        return
    kept = [t for t in trace.tensors if t.spec.dtype == "float32" and t.kind in ("parameter", "buffer")]
    half = sum(t.elements for t in trace.tensors if t.spec.dtype == "float16" and t.trainable and not t.tied_to)
    yield Finding(
        "apex-o2-keeps-master-weights",
        half * 4,
        layers_of(kept),
        "apex O2 stores float16 weights but its optimizer holds {master} of float32 master weights as well"
        + (", and batch norms stay float32 ({kept})." if kept else "."),
        {"master": Bytes(half * 4), "kept": Bytes(bytes_of(kept))},
    )


@RULES.rule("buffers-count-too")
def buffers(evidence: Evidence) -> Iterator[Finding]:
    """Buffers, which summaries leave out."""
    held = [t for t in evidence.given.tensors if t.kind == "buffer"]
    size, parameters = bytes_of(held), evidence.stored.parameter_bytes
    if size and size * 100 >= parameters:
        yield Finding(
            "buffers-count-too",
            size,
            layers_of(held),
            "Buffers take {bytes} beside the parameters; torchsummary and torchinfo do not count them.",
            {"bytes": Bytes(size)},
        )


@RULES.rule("summary-counts-differently")
def torchinfo_counts_differently(evidence: Evidence) -> Iterator[Finding]:
    """Another summary's total, where it differs from the number of elements that are stored."""
    ours = evidence.stored.parameters
    for reading in evidence.readings:
        if reading.parameters != ours:
            yield Finding(
                "summary-counts-differently",
                None,
                (),
                "{tool} counts {theirs} parameters where {ours} are stored: {reason}.",
                {"tool": reading.tool, "theirs": reading.parameters, "ours": ours, "reason": _reason(evidence)},
            )


def _reason(evidence: Evidence) -> str:
    if any(tensor.kind == "packed" for tensor in evidence.parameters):
        return "it does not see packed weights"
    if any(tensor.tied_to for tensor in evidence.parameters):
        return "it counts tied parameters once for each layer"
    if any(tensor.used is False for tensor in evidence.parameters):
        return "it leaves out layers that are never called"
    return "it adds up the layers that it saw called"
