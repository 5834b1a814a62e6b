"""The memory-format audit as a value: how each layer's tensors lie under channels last, what loses it, what copies.

`memsize.analysis.layout` makes an `Audit`; `LayoutReport` is what a reader gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.trace import InputTensor, TensorSpec

if TYPE_CHECKING:
    from pandas import DataFrame

Format = Literal["channels last", "row-major", "either", "other"]
"""How an image (4-D) or a volume (5-D) lies in memory. "either" is both at once: one channel, or one pixel; "other" is
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

    def copied_in(self, path: str) -> int:
        """The bytes that a layer itself copies, its children's not counted."""
        return sum(copy.bytes for copy in self.copies if copy.layer == path)


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
    """How many parameters and buffers channels last rearranges."""
    converted_inputs: int = 0
    double: bool = False
    """Whether convolutions compute in float64, for which cuDNN has no channels last."""


@dataclass(frozen=True, slots=True, repr=False)
class LayoutReport(Answer):
    """What `memsize layout` found: where channels last is kept, which op loses it, and what that copies."""

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
            "layers": FlatTable.of(_layer_record(self.audit, layer) for layer in self.audit.last.layers),
            "copies": FlatTable(
                ("layer", "op", "tensor", "before", "after", "bytes", "hidden", "place"),
                (
                    (c.layer, c.op, str(c.tensor), c.before, c.after, c.bytes, c.hidden, c.place)
                    for c in self.audit.last.copies
                ),
            ),
        }

    @property
    def layers(self) -> DataFrame:
        """One row per module. `copied_bytes` are its own and add up to the total, so do `row_major_copied_bytes`."""
        return self.tables()["layers"].frame()

    @property
    def copies(self) -> DataFrame:
        """One row per copy of a format that the forward makes under channels last."""
        return self.tables()["copies"].frame()


def _layer_record(audit: Audit, layer: LayerFormats) -> dict[str, object]:
    return {
        "path": layer.path,
        "type": layer.type,
        "depth": layer.depth,
        "calls": layer.calls,
        "output": ", ".join(map(str, layer.specs)),
        "parameters": ", ".join(shortened(layer.parameters)),
        "inputs": ", ".join(shortened(layer.inputs)),
        "outputs": ", ".join(shortened(layer.outputs)),
        "lost_at": ", ".join(dict.fromkeys(loss.op for loss in audit.last.losses if loss.layer == layer.path)),
        "copied_bytes": audit.last.copied_in(layer.path),
        "row_major_copied_bytes": audit.plain.copied_in(layer.path),
    }


def shortened(formats: tuple[Format, ...]) -> tuple[Format, ...]:
    """Each format once."""
    return tuple(dict.fromkeys(formats))
