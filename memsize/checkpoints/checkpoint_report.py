"""`CheckpointReport`: the answer of `memsize checkpoint`, with its tables and DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from memsize.checkpoints.breakdown import halved
from memsize.checkpoints.contents import Difference, FileRecord, Group, PartKind, Storage, Tensor, Use, View
from memsize.checkpoints.findings import Inspection
from memsize.records.answer import Answer
from memsize.records.dtypes import BITS
from memsize.records.fields import (
    Cell,
    Field,
    Fields,
    FlatTable,
    Share,
    field,
    shown,
)

if TYPE_CHECKING:
    from pandas import DataFrame


def _share(row: Group | Remaining, size: int) -> Cell:
    return Share(row.bytes / size) if size else None


_FIGURES: Final = Fields[Group](
    field("tensors", "tensors", "count", 50, "number of tensors, shared ones included", adds=True),
    field("elements", "elements", "count", 75, "elements of the tensors, shared ones once", adds=True),
    field("dtypes", "stored as", "words", 70, "the dtypes they are stored in", key="dtype"),
    field("bytes", "needed", "bytes", 95, "bytes that its tensors need, shared ones once", adds=True),
    field("unneeded", "behind views", "bytes", 90, "storage that no tensor covers", adds=True),
    shown("share", "% of all", "share", 85, "share of the bytes of all files", cell=_share, adds=True),
)
"""The fields of every group of tensors; the bytes of all files are their answer."""

PART_FIELDS: Final = (
    _FIGURES.after(
        field("part", "part", "name", 100, "its role", get="kind"),
        field("where", "where", "text", 60, "the keys that lead to it", get="name", alone="keys"),
    )
    .titled(bytes="in the file")
    .hinted(bytes="bytes in the files, shared ones once")
)
MODULE_FIELDS: Final = _FIGURES.after(
    field("part", "part", "text", 55, "the part it belongs to", get="kind"),
    field("module", "module", "path", 100, "common prefix of the names", get="name"),
)
DTYPE_FIELDS: Final = _FIGURES.after(
    field("dtype", "dtype", "name", 100, "storage format of the elements", get="name")
).hinted(bytes="bytes that the tensors need, shared ones once")


class TensorRow(NamedTuple):
    """A tensor with its part, and its storage and the file of that, where it has one."""

    tensor: Tensor
    part: PartKind
    storage: Storage | None
    file: str | None


TENSOR_FIELDS: Final = Fields[TensorRow](
    field("name", get="tensor.name"),
    field("part"),
    field("dtype", get="tensor.spec.dtype"),
    field("shape", get=lambda row: list(row.tensor.spec.shape)),
    field("elements", kind="count", get="tensor.elements"),
    field("bytes", kind="bytes", get="tensor.bytes"),
    field("unneeded", kind="bytes", get="tensor.unneeded"),
    field("shared_with", get="tensor.shared_with"),
    field("wrapper", get="tensor.wrapper"),
    field("trainable", get="tensor.trainable"),
    field("file"),
    field("storage", get="storage.name"),
    field("offset", kind="bytes", get="storage.offset"),
)


DIFFERENCE_FIELDS: Final = Fields[Difference](
    shown("name", "tensor", "path", 100, "its name in the model, or in the file if the model has none"),
    shown("problem", "problem", "text", 95, "the problem that load_state_dict would report"),
    shown("file", "in the file", "specs", 80, "shape in the file", get=lambda row: (row.file,) if row.file else ()),
    shown(
        "model", "in the model", "specs", 85, "shape in the model", get=lambda row: (row.model,) if row.model else ()
    ),
)


class FileRow(NamedTuple):
    """One file, or several that share a row, by a `name`."""

    name: str
    files: tuple[FileRecord, ...]

    def bytes_for(self, use: Use) -> int:
        """The bytes that are for `use`."""
        return sum(file.bytes_for(use) for file in self.files)


def _use(use: Use, title: str, hint: str, name: str = "", weight: int = 60) -> Field[FileRow]:
    return field(name or use, title, "bytes", weight, hint, get=lambda row: row.bytes_for(use), adds=True)


USE_FIELDS: Final = Fields[FileRow](
    _use("metadata", "metadata", "tokenizer, settings"),
    _use("pickle", "pickled objects", "all but tensor data"),
    _use("headers", "headers", "names and places"),
    _use("padding", "padding", "alignment"),
    _use("other", "other records", "code, other files"),
    _use("unclaimed", "nothing known", "in no record"),
)
"""What bytes of files are for that are not tensor data."""

FILE_FIELDS: Final = USE_FIELDS.after(
    field("file", "file", "name", 100, "its name", get="name"),
    field(
        "tensors",
        "tensors",
        "count",
        50,
        "how many tensors it has",
        get=lambda row: sum(f.tensors for f in row.files),
        adds=True,
    ),
    _use("tensors", "tensor data", "bytes of tensor data", name="data", weight=90),
).plus(field("size", "size", "bytes", 95, "its size", get=lambda row: sum(f.size for f in row.files), adds=True))


class Remaining(NamedTuple):
    """The `bytes` of tensor data that would be left of the `selection` alone."""

    selection: str
    bytes: int


REMAINING_FIELDS: Final = Fields[Remaining](
    field("kept", "if you keep only", "name", 100, "the parts to keep", get="selection"),
    field("bytes", "remains", "bytes", 95, "bytes of tensor data; headers come on top"),
    shown("share", "% of now", "share", 85, "share of the bytes of all files", cell=_share),
)


@dataclass(frozen=True, repr=False)
class CheckpointReport(Answer, Inspection):
    """The sizes of a checkpoint and their causes. `match` compares it with a model, if one was named."""

    kind: ClassVar = "checkpoint"

    def tables(self) -> dict[str, FlatTable]:
        """`modules`, each tensor by itself, `parts`, `dtypes` and `tensors`."""
        return {
            "modules": self.module_table(),
            "parts": PART_FIELDS.flat(self.breakdown.parts),
            "dtypes": DTYPE_FIELDS.flat(self.breakdown.dtypes),
            "tensors": TENSOR_FIELDS.flat(self._tensor_rows()),
        }

    def module_table(self, depth: int | None = None) -> FlatTable:
        """One row per module down to `depth` below its part; None takes each tensor by itself."""
        return MODULE_FIELDS.flat(self.breakdown.modules(View(depth)))

    @property
    def parts(self) -> DataFrame:
        """One row per part: model, EMA, optimizer, scheduler, other."""
        return _words_joined(self.tables()["parts"].frame())

    @property
    def dtypes(self) -> DataFrame:
        """One row per dtype."""
        return self.tables()["dtypes"].frame().drop(columns="dtypes")

    def modules(self, depth: int | None = None) -> DataFrame:
        """One row per module down to `depth` below its part; None takes each tensor by itself."""
        return _words_joined(self.module_table(depth).frame())

    @property
    def tensors(self) -> DataFrame:
        """One row per tensor. `bytes` adds up to what all tensors need; `unneeded` to what is saved along with them."""
        return self.tables()["tensors"].frame()

    def remaining(self) -> Iterator[Remaining]:
        """Yield each choice of tensors to keep: all, the model's (or EMA's), these in float16."""
        everything = list(self.contents.tensors)
        yield Remaining("the tensors", sum(tensor.bytes for tensor in everything))
        for kind in ("model", "EMA"):
            tensors = self.breakdown.of(kind)
            if tensors and (kind == "model" or self.breakdown.of("model")):
                weights = _alone(tensors)
                size = sum(tensor.bytes for tensor in weights)
                if len(tensors) < len(everything):
                    yield Remaining(f"the {kind}'s weights", size)
                if halved(weights) < size:
                    yield Remaining(f"the {kind}'s weights in float16", halved(weights))

    def _tensor_rows(self) -> Iterator[TensorRow]:
        storages = self.contents.storages
        for tensor, part in zip(self.contents.tensors, self.breakdown.tensor_parts, strict=True):
            storage = None if tensor.storage is None else storages[tensor.storage]
            yield TensorRow(tensor, part.kind, storage, self.contents.files[storage.file].name if storage else None)


def _words_joined(frame: DataFrame) -> DataFrame:
    return frame.assign(dtypes=frame["dtypes"].map(", ".join))


def _alone(tensors: list[Tensor]) -> list[Tensor]:
    """Return `tensors` as if stored alone: one that shares bytes with a tensor outside gets an estimated full size."""
    names = {tensor.name for tensor in tensors}
    return [
        tensor
        if tensor.shared_with is None or tensor.shared_with in names
        else replace(tensor, bytes=tensor.elements * BITS.get(tensor.spec.dtype, 0) + 7 >> 3)
        for tensor in tensors
    ]
