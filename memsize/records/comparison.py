"""`Comparison`: two models or files, tensor by tensor and layer by layer, and what changed from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from memsize.printable import printable
from memsize.records.aggregates import Totals, stored_dtypes, totals
from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.gpu import LiveStorage
from memsize.records.trace import StoredTensor, Trace
from memsize.units import format_bytes

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor in both models; None where it is only in the other. `name` is what the second model calls it."""

    name: str
    before: StoredTensor | None
    after: StoredTensor | None

    @property
    def bytes(self) -> int:
        """How many bytes more the second model stores."""
        return (self.after.bytes if self.after else 0) - (self.before.bytes if self.before else 0)

    @property
    def resized(self) -> bool:
        """Whether it has another shape in the second model."""
        return self.before is not None and self.after is not None and self.before.spec.shape != self.after.spec.shape

    @property
    def same(self) -> bool:
        """Whether both store the tensor alike."""
        return self.before is not None and self.after is not None and _stored(self.before) == _stored(self.after)


How = Literal["added", "removed", "renamed", "resized", "replaced", "stored differently", "runs differently"]
"""What happened to a layer: it has another path, tensors of other shapes, another type, other dtypes or bytes; or it
stores the same, but its outputs or what it keeps for backward have other sizes."""


FigureOf = Literal["run", "inference peak", "training peak", "file"]
"""What a figure is one of: the run that the tables show, the peak of an inference or of a training step on a GPU, or a
checkpoint's file."""


class LayerSizes(NamedTuple):
    """What layers add up to: `parameters` in elements; in bytes what they store, their new outputs, and what they keep
    for backward."""

    parameters: int = 0
    stored: int = 0
    outputs: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer that changed; where the whole of it was added, removed or renamed, with the `layers` below it.

    `before` and `after` are its paths, `types` its classes, None in a model that lacks it. `how` are in the order of
    `How`, one or several.
    """

    before: str | None
    after: str | None
    types: tuple[str | None, str | None]
    how: tuple[How, ...]
    sizes: tuple[LayerSizes, LayerSizes]
    layers: int = 1


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure of one scenario in both models: None where it is not known.

    `name` is one of a report's figures; of a peak ``"requested"``, ``"allocated"``, ``"reserved"``, ``"device"`` (the
    most that it may be), or a role of what is alive there; of a file ``"size"`` or a part of a checkpoint.
    """

    scenario: str
    of: FigureOf
    name: str
    before: int | None
    after: int | None


