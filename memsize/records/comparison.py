"""`Comparison`: what two models store, tensor by tensor, and what changed from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from memsize.printable import printable
from memsize.records.aggregates import Totals, stored_dtypes, totals
from memsize.records.answer import Answer, FlatTable
from memsize.records.finding import Finding
from memsize.records.trace import StoredTensor, Trace
from memsize.units import format_bytes

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor in both models; None where it is only in the other."""

    name: str
    before: StoredTensor | None
    after: StoredTensor | None

    @property
    def bytes(self) -> int:
        """How many bytes more the second model stores."""
        return (self.after.bytes if self.after else 0) - (self.before.bytes if self.before else 0)

    @property
    def same(self) -> bool:
        """Whether both store the tensor alike."""
        return self.before is not None and self.after is not None and _stored(self.before) == _stored(self.after)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Answer):
    """Two traces, tensor by tensor. It prints as a few sentences, in a notebook as a page; `changes` is the table
    behind them.
    """

    kind: ClassVar = "comparison"

    before: Trace
    after: Trace
    pairs: tuple[Change, ...]
    findings: tuple[Finding, ...]

    @property
    def totals(self) -> tuple[Totals, Totals]:
        """What the two add up to."""
        return totals(self.before), totals(self.after)

    def tables(self) -> dict[str, FlatTable]:
        """`changes`, as the property of this name has it."""
        return {"changes": FlatTable.of(map(_change_record, self.pairs))}

    @property
    def changes(self) -> DataFrame:
        """One row per tensor of either model: how each stores it, in bytes, and whether that changed."""
        return self.tables()["changes"].frame()

    def __repr__(self) -> str:
        first, second = self.totals
        lines = [f"{self.before.model}: {first.parameters:,} parameters, {format_bytes(first.stored)} stored"]
        lines += [f"{self.after.model}: {second.parameters:,} parameters, {format_bytes(second.stored)} stored"]
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
        "layer": tensor.layer if tensor else "",
        "before": stored_as(pair.before) if pair.before else None,
        "after": stored_as(pair.after) if pair.after else None,
        "before_bytes": pair.before.bytes if pair.before else 0,
        "after_bytes": pair.after.bytes if pair.after else 0,
        "changed": not pair.same,
    }
