"""`Comparison`: two models or files, tensor by tensor and layer by layer, and what changed from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

from memsize.printable import printable
from memsize.records.aggregates import Totals, stored_dtypes, totals
from memsize.records.answer import Answer, TableFrame
from memsize.records.fields import (
    Fields,
    FlatTable,
    Missing,
    Path,
    Words,
    field,
    shown,
)
from memsize.records.finding import Finding
from memsize.records.gpu import LiveStorage
from memsize.records.report import FIGURES, SCENARIO_FIELDS
from memsize.records.roles import TITLES
from memsize.records.trace import StoredTensor, Trace
from memsize.units import Bytes, format_bytes


class ComparedModel(NamedTuple):
    """One of the two models by the `name` of its side, with its `totals`; `ran` says whether a forward was run."""

    name: str
    totals: Totals
    dtypes: tuple[str, ...]
    ran: bool


MODEL_FIELDS: Final = Fields[ComparedModel](
    field("model", "model", "name", 100, "before or after the change", get="name"),
    field("parameters", "parameters", "count", 90, "elements of its parameters", get="totals.parameters"),
    field("dtypes", "stored as", "words", 80, "the dtypes of its tensors"),
    field("stored", "stored", "bytes", 95, "bytes of all its tensors", get="totals.stored"),
    field("saved", "kept for backward", "bytes", 70, "bytes that a forward keeps for backward, if one was run"),
    get={"saved": lambda row: row.totals.saved_bytes if row.ran else None},
)


def stored_as(tensor: StoredTensor) -> str:
    """Describe the storage of a tensor: its dtype, or its wrapper and the dtypes in it."""
    return f"{tensor.wrapper} ({', '.join(stored_dtypes([tensor]))})" if tensor.parts else tensor.spec.dtype


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor in both models; a side is None where its model lacks it. `name` is the name in the second model."""

    name: str
    before: StoredTensor | None
    after: StoredTensor | None

    @property
    def either(self) -> StoredTensor | None:
        """The tensor in the second model, or else in the first."""
        return self.after or self.before

    @property
    def bytes(self) -> int:
        """Stored bytes in the second model less those in the first."""
        return (self.after.bytes if self.after else 0) - (self.before.bytes if self.before else 0)

    @property
    def resized(self) -> bool:
        """True if the tensor has another shape in the second model."""
        return self.before is not None and self.after is not None and self.before.spec.shape != self.after.spec.shape

    @property
    def same(self) -> bool:
        """Whether both store the tensor alike."""
        before, after = (
            tensor and (tensor.spec, tensor.bytes, tensor.parts, tensor.tied_to) for tensor in (self.before, self.after)
        )
        return before is not None and before == after


CHANGE_FIELDS: Final = Fields[Change](
    field("name"),
    field("renamed_from", get=lambda row: row.before.name if row.before and row.before.name != row.name else None),
    field("layer", get=lambda row: row.either.layer if row.either else ""),
    field("before", get=lambda row: row.before and stored_as(row.before)),
    field("after", get=lambda row: row.after and stored_as(row.after)),
    field("before_shape", get="before.spec.shape"),
    field("after_shape", get="after.spec.shape"),
    field("before_bytes", kind="bytes", get=lambda row: row.before.bytes if row.before else 0),
    field("after_bytes", kind="bytes", get=lambda row: row.after.bytes if row.after else 0),
    field("changed", get=lambda row: not row.same),
)


How = Literal["added", "removed", "renamed", "resized", "replaced", "stored differently", "output shape changed"]
"""Changes of a layer: it has another path, tensors of other shapes, another type, other dtypes or bytes; or it
stores the same, but its outputs or what it keeps for backward have other sizes."""


FigureOf = Literal["run", "inference peak", "training peak", "file"]
"""The origin of a figure: the run that the tables show, the peak of an inference or of a training step on a GPU, or a
checkpoint's file."""


class LayerSizes(NamedTuple):
    """The sums of several layers: `parameters` in elements, and in bytes `stored` tensors, new `outputs`, and tensors
    `kept` for backward."""

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


def _moved(before: str | None, after: str | None) -> Path:
    """The path of a layer, and its earlier path where the two differ."""
    if before is None or after is None or before == after:
        return Path(before if after is None else after)
    return Path(" → ".join(path or "(model)" for path in (before, after)))