class LivingChange(NamedTuple):
    """One of the largest storages alive at the peak of either model; None where the other has none like it."""

    before: LiveStorage | None
    after: LiveStorage | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Answer):
    """Two models or files side by side. It prints as a few sentences, in a notebook as a page; `changes` is the table
    of their tensors, `layers` that of the layers that changed, `figures` that of all figures.

    `names` say what was compared where that is not the models' names. `living` compares what is alive at the `peak`, a
    scenario's. `appeared` and `gone` are findings about only one of the two;
    `notes` say what a reader must know about how the figures of either were made.
    """

    kind: ClassVar = "comparison"

    before: Trace
    after: Trace
    pairs: tuple[Change, ...]
    findings: tuple[Finding, ...]
    names: tuple[str, str] = ("", "")
    layer_changes: tuple[LayerChange, ...] = ()
    figure_changes: tuple[FigureChange, ...] = ()
    peak: str = ""
    living: tuple[LivingChange, ...] = ()
    appeared: tuple[Finding, ...] = ()
    gone: tuple[Finding, ...] = ()
    gpu: str = ""
    optimizer: str = ""
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[Totals, Totals]:
        """What the two add up to."""
        return totals(self.before), totals(self.after)

    @property
    def is_same(self) -> bool:
        """Whether nothing that was compared differs."""
        stored = all(pair.same for pair in self.pairs)
        return stored and not (self.layer_changes or any(each.before != each.after for each in self.figure_changes))

    def tables(self) -> dict[str, FlatTable]:
        """`changes`, `layers` and `figures`, as the properties of these names have them, and `living`."""
        return {
            "changes": FlatTable.of(map(_change_record, self.pairs)),
            "layers": FlatTable(_LAYER_FIELDS, map(_layer_row, self.layer_changes)),
            "figures": FlatTable(_FIGURE_FIELDS, map(_figure_row, self.figure_changes), ("before", "after")),
            "living": FlatTable(_LIVING_FIELDS, map(_living_row, self.living)),
        }

    @property
    def changes(self) -> DataFrame:
        """One row per tensor of either model: how each stores it, in bytes, and whether that changed."""
        return self.tables()["changes"].frame()

    @property
    def layers(self) -> DataFrame:
        """One row per layer that changed: its paths, what happened to it, and its sizes before and after."""
        return self.tables()["layers"].frame()

    @property
    def figures(self) -> DataFrame:
        """One row per scenario and figure: bytes before and after."""
        return self.tables()["figures"].frame().astype({"before": "Int64", "after": "Int64"})

    def __repr__(self) -> str:
        first, second = self.totals
        names = (name or trace.model for name, trace in zip(self.names, (self.before, self.after), strict=True))
        lines = [
            f"{name}: {found.parameters:,} parameters, {format_bytes(found.stored)} stored"
            for name, found in zip(names, (first, second), strict=True)
        ]
        lines += [f"{n}. {finding.text()}" for n, finding in enumerate(self.findings, 1)]
        return "\n".join(map(printable, lines))

    __str__ = __repr__


def _stored(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.spec, tensor.bytes, tensor.parts, tensor.tied_to


def stored_as(tensor: StoredTensor) -> str:
    """How a tensor is stored: its dtype, or its wrapper and the dtypes in it."""
    return f"{tensor.wrapper} ({', '.join(stored_dtypes([tensor]))})" if tensor.parts else tensor.spec.dtype


def _change_record(pair: Change) -> dict[str, object]:
    tensor = pair.after or pair.before
    return {
        "name": pair.name,
        "renamed_from": pair.before.name if pair.before and pair.before.name != pair.name else None,
        "layer": tensor.layer if tensor else "",
        "before": stored_as(pair.before) if pair.before else None,
        "after": stored_as(pair.after) if pair.after else None,
        "before_shape": pair.before.spec.shape if pair.before else None,
        "after_shape": pair.after.spec.shape if pair.after else None,
        "before_bytes": pair.before.bytes if pair.before else 0,
        "after_bytes": pair.after.bytes if pair.after else 0,
        "changed": not pair.same,
    }


_SIZE_FIELDS = ("parameters", "stored_bytes", "output_bytes", "saved_bytes")
_LAYER_FIELDS = (
    *("before", "after", "before_type", "after_type", "how", "layers"),
    *(f"{side}_{name}" for name in _SIZE_FIELDS for side in ("before", "after")),
)
_FIGURE_FIELDS = ("scenario", "of", "figure", "before", "after")
_LIVING_FIELDS = ("role", "layer", "op", "phase", "before", "after", "before_bytes", "after_bytes")


def _layer_row(change: LayerChange) -> tuple[object, ...]:
    sizes = [size for both in zip(*change.sizes, strict=True) for size in both]
    return change.before, change.after, *change.types, ", ".join(change.how), change.layers, *sizes


def _figure_row(change: FigureChange) -> tuple[object, ...]:
    return change.scenario, change.of, change.name, change.before, change.after


def _living_row(change: LivingChange) -> tuple[object, ...]:
    before, after = change
    one = after or before
    assert one is not None  # a change is that of one of the two at least
    tensors = (each and f"{each.dtype}[{','.join(map(str, each.shape))}]" for each in change)
    return one.role, one.layer, one.op, one.phase, *tensors, before.bytes if before else 0, after.bytes if after else 0
