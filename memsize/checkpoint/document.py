"""`CheckpointReport`: what `memsize checkpoint` found out about a file, as a value to read, draw and tabulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memsize.checkpoint.findings import Inspection
from memsize.checkpoint.record import Group, View
from memsize.records.answer import Answer

if TYPE_CHECKING:
    from pandas import DataFrame

    from memsize.documents.sections import Section


@dataclass(frozen=True, repr=False)
class CheckpointReport(Inspection, Answer):
    """What a checkpoint weighs and why. `match` says how it fits a model, when one was named."""

    @property
    def parts(self) -> DataFrame:
        """One row per part: model, EMA, optimizer, scheduler, other."""
        return _frame(self.breakdown.parts).rename(columns={"name": "where"})

    @property
    def dtypes(self) -> DataFrame:
        """One row per dtype."""
        return _frame(self.breakdown.dtypes).rename(columns={"name": "dtype"}).drop(columns=["part", "dtypes"])

    def modules(self, depth: int | None = None) -> DataFrame:
        """One row per module down to `depth` below its part; None takes each tensor by itself."""
        return _frame(self.breakdown.modules(View(depth))).rename(columns={"name": "module"})

    @property
    def tensors(self) -> DataFrame:
        """One row per tensor. `bytes` adds up to what all tensors need; `unneeded` to what is saved along with them."""
        from pandas import DataFrame

        from memsize.checkpoint.formats import tensor_rows

        return DataFrame(list(tensor_rows(self)))

    def _sections(self) -> Sequence[Section]:
        from memsize.checkpoint.sections import sections

        return sections(self)

    def _drawn(self, form: str) -> str:
        from memsize.checkpoint.formats import render

        return render(self, form)


def _frame(groups: tuple[Group, ...]) -> DataFrame:
    from pandas import DataFrame

    rows = [
        {
            "part": group.kind,
            "name": group.name,
            "tensors": group.tensors,
            "elements": group.elements,
            "dtypes": ", ".join(group.dtypes),
            "bytes": group.bytes,
            "unneeded": group.unneeded,
        }
        for group in groups
    ]
    return DataFrame(rows, columns=["part", "name", "tensors", "elements", "dtypes", "bytes", "unneeded"])
