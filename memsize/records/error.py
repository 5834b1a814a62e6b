"""`OutOfMemoryReport`: the memory of a GPU as an out-of-memory error of PyTorch describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from memsize.records.answer import Answer
from memsize.records.codec import Size
from memsize.records.explanation import FailedRequest
from memsize.records.fields import Fields, FlatTable, field, share_of, shown
from memsize.records.finding import Finding


class Process(NamedTuple):
    """A process on the GPU, with the bytes that it uses."""

    number: Size
    bytes: Size


class MemoryUse(NamedTuple):
    """The bytes of the GPU that are for one thing."""

    use: str
    bytes: int


USE_FIELDS: Final = Fields[MemoryUse](
    field("use", "memory of the GPU", "text", 100, "use of the GPU's memory"),
    field("bytes", "holds", "bytes", 99, "size of this part, to the two digits of the message", adds=True),
    shown("share", "% of all", "share", 80, "part of the GPU's memory", adds=True),
    cell={"share": lambda row, report: share_of(row.bytes, report.total)},
)

TENSORS: Final = "tensors"
PIECES: Final = "free between blocks in use"
POOLS: Final = "free in pools of CUDA graphs"
OUTSIDE: Final = "outside PyTorch, in this process"
UNSEEN: Final = "unseen processes and the driver"
BESIDE: Final = "outside PyTorch, and other processes"
FREE: Final = "free"


@dataclass(frozen=True, repr=False)
class OutOfMemoryReport(Answer):
    """The last out-of-memory error on GPU `device` in the text `source`, and what it says about the `total` memory.

    PyTorch had reserved `tensors`, `pieces` that were free between them, and `pools`, which are free for CUDA graphs
    alone. `process` is what this process used, including all outside PyTorch's allocator (None: the message does not
    say); `others` are the other processes on the GPU. `allowed` is the limit that a program set for itself.
    """

    kind: ClassVar = "error"

    source: str
    device: int
    failed: FailedRequest
    total: Size
    tensors: Size
    pieces: Size
    pools: Size = 0
    process: int | None = None
    others: tuple[Process, ...] = ()
    allowed: int | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reserved(self) -> int:
        """The segments of PyTorch's allocator."""
        return self.tensors + self.pieces + self.pools

    @property
    def outside(self) -> int:
        """The bytes of this process outside PyTorch's allocator; 0 if the message does not say."""
        return max((self.process or 0) - self.reserved, 0)

    @property
    def rest(self) -> int:
        """The bytes that are neither free nor in what the message lists."""
        used = max(self.process or 0, self.reserved) + sum(process.bytes for process in self.others)
        return max(self.total - self.failed.free - used, 0)

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """The memory of the GPU by its use, without those that have none."""
        return tuple(use for use in self._uses() if use.bytes)

    def _uses(self) -> Iterator[MemoryUse]:
        yield MemoryUse(TENSORS, self.tensors)
        yield MemoryUse(PIECES, self.pieces)
        yield MemoryUse(POOLS, self.pools)
        yield MemoryUse(OUTSIDE, self.outside)
        yield from (MemoryUse(f"process {process.number}", process.bytes) for process in self.others)
        yield MemoryUse(UNSEEN if self.process else BESIDE, self.rest)
        yield MemoryUse(FREE, self.failed.free)

    def tables(self) -> dict[str, FlatTable]:
        """`memory`: one row for each use of the GPU's memory."""
        return {"memory": USE_FIELDS.flat(self.uses)}
