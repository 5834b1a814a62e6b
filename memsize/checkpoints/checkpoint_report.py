"""`CheckpointReport`: the answer of `memsize checkpoint`, with its tables and DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from memsize.checkpoints.contents import Difference, Group, PartKind, Storage, Tensor, View
from memsize.checkpoints.findings import Inspection
from memsize.records.answer import Answer
from memsize.records.cells import Cell, Share
from memsize.records.fields import BYTES, COUNT, NAME, PATH, SHARE, SPECS, TEXT, WORDS, Fields, FlatTable, field, shown

if TYPE_CHECKING:
    from pandas import DataFrame


_FIGURES: Final = Fields[Group](
    field("tensors", "tensors", COUNT, 50, "how many tensors, shared ones included", adds=True),
    field("elements", "elements", COUNT, 75, "their elements, shared ones once", adds=True),
    field("dtypes", "stored as", WORDS, 70, "the dtypes they are stored in", key="dtype"),
    field("bytes", "needed", BYTES, 95, "bytes that its tensors need, shared ones once", adds=True),
    field("unneeded", "behind views", BYTES, 90, "storage that no tensor covers", adds=True),
    shown(
        "share",
        "% of all",
        SHARE,
        85,
        "of the bytes of all files",
        cell=lambda row, size: _share(row.bytes, size),
        adds=True,
    ),
)
"""The fields of every group of tensors; the bytes of all files are their answer."""


def _share(count: int, size: int) -> Cell:
    return Share(count / size) if size else None


PART_FIELDS: Final = (
    _FIGURES.after(
        field(
            "part",
            "part",
            NAME,
            100,
            "what it is for",
            get=lambda group: group.kind,
            cell=lambda group, _: str(group.kind),
        ),
        field("where", "where", TEXT, 60, "the keys it stands under", get=lambda group: group.name, alone="keys"),
    )
    .titled(bytes="in the file")
    .hinted(bytes="bytes in the files, shared ones once")
)
MODULE_FIELDS: Final = _FIGURES.after(
    field(
        "part",
        "part",
        TEXT,
        55,
        "the part it belongs to",
        get=lambda group: group.kind,
        cell=lambda group, _: str(group.kind),
    ),
    field("module", "module", PATH, 100, "the names' common prefix", get=lambda group: group.name),
)
DTYPE_FIELDS: Final = _FIGURES.after(
    field("dtype", "dtype", NAME, 100, "how elements are stored", get=lambda group: group.name)
).hinted(bytes="bytes that the tensors need, shared ones once")


class TensorRow(NamedTuple):
    """A tensor with its part, and its storage and the file of that, where it has one."""

    tensor: Tensor
    part: PartKind
    storage: Storage | None
    file: str | None


TENSOR_FIELDS: Final = Fields[TensorRow](
    field("name", get=lambda row: row.tensor.name),
    field("part"),
    field("dtype", get=lambda row: row.tensor.spec.dtype),
    field("shape", get=lambda row: list(row.tensor.spec.shape)),
    field("elements", kind=COUNT, get=lambda row: row.tensor.elements),
    field("bytes", kind=BYTES, get=lambda row: row.tensor.bytes),
    field("unneeded", kind=BYTES, get=lambda row: row.tensor.unneeded),
    field("shared_with", get=lambda row: row.tensor.shared_with),
    field("wrapper", get=lambda row: row.tensor.wrapper),
    field("trainable", get=lambda row: row.tensor.trainable),
    field("file"),
    field("storage", get=lambda row: row.storage.name if row.storage else None),
    field("offset", kind=BYTES, get=lambda row: row.storage.offset if row.storage else None),
)


DIFFERENCE_FIELDS: Final = Fields[Difference](
    shown("name", "tensor", PATH, 100, "its name in the model, or in the file if the model has none"),
    shown("problem", "problem", TEXT, 95, "what load_state_dict would complain about"),
    shown("file", "in the file", SPECS, 80, "what the file has", get=lambda row: (row.file,) if row.file else ()),
    shown("model", "in the model", SPECS, 85, "what the model has", get=lambda row: (row.model,) if row.model else ()),
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

    def _tensor_rows(self) -> Iterator[TensorRow]:
        storages = self.contents.storages
        for tensor, part in zip(self.contents.tensors, self.breakdown.tensor_parts, strict=True):
            storage = None if tensor.storage is None else storages[tensor.storage]
            yield TensorRow(tensor, part.kind, storage, self.contents.files[storage.file].name if storage else None)


def _words_joined(frame: DataFrame) -> DataFrame:
    return frame.assign(dtypes=frame["dtypes"].map(", ".join))
