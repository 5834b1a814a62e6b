"""Rules about memory formats: whether channels last pays in copies, and what stands in its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memsize.records.finding import Finding, Rules, sizes
from memsize.records.layout import Audit, Copy, Format, Loss
from memsize.units import Bytes

_COPYING = frozenset({"clone", "_to_copy"})
_CONVOLUTION = "convolution"

RULES = Rules[Audit]()


@RULES.rule("nothing-to-convert")
def _nothing_to_convert(audit: Audit) -> Iterator[Finding]:
    if not audit.converted and not audit.converted_inputs:
        text = "Channels last changes nothing: the model has no images or volumes to rearrange."
        yield Finding("nothing-to-convert", text)


@RULES.rule(
    "channels-last-copies-more", "channels-last-copies-less", "channels-last-copies-the-same", "channels-last-kept"
)
def _verdict(audit: Audit) -> Iterator[Finding]:
    if not audit.converted and not audit.converted_inputs:
        return
    plain, last = audit.plain.copied, audit.last.copied
    values = sizes(plain=plain, last=last, difference=abs(last - plain))
    text = "Channels last copies {last} per forward to rearrange tensors, "
    if last > plain:
        text += "{difference} more than row-major."
        yield Finding("channels-last-copies-more", text, values, bytes=last - plain, layers=_layers(audit.last.copies))
    elif last < plain:
        text += "{difference} less than row-major."
        if not last:
            text = "Channels last copies nothing to rearrange tensors; row-major copies {plain} per forward."
        yield Finding("channels-last-copies-less", text, values, bytes=plain - last, layers=_layers(audit.plain.copies))
    elif last:
        text += "as much as row-major."
        yield Finding("channels-last-copies-the-same", text, values, bytes=last, layers=_layers(audit.last.copies))
    back = any(copy.op == _CONVOLUTION for copy in audit.last.copies)
    count = sum(layer.leaf and "channels last" in layer.outputs for layer in audit.last.layers)
    if not audit.last.losses and not back and count:
        keepers = (
            "the one layer that returns images keeps it"
            if count == 1
            else "all {count} layers that return images keep it"
        )
        text = f"No op loses channels last: {keepers}."
        yield Finding("channels-last-kept", text, {"count": count})


@RULES.rule("format-lost")
def _lost(audit: Audit) -> Iterator[Finding]:
    groups: dict[str, list[Loss]] = {}
    for loss in audit.last.losses:
        groups.setdefault(loss.op, []).append(loss)
    for op, losses in groups.items():
        layers = tuple(dict.fromkeys(loss.layer for loss in losses))
        lines = tuple(dict.fromkeys(loss.place for loss in losses if loss.place))
        what = (
            "a copy to row-major (contiguous, reshape or flatten)"
            if op in _COPYING
            else f"{op} returns row-major tensors"
        )
        where = " at {lines}" if lines else ""
        text = f"Channels last is lost in {{layers}}{where}: {{what}}."
        values = {"layers": layers, "lines": lines, "what": what}
        places = {(loss.place, loss.layer) for loss in losses}
        copies = [copy for copy in audit.last.copies if copy.op == op and (copy.place, copy.layer) in places]
        copied = sum(copy.bytes for copy in copies)
        yield Finding("format-lost", text, values, bytes=copied or None, layers=layers)


@RULES.rule("convolution-copies-back")
def _copied_back(audit: Audit) -> Iterator[Finding]:
    text = (
        "The input of {layers} is row-major, but the weights are channels last: cuDNN copies it first, {bytes} in all."
    )
    yield from _copied(audit, op=_CONVOLUTION, after="channels last", code="convolution-copies-back", text=text)


@RULES.rule("kernel-copies")
def _copied_in_kernels(audit: Audit) -> Iterator[Finding]:
    ops = dict.fromkeys(copy.op for copy in audit.last.copies if copy.hidden and copy.op != _CONVOLUTION)
    for op in ops:
        text = f"The input of {{layers}} is not row-major, so {op} copies it first: {{bytes}} in all."
        yield from _copied(audit, op=op, after="row-major", code="kernel-copies", text=text)


def _copied(audit: Audit, op: str, after: Format, code: str, text: str) -> Iterator[Finding]:
    copies = [copy for copy in audit.last.copies if copy.hidden and copy.op == op and copy.after == after]
    if copies:
        layers, size = _layers(copies), sum(copy.bytes for copy in copies)
        values = {"layers": layers, "bytes": Bytes(size)}
        yield Finding(code, text, values, bytes=size, layers=layers)


@RULES.rule("float64-convolutions")
def _double_precision(audit: Audit) -> Iterator[Finding]:
    layers = _layers([copy for copy in audit.last.copies if copy.tensor.dtype == "float64" and copy.op == _CONVOLUTION])
    if audit.double and layers:
        text = "cuDNN has no channels last for float64: convolutions copy their inputs back to row-major."
        yield Finding("float64-convolutions", text, layers=layers)


def _layers(copies: Sequence[Copy]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(copy.layer for copy in copies))
