"""Rules about how a model holds its tensors: tied, unused, unregistered, pruned, out of reach of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.analysis.findings.evidence import Evidence
from memsize.records.finding import Finding
from memsize.records.trace import StoredTensor
from memsize.units import Bytes


def _layers(tensors: list[StoredTensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tensor.layer for tensor in tensors))


def _bytes(tensors: list[StoredTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def tied(evidence: Evidence) -> Iterator[Finding]:
    """Parameters that share memory: stored once, however many layers name them."""
    ties = [t for t in evidence.parameters if t.tied_to is not None]
    if ties:
        saved = sum(tensor.reported_bytes for tensor in ties)
        yield Finding(
            "tied-parameters",
            saved,
            _layers(ties),
            "Tied: {names} with {owners}. What they share is stored and counted once, which saves {saved}.",
            {
                "names": tuple(tensor.name for tensor in ties),
                "owners": tuple(dict.fromkeys(str(tensor.tied_to) for tensor in ties)),
                "saved": Bytes(saved),
            },
        )


def unused(evidence: Evidence) -> Iterator[Finding]:
    """Parameters that the forward never reads."""
    idle = [t for t in evidence.parameters if t.used is False and t.tied_to is None and t.bytes]
    if idle:
        yield Finding(
            "unused-parameters",
            _bytes(idle),
            _layers(idle),
            "The forward never reads {names}: {bytes} are stored, cast and saved with the model, and get no gradient.",
            {"names": tuple(tensor.name for tensor in idle), "bytes": Bytes(_bytes(idle))},
        )


def unregistered(evidence: Evidence) -> Iterator[Finding]:
    """Tensors in plain attributes and modules in Python lists, which `parameters()`, `.to()` and `.half()` do not
    see.
    """
    hidden = [t for t in evidence.given.tensors if t.kind == "attribute" and t.bytes and not _computed(t, evidence)]
    if hidden:
        yield Finding(
            "unregistered-tensors",
            _bytes(hidden),
            _layers(hidden),
            "Held without being registered: {names} ({bytes}). parameters(), state_dict(), .to() and .half() "
            "do not see them; nn.ModuleList, nn.Parameter and register_buffer make them part of the model.",
            {"names": tuple(tensor.name for tensor in hidden), "bytes": Bytes(_bytes(hidden))},
        )


def pruned(evidence: Evidence) -> Iterator[Finding]:
    """`torch.nn.utils.prune`: a mask and a computed weight come on top of the original."""
    names = {tensor.name for tensor in evidence.given.tensors}
    masks = [t for t in evidence.given.tensors if t.name.endswith("_mask") and f"{_stem(t.name)}_orig" in names]
    if masks:
        computed = [t for t in evidence.given.tensors if _computed(t, evidence)]
        extra = _bytes(masks) + _bytes(computed)
        yield Finding(
            "pruned-parameters-grow",
            extra,
            _layers(masks),
            "Pruning makes the model larger, not smaller: beside each original weight stand a mask and the computed "
            "weight, {extra} on top, in {layers}. torch.nn.utils.prune.remove makes it permanent and drops both.",
            {"extra": Bytes(extra), "layers": _layers(masks)},
        )


def _stem(name: str) -> str:
    return name.removesuffix("_mask")


def _computed(tensor: StoredTensor, evidence: Evidence) -> bool:
    """Whether a plain attribute is a weight that a pruning or a weight norm computes from registered ones."""
    names = {other.name for other in evidence.given.tensors}
    return tensor.kind == "attribute" and bool({f"{tensor.name}_orig", f"{tensor.name}_v"} & names)


def without_gradient(evidence: Evidence) -> Iterator[Finding]:
    """Parameters that the forward reads but that no gradient can reach: `weight.data`, `detach`, a `no_grad` part."""
    cut = [t for t in evidence.parameters if t.trainable and t.used and t.differentiable is False and t.tied_to is None]
    if cut and any(t.differentiable for t in evidence.parameters):
        yield Finding(
            "no-gradient-flows",
            _bytes(cut),
            _layers(cut),
            "Used, but out of reach of any gradient: {names} ({bytes}), read through .data or detach, or "
            "under no_grad.",
            {"names": tuple(tensor.name for tensor in cut), "bytes": Bytes(_bytes(cut))},
        )


def buffers(evidence: Evidence) -> Iterator[Finding]:
    """Buffers, which summaries leave out."""
    held = [t for t in evidence.given.tensors if t.kind == "buffer"]
    size, parameters = _bytes(held), evidence.stored.parameter_bytes
    if size and size * 100 >= parameters:
        yield Finding(
            "buffers-count-too",
            size,
            _layers(held),
            "Buffers take {bytes} beside the parameters; torchsummary and torchinfo do not count them.",
            {"bytes": Bytes(size)},
        )


def torchinfo_counts_differently(evidence: Evidence) -> Iterator[Finding]:
    """Another summary's total, where it is not the number of elements that are stored."""
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