LAYER_FIELDS: Final = Fields[LayerChange](
    field("before"),
    field("after"),
    shown("layer", "layer", "name", 100, "its path, and the former one"),
    shown("type", "type", "text", 50, "its class", get=lambda row: " → ".join(dict.fromkeys(filter(None, row.types)))),
    field("before_type", get=lambda row: row.types[0]),
    field("after_type", get=lambda row: row.types[1]),
    field("how", "change", "words", 95, "kind of change", get=lambda row: ", ".join(row.how)),
    field("layers", kind="count"),
    field("before_parameters", kind="count", get=lambda row: row.sizes[0].parameters),
    field("after_parameters", "parameters", "count", 70, "elements of its parameters afterwards", key="parameters"),
    field("before_stored_bytes", "stored before", "bytes", 80, "bytes that it stored before", key="before"),
    field("after_stored_bytes", "stored after", "bytes", 85, "bytes that it stores", key="after"),
    shown("stored_change", "change", "signed", 90, "growth of its stored bytes", key="change"),
    field("before_output_bytes", kind="bytes", get=lambda row: row.sizes[0].outputs),
    field("after_output_bytes", kind="bytes", get=lambda row: row.sizes[1].outputs),
    field("before_saved_bytes", kind="bytes", get=lambda row: row.sizes[0].kept),
    field("after_saved_bytes", kind="bytes", get=lambda row: row.sizes[1].kept),
    shown("saved_change", "kept, change", "signed", 75, "growth of the bytes that it keeps for backward", key="kept"),
    get={
        "after_parameters": lambda row: row.sizes[1].parameters,
        "before_stored_bytes": lambda row: row.sizes[0].stored,
        "after_stored_bytes": lambda row: row.sizes[1].stored,
        "stored_change": lambda row: row.sizes[1].stored - row.sizes[0].stored,
        "saved_change": lambda row: row.sizes[1].kept - row.sizes[0].kept,
    },
    cell={
        "layer": lambda row, _: _moved(row.before, row.after),
        "how": lambda row, _: Words((*row.how, *([f"{row.layers} layers"] if row.layers > 1 else []))),
    },
    adds=("after_parameters", "before_stored_bytes", "after_stored_bytes", "stored_change", "saved_change"),
)


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

    @property
    def change(self) -> int | None:
        """Bytes after less bytes before; None where either is not known."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def share(self) -> float | None:
        """The change as a share of the earlier figure."""
        return None if self.change is None or not self.before else self.change / self.before


_TITLES: Final = {
    **{figure.name: figure.title for figure in SCENARIO_FIELDS.only(*FIGURES)},
    **{role: title.noun for role, title in TITLES.items()},
    "device": "device, at most",
}
"""Titles of figures and roles in tables; others have their own name as title."""


_NO_FIGURE: Final = Missing("this side has no such figure")

FIGURE_FIELDS: Final = Fields[FigureChange](
    field("scenario", "scenario", "name", 90, "how the models are stored and run"),
    field("of", "of", "text", 85, "the run, or the peak of an inference or of a training step", alone="run or peak"),
    field("figure", "figure", "text", 100, "name of the figure", get="name"),
    field("before", "before", "bytes", 80, "bytes of the first", nullable=True),
    field("after", "after", "bytes", 85, "bytes of the second", nullable=True),
    shown("change", "change", "signed", 95, "after − before"),
    shown("share", "%", "change", 70, "the change as a share of the former size"),
    cell={
        "figure": lambda row, _: _TITLES.get(row.name, row.name),
        "before": lambda row, _: _NO_FIGURE if row.before is None else Bytes(row.before),
        "after": lambda row, _: _NO_FIGURE if row.after is None else Bytes(row.after),
    },
)


class LivingChange(NamedTuple):
    """One of the largest storages alive at the peak of either model; None where the other has none like it."""

    before: LiveStorage | None
    after: LiveStorage | None

    @property
    def either(self) -> LiveStorage:
        """The storage in the second model, or else in the first: it is alive in one at least."""
        storage = self.after or self.before
        assert storage is not None
        return storage

    @property
    def bytes(self) -> int:
        """Bytes in the second model less those in the first."""
        return (self.after.bytes if self.after else 0) - (self.before.bytes if self.before else 0)


LIVING_FIELDS: Final = Fields[LivingChange](
    field("role", "role", "text", 95, "its role", get="either.role"),
    field("layer", "layer", "path", 90, "the layer that it belongs to or was made in", get="either.layer"),
    field("op", "op", "text", 70, "the op that made it", get="either.op"),
    field("phase", get="either.phase"),
    shown("tensors", "tensor", "text", 85, "its dtype and shape in both models"),
    field("before", get="before.tensor"),
    field("after", get="after.tensor"),
    field("before_bytes", "before", "bytes", 80, "bytes of the first", key="before"),
    field("after_bytes", "after", "bytes", 85, "bytes of the second", key="after"),
    shown("change", "change", "signed", 100, "after − before", get="bytes"),
    get={
        "tensors": lambda row: " → ".join(dict.fromkeys(entry.tensor for entry in row if entry)),
        "before_bytes": lambda row: row.before.bytes if row.before else 0,
        "after_bytes": lambda row: row.after.bytes if row.after else 0,
    },
)


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
        """The totals of the first model or file, and of the second."""
        return totals(self.before), totals(self.after)

    @property
    def is_same(self) -> bool:
        """Whether nothing that was compared differs."""
        stored = all(pair.same for pair in self.pairs)
        return stored and not (self.layer_changes or any(entry.before != entry.after for entry in self.figure_changes))

    def tables(self) -> dict[str, FlatTable]:
        """`changes`, `layers` and `figures`, as the properties of these names have them, and `living`."""
        return {
            "changes": CHANGE_FIELDS.flat(self.pairs),
            "layers": LAYER_FIELDS.flat(self.layer_changes),
            "figures": FIGURE_FIELDS.flat(self.figure_changes),
            "living": LIVING_FIELDS.flat(self.living),
        }

    changes = TableFrame("changes", "One row per tensor of either model: how each stores it, and whether that changed.")
    layers = TableFrame(
        "layers", "One row per layer that changed: its paths, the change, and its sizes before and after."
    )
    figures = TableFrame("figures", "One row per scenario and figure: bytes before and after.")

    def __str__(self) -> str:
        lines = [
            f"{name or trace.model}: {sums.parameters:,} parameters, {format_bytes(sums.stored)} stored"
            for name, trace, sums in zip(self.names, (self.before, self.after), self.totals, strict=True)
        ]
        lines += [f"{n}. {finding.text()}" for n, finding in enumerate(self.findings, 1)]
        return "\n".join(map(printable, lines))
