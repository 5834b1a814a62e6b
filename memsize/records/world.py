"""`World`: the rank of a run in its distributed job; and the collectives in which it takes part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

from memsize.errors import InputError
from memsize.records.codec import Index, Size

MOST_RANKS: Final = 2**20


@dataclass(frozen=True, slots=True)
class World:
    """Process `rank` of `size`, spread evenly over `nodes` machines; ranks are counted from 0, machine by machine.

    With `one_process`, a single process drives all `size` GPUs of its machine, as `nn.DataParallel` does, and `rank` is
    the number of the GPU that is looked at.

    Raises `InputError` where there is no such process.
    """

    size: int = 1
    rank: int = 0
    nodes: int = 1
    one_process: bool = False

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("rank", self.rank), ("number of nodes", self.nodes)):
            if type(value) is not int:
                raise InputError(f"the {name} of a world is a whole number, not {value!r}")
        if not 1 <= self.size <= MOST_RANKS:
            raise InputError(f"a world of {self.size} processes: it has from 1 to {MOST_RANKS:,}")
        if not 0 <= self.rank < self.size:
            raise InputError(f"no rank {self.rank} among {self.size}: they are counted from 0 to {self.size - 1}")
        if self.nodes < 1 or self.size % self.nodes:
            raise InputError(f"{self.size} processes cannot be spread evenly over {self.nodes} nodes")
        if self.one_process and self.nodes > 1:
            raise InputError(f"one process has the GPUs of its own machine, not those of {self.nodes} nodes")

    @property
    def local_size(self) -> int:
        """How many processes, and GPUs, each machine has."""
        return self.size // self.nodes

    @property
    def local_rank(self) -> int:
        """The number of the process, and of its GPU, on its own machine."""
        return self.rank % self.local_size

    @property
    def node(self) -> int:
        """The number of its machine."""
        return self.rank // self.local_size

    def __str__(self) -> str:
        return f"{'GPU' if self.one_process else 'rank'} {self.rank} of {self.size}"


ALONE: Final = World()
"""A process that is the only one."""

CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "reduce", "gather", "scatter", "send",
    "receive", "barrier",
]  # fmt: skip


class Collective(NamedTuple):
    """One collective of a run, or one message to another rank.

    `bytes` is the larger of what this rank gives and what it gets: the whole of what is gathered, scattered or reduced.
    `ranks` is how many take part. `phase` and `layer` are as in `Event`; `event` is how many events came before.
    `group` numbers the groups of processes as they are first used; -1 where one process has all of the GPUs. `stream`
    is the CUDA stream that what it writes is allocated on.
    """

    kind: CollectiveKind
    bytes: Size
    ranks: int
    phase: Annotated[int, Index("phases")]
    layer: Annotated[int, Index("layers", optional=True)]
    event: Annotated[int, Index("events", end=True)]
    group: int = -1
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind in one step among `ranks` ranks: their number, their bytes, and those of the largest.

    Bytes are as in `Collective`.
    """

    kind: CollectiveKind
    ranks: int
    count: int
    bytes: int
    largest: int
