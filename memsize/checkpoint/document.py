"""`CheckpointReport`: what `memsize checkpoint` found out about a file, as a value to read, draw and tabulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memsize.checkpoint.against import Match
from memsize.checkpoint.anatomy import Anatomy, Group, View
from memsize.checkpoint.findings import findings
from memsize.checkpoint.record import Contents
from memsize.records.answer import Answer
from memsize.records.finding import Finding

if TYPE_CHECKING:
    from pandas import DataFrame

    from memsize.documents.sections import Section


@dataclass(frozen=True, repr=False)
class CheckpointReport(Answer):
    """What a checkpoint weighs and why. `match` says how it fits a model, when one was named."""

    contents: Contents
    match: Match | None = None

    @cached_property
    def anatomy(self) -> Anatomy:
        """The parts, dtypes and modules."""
        return Anatomy(self.contents)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What makes it larger than what it is for, and what is odd about it."""
        return findings(self.anatomy, self.match)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return self.contents.size

    @property
    def parts(self) -> DataFrame:
        """One row per part: model, EMA, optimizer, scheduler, other."""
        return _frame(self.anatomy.parts).rename(columns={"name": "where"})

    @property
    def dtypes(self) -> DataFrame:
        """One row per dtype."""
        return _frame(self.anatomy.dtypes).rename(columns={"name": "dtype"}).drop(columns=["part", "dtypes"])

    def modules(self, depth: int | None = None) -> DataFrame:
        """One row per module down to `depth` below its part; None takes each tensor by itself."""
        return _frame(self.anatomy.modules(View(depth))).rename(columns={"name": "module"})

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
