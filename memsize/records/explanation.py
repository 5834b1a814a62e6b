"""`Explanation`: the live blocks in a memory snapshot of a real GPU, and the stacks that allocated them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

from memsize.records.answer import Answer
from memsize.records.codec import Size
from memsize.records.fields import Fields, FlatTable, field, share_of, shown
from memsize.records.finding import Finding
from memsize.records.roles import Role, noun
from memsize.records.timeline import Phase, Segment

Moment = Literal["out of memory", "peak", "end"]
"""The moment that is explained: the last request that failed, else the most live bytes of the history, else the end."""

How = Literal["recorded", "stack", "lifetime", "size", "unknown"]
"""The source of a category: the snapshot names it; or it is inferred from the stack, from the stack and how long the
block lives, or from sizes that are those of the gradients or the optimizer state.
"""

Unknown = Literal["backward", "earlier", "elsewhere"]
"""A category of blocks whose role is not known."""

if TYPE_CHECKING:
    Category = str  # a type checker cannot read the table of roles
else:
    Category = Literal[Role, Unknown]
"""A role, or a key of `UNKNOWN`."""


class Alive(NamedTuple):
    """The live bytes of one category, a role or a key of `UNKNOWN`. `predicted` is the figure to compare with."""

    category: Category
    bytes: Size
    blocks: Size
    how: How
    predicted: int | None = None


class Place(NamedTuple):
    """Live blocks of one category that one stack made: its line above PyTorch, and the program's own that led to it.

    `before` are the bytes of the same in another snapshot, `region` is the compiled code that ran (``"0/0"``).
    """

    bytes: Size
    blocks: Size
    largest: Size
    category: Category
    line: str | None
    function: str
    called_from: str | None
    calls: tuple[str, ...]
    before: int | None = None
    region: str | None = None

    @property
    def growth(self) -> int:
        """The bytes beyond those of the other snapshot."""
        return self.bytes - (self.before or 0)


class Reserved(NamedTuple):
    """The allocator's segments when the snapshot was taken, in bytes.

    `requested` and `rounding` are the live blocks, `waiting` those that another stream may still use. `pieces` are free
    parts of segments in use, `cached` segments without a block in use; `largest` is the largest free block of either.
    """

    requested: Size
    rounding: Size
    waiting: Size
    pieces: Size
    cached: Size
    largest: Size

    @property
    def bytes(self) -> int:
        """All segments together."""
        return self.requested + self.rounding + self.waiting + self.pieces + self.cached

    @property
    def parts(self) -> tuple[ReservedPart, ...]:
        """The parts of the segments that are not empty."""
        parts = (
            ReservedPart("tensors", self.requested),
            ReservedPart("rounding of blocks", self.rounding),
            ReservedPart("given up, but other streams may use it", self.waiting),
            ReservedPart("free between blocks in use", self.pieces),
            ReservedPart("free in whole segments, which empty_cache returns", self.cached),
        )
        return tuple(part for part in parts if part.bytes)


class ReservedPart(NamedTuple):
    """The bytes of the allocator's segments that are for one thing."""

    part: str
    bytes: int


RESERVED_FIELDS: Final = Fields[ReservedPart](
    field("part", "reserved by PyTorch", "text", 100, "use of the allocator's segments"),
    field("bytes", "holds", "bytes", 99, "size of this part", adds=True),
    shown("share", "% of all", "share", 80, "part of all segments", adds=True),
    cell={"share": lambda row, explanation: share_of(row.bytes, explanation.reserved.bytes)},
)


class BlockLife(NamedTuple):
    """A block of the history, made in event `born` and given up in event `died` (None: never).

    `stack` indexes `BlockHistory.stacks`. Blocks that are older than the history come first.
    """

    bytes: Size
    address: Size
    born: Size
    died: int | None
    category: Category
    stack: Size


class MakingStack(NamedTuple):
    """A stack that makes blocks: its line and function as in `Place`, and its calls above PyTorch, outermost first."""

    line: str
    function: str
    calls: tuple[str, ...]


