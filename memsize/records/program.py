"""`ProgramRun`: what a program would do to a GPU, as its run on a virtual one showed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from memsize.records.answer import Answer, FlatTable
from memsize.records.finding import Finding
from memsize.records.gpu import Card, GpuEstimate
from memsize.records.roles import Role
from memsize.records.trace import Trace


class LiveTensor(NamedTuple):
    """A storage that is alive at the peak, and the line of the program (``"train.py:41"``) that made it."""

    bytes: int
    role: Role
    dtype: str
    shape: tuple[int, ...]
    layer: str | None
    op: str
    phase: str
    line: str | None


class Refused(NamedTuple):
    """A request for `bytes` that the card could not serve, with `free` bytes left: PyTorch raises OutOfMemoryError."""

    bytes: int
    free: int
    reserved: int
    op: str
    layer: str | None
    phase: str
    line: str | None


class Assumed(NamedTuple):
    """What was taken for granted, and the first line that relied on it."""

    text: str
    line: str | None


class Survivors(NamedTuple):
    """Bytes of step `step` that are still alive at the end, and the line that made most of them."""

    step: int
    bytes: int
    line: str | None


@dataclass(frozen=True)
class ProgramRun(Answer):
    """A program's run on `card`: `steps` optimizer steps, after which it was stopped, or its own end.

    `capacity` is what the card leaves to PyTorch's allocator, `peak` the peak as the GPU would report it. `survivors`
    are the training steps' storages that no step after them let go. `failure` is how the program ended, where it
    failed.
    """

    kind: ClassVar = "program"

    program: str
    trace: Trace
    card: Card
    capacity: int
    peak: GpuEstimate
    steps: int
    stopped: bool
    tensors: tuple[LiveTensor, ...] = ()
    refused: tuple[Refused, ...] = ()
    assumed: tuple[Assumed, ...] = ()
    survivors: tuple[Survivors, ...] = ()
    kept_gradients: int = 0
    """Bytes of gradients that are alive when a later step's forward begins."""
    unwritten: tuple[str, ...] = ()
    """What the program would have written, and was kept from writing."""
    failure: str | None = None
    allocator: str | None = None
    findings: tuple[Finding, ...] = field(default=())

    def tables(self) -> dict[str, FlatTable]:
        """`tensors`: the largest storages alive at the peak, one row for each."""
        rows = (
            (t.bytes, t.role, t.dtype, ",".join(map(str, t.shape)), t.layer, t.op, t.phase, t.line)
            for t in self.tensors
        )
        return {"tensors": FlatTable(LiveTensor._fields, rows)}
