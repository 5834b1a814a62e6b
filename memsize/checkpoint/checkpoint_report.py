"""`CheckpointReport`: the answer of `memsize checkpoint`, with its tables and DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from memsize.checkpoint.contents import Group, View
from memsize.checkpoint.findings import Inspection
from memsize.records.answer import Answer
from memsize.records.fields import FlatTable

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class CheckpointReport(Answer, Inspection):
    """The sizes of a checkpoint and their causes. `match` compares it with a model, if one was named."""

    kind: ClassVar = "checkpoint"

    def tables(self) -> dict[str, FlatTable]:
        """`modules`, each tensor by itself, `parts`, `dtypes` and `tensors`."""
        return {
            "modules": self.module_table(),
            "parts": FlatTable(("part", "where", *_FIGURES), map(_row, self.breakdown.parts), _SIZES),
            "dtypes": FlatTable(("dtype", *_FIGURES), (_row(group)[1:] for group in self.breakdown.dtypes), _SIZES),
            "tensors": FlatTable.of(self._tensor_records(), _SIZES),
        }

    def module_table(self, depth: int | None = None) -> FlatTable:
        """One row per module down to `depth` below its part; None takes each tensor by itself."""
        return FlatTable(("part", "module", *_FIGURES), self._module_rows(depth), _SIZES)

    def _module_rows(self, depth: int | None) -> Iterator[tuple[object, ...]]:
        # A generator: a file can have 500,000 tensors, and most readers of `tables` want another table.
        yield from map(_row, self.breakdown.modules(View(depth)))

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

    def _tensor_records(self) -> Iterator[dict[str, object]]:
        files, storages = self.contents.files, self.contents.storages
        for tensor, part in zip(self.contents.tensors, self.breakdown.tensor_parts, strict=True):
            storage = None if tensor.storage is None else storages[tensor.storage]
            yield {
                "name": tensor.name,
                "part": part.kind,
                "dtype": tensor.spec.dtype,
                "shape": list(tensor.spec.shape),
                "elements": tensor.elements,
                "bytes": tensor.bytes,
                "unneeded": tensor.unneeded,
                "shared_with": tensor.shared_with,
                "wrapper": tensor.wrapper,
                "trainable": tensor.trainable,
                "file": files[storage.file].name if storage else None,
                "storage": storage.name if storage else None,
                "offset": storage.offset if storage else None,
            }


_FIGURES = ("tensors", "elements", "dtypes", "bytes", "unneeded")
_SIZES = ("unneeded", "offset")


def _row(group: Group) -> tuple[object, ...]:
    return group.kind, group.name, group.tensors, group.elements, group.dtypes, group.bytes, group.unneeded


def _words_joined(frame: DataFrame) -> DataFrame:
    return frame.assign(dtypes=frame["dtypes"].map(", ".join))