class BlockHistory(NamedTuple):
    """The blocks of a recorded history: each event makes one or gives one up. Event `moment` is explained."""

    moment: Size
    blocks: tuple[BlockLife, ...]
    segments: tuple[Segment, ...]
    phases: tuple[Phase, ...]
    stacks: tuple[MakingStack, ...]

    @property
    def events(self) -> tuple[tuple[int, int], ...]:
        """The events in order: the number of a block, and its bytes, below 0 where it is given up."""
        events = [(block.born, number, block.bytes) for number, block in enumerate(self.blocks)]
        events += [(b.died, number, -b.bytes) for number, b in enumerate(self.blocks) if b.died is not None]
        return tuple((number, change) for _, number, change in sorted(events))


class FailedRequest(NamedTuple):
    """A request for `bytes` that raised OutOfMemoryError with `free` bytes left, the last of `times`; and its line."""

    bytes: Size
    free: int
    line: str | None
    function: str
    stage: str
    times: int


class Predicted(NamedTuple):
    """The run to compare with: a prediction, or another snapshot, whose name is the `model`; and its peak.

    `levels` are its live bytes at each event of the history: none without one, or where the runs have little in common.
    """

    model: str
    scenario: str
    requested: Size
    reserved: Size
    levels: tuple[Size, ...] = ()

    @property
    def is_snapshot(self) -> bool:
        """Tell a snapshot from a prediction: no scenario is known of it."""
        return not self.scenario


HOW: Final[Mapping[How, str]] = {
    "recorded": "the snapshot says so",
    "stack": "inferred from the stack",
    "lifetime": "inferred from stack and lifetime",
    "size": "inferred from the size",
    "unknown": "",
}
"""The titles of `How` in tables."""

ALIVE_FIELDS: Final = Fields[Alive](
    field("category", "alive", "text", 100, "role of the blocks", cell=lambda row, _: noun(row.category)),
    field("bytes", "holds", "bytes", 99, "live bytes at that moment"),
    shown("share", "% of all", "share", 80, "part of all live bytes"),
    field("blocks", "blocks", "count", 70, "number of blocks"),
    field("how", "known by", "text", 60, "evidence for the category", cell=lambda row, _: HOW[row.how] or None),
    field("predicted", "predicted", "bytes", 95, "live bytes at the peak that memsize predicts"),
    shown("difference", "difference", "signed", 90, "found minus predicted"),
    get={"difference": lambda row: None if row.predicted is None else row.bytes - row.predicted},
    cell={
        "share": lambda row, explanation: share_of(row.bytes, explanation.requested) if explanation.requested else None,
    },
)

PLACE_FIELDS: Final = Fields[Place](
    field("bytes", "holds", "bytes", 100, "live bytes of all its blocks"),
    field("before", "before", "bytes", 98, "live bytes of the same in the other snapshot", nullable=True),
    shown("growth", "difference", "signed", 97, "growth since the other snapshot"),
    field("blocks", "blocks", "count", 90, "number of blocks"),
    field("largest", "largest", "bytes", 70, "the largest of them"),
    field("category", "as", "text", 95, "their role", alone="role", cell=lambda row, _: noun(row.category)),
    field("line", "made at", "text", 99, "the line above PyTorch that allocates"),
    field(
        "function",
        "in",
        "text",
        85,
        "the function that the line is in; of backward the autograd node",
        alone="function",
    ),
    field("called_from", "called from", "text", 80, "the program's own line, if it is a different one"),
    field("region", "compiled", "text", 60, "the region of torch.compile whose code ran"),
    field("calls", get=lambda row: "; ".join(row.calls)),
    cell={"function": lambda row, _: row.function or None},
)


@dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """Live blocks on `device` at one `moment`, by category and by stack; the bytes of `alive` add up to `requested`.

    `reserved_then` are the segments at that moment, `reserved` the state of the allocator when the snapshot was taken.
    `predicted` is the peak to compare with. `line` is the program's line at the moment, `entries` the length of the
    recorded history, and `history` its blocks (None where nothing was recorded).
    """

    kind: ClassVar = "explanation"

    snapshot: str
    device: int
    moment: Moment
    requested: Size
    reserved_then: int
    line: str | None
    alive: tuple[Alive, ...]
    places: tuple[Place, ...]
    reserved: Reserved
    failed: FailedRequest | None
    entries: int
    predicted: Predicted | None = None
    history: BlockHistory | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    def tables(self) -> dict[str, FlatTable]:
        """`places`: one row for each stack whose blocks are alive; `alive`: one row for each category."""
        return {"places": PLACE_FIELDS.flat(self.places), "alive": ALIVE_FIELDS.flat(self.alive)}
