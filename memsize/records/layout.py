"""The memory-format audit as a value: how each layer's tensors lie under channels last, what loses it, what copies.

`memsize.analysis.layout` makes an `Audit`; `LayoutReport` is what a reader gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

from memsize.records.aggregates import nearest
from memsize.records.answer import Answer, TableFrame
from memsize.records.fields import (
    Cell,
    Fields,
    FlatTable,
    Path,
    Specs,
    Words,
    field,
)
from memsize.records.finding import Finding
from memsize.records.trace import InputTensor, TensorSpec

Format = Literal["channels last", "row-major", "either", "other"]
"""The memory format of an image (4-D) or volume (5-D). "either" is both at once: one channel, or one pixel; "other" is
neither, as views of slices and permuted tensors are.
"""

FORMATS: tuple[Format, ...] = ("channels last", "row-major", "either", "other")


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that only changes how a tensor lies in memory.

    `op` makes it: itself an op of the model (``clone``), or, where `hidden`, a kernel on its way (``convolution``),
    which frees it again at its end. `place` is the line of code that asked for it, where that is not a library's.
    """

    layer: str
    op: str
    tensor: TensorSpec
    before: Format
    after: Format
    bytes: int
    hidden: bool
    place: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """An op that was given channels last and returned another format."""

    layer: str
    op: str
    tensor: TensorSpec
    after: Format
    place: str = ""


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """One module: the formats of its own images and volumes. Empty where it has none of the kind."""

    path: str
    type: str
    depth: int
    leaf: bool
    calls: int
    parameters: tuple[Format, ...] = ()
    inputs: tuple[Format, ...] = ()
    outputs: tuple[Format, ...] = ()
    specs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One forward: its layers, and what was copied and lost on the way, in order."""

    layers: tuple[LayerFormats, ...] = ()
    copies: tuple[Copy, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def copied(self) -> int:
        """The bytes of all copies."""
        return sum(copy.bytes for copy in self.copies)


@dataclass(frozen=True, slots=True)
class Audit:
    """A model run as it is, and once more with its images and weights in channels last."""

    model: str
    inputs: tuple[InputTensor, ...]
    scenario: str
    training: bool
    plain: Run
    last: Run
    converted: int = 0
    """The number of parameters and buffers that channels last rearranges."""
    converted_inputs: int = 0
    double: bool = False
    """Whether convolutions compute in float64, for which cuDNN has no channels last."""


class AuditRow(NamedTuple):
    """A layer of an audit with the ops that lose channels last in it, and the bytes that it copies.

    `copied_bytes` are copied under channels last, `row_major_copied_bytes` where nothing is converted.
    """

    layer: LayerFormats
    lost: tuple[str, ...]
    copied_bytes: int
    row_major_copied_bytes: int


def audit_rows(audit: Audit, layers: Iterable[LayerFormats]) -> tuple[AuditRow, ...]:
    """Return a row for each of `layers`. Losses and copies of others are added to the nearest layer above them."""
    shown = {layer.path: layer for layer in layers}
    copied: list[Counter[str]] = []
    for run in (audit.last, audit.plain):
        sizes: Counter[str] = Counter()
        for copy in run.copies:
            sizes[nearest(copy.layer, shown)] += copy.bytes
        copied.append(sizes)
    lost: dict[str, dict[str, None]] = {}
    for loss in audit.last.losses:
        lost.setdefault(nearest(loss.layer, shown), {})[loss.op] = None
    return tuple(
        AuditRow(layer, tuple(lost.get(path, ())), copied[0][path], copied[1][path]) for path, layer in shown.items()
    )


def _joined(formats: Iterable[object]) -> str:
    return ", ".join(map(str, dict.fromkeys(formats)))


def _strided(lies: Format) -> str:
    """Return the name of a format in tables, where `other` is called strided."""
    return "strided" if lies == "other" else lies


def _words(formats: tuple[Format, ...]) -> Words:
    return Words(map(_strided, dict.fromkeys(formats)))


def _path(path: str) -> Cell:
    return Path(path) if path else "(the model itself)"


LAYER_FIELDS: Final = Fields[AuditRow](
    field("path", "layer", "name", 100, "its path in the model", get="layer.path", key="layer"),
    field("type", "type", "text", 90, "its class", get="layer.type"),
    field("depth", kind="count", get="layer.depth"),
    field("calls", kind="count", get="layer.calls"),
    field("output", "output", "specs", 70, "the tensors that it returns", cell=lambda row, _: Specs(row.layer.specs)),
    field("parameters", "weights", "words", 75, "format of the weights", get=lambda row: _joined(row.layer.parameters)),
    field("inputs", "given", "words", 85, "format of the input images", alone="inputs given"),
    field("outputs", "returned", "words", 95, "format of the output images"),
    field("lost_at", "lost at", "words", 94, "the op in it that loses channels last", key="lost"),
    field(
        "copied_bytes",
        "copied",
        "bytes",
        96,
        "bytes that it copies to rearrange tensors",
        key="copied",
        role="cast copy",
    ),
    field("row_major_copied_bytes", "if row-major", "bytes", 80, "the same without channels last", key="before"),
    get={
        "output": lambda row: ", ".join(map(str, row.layer.specs)),
        "inputs": lambda row: _joined(row.layer.inputs),
        "outputs": lambda row: _joined(row.layer.outputs),
        "lost_at": lambda row: _joined(row.lost),
    },
    cell={
        "path": lambda row, _: _path(row.layer.path),
        "parameters": lambda row, _: _words(row.layer.parameters),
        "inputs": lambda row, _: _words(row.layer.inputs),
        "outputs": lambda row, _: _words(row.layer.outputs),
        "lost_at": lambda row, _: Words(row.lost),
    },
)

COPY_FIELDS: Final = Fields[Copy](
    field("layer", "layer", "name", 100, "the layer that copies", cell=lambda copy, _: _path(copy.layer)),
    field("op", "op", "text", 90, "the op that copies"),
    field("tensor", "tensor", "specs", 80, "the copied tensor", get=lambda copy: str(copy.tensor)),
    field("before", "from", "text", 85, "memory format of the original", cell=lambda copy, _: _strided(copy.before)),
    field("after", "to", "text", 85, "memory format of the copy", cell=lambda copy, _: _strided(copy.after)),
    field("hidden", "as", "text", 60, "an op of the model, or inside a kernel that frees it again", key="kind"),
    field("place", "at", "text", 88, "line of code that asked for it", alone="line"),
    field("bytes", "copied", "bytes", 95, "bytes of the copy"),
    cell={
        "tensor": lambda copy, _: Specs((copy.tensor,)),
        "hidden": lambda copy, _: "in the kernel" if copy.hidden else "an op",
    },
    alone={"hidden": "kind of copy"},
)


@dataclass(frozen=True, slots=True, repr=False)
class LayoutReport(Answer):
    """The answer of `memsize layout`: layers that keep channels last, ops that lose it, and the copies they cause."""

    kind: ClassVar = "layout"

    audit: Audit
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.audit.model

    def tables(self) -> dict[str, FlatTable]:
        """`layers` and `copies`, as the properties of these names have them."""
        return {
            "layers": LAYER_FIELDS.flat(audit_rows(self.audit, self.audit.last.layers)),
            "copies": COPY_FIELDS.flat(self.audit.last.copies),
        }

    layers = TableFrame("layers", "One row per module; copied bytes are its own and add up to the totals.")
    copies = TableFrame("copies", "One row per copy of a format that the forward makes under channels last.")
