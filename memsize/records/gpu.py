"""GPUs as records: a card, and the memory it would report for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from memsize.records.codec import Size
from memsize.records.fields import Fields, Label, field
from memsize.records.roles import Role
from memsize.records.trace import PRIVATE_POOL
from memsize.records.world import CollectiveKind, Traffic

DEFAULT_GPU: Final = "A100 40GB"
"""The GPU that is simulated where none is named."""

Platform = Literal["CUDA", "ROCm", "MPS"]


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. `capability` is its compute capability, `bytes` its total for CUDA, `source` where that is from.

    `platform` is what PyTorch runs it by. Only CUDA's kernels are predicted: elsewhere `capability` is that of the card
    whose kernels stand in, and only `bytes` is the card's own. Some drivers leave up to `spread` bytes more.
    """

    name: str
    capability: tuple[int, int]
    bytes: Size
    source: str
    aliases: tuple[str, ...] = ()
    platform: Platform = "CUDA"
    spread: Size = 0

    @property
    def kernels(self) -> tuple[object, ...]:
        """The key of the kernels that this card runs: cards with an equal key run the same ones, on another number of
        multiprocessors.
        """
        return self.capability, self.platform

    @property
    def note(self) -> str | None:
        """A remark that figures for this card need; None for a CUDA card, which needs none."""
        if self.platform == "CUDA":
            return None
        return (
            f"of a GPU that PyTorch runs by {self.platform} only the memory is known: kernels, library workspaces and "
            f"the allocator are those of CUDA on an {DEFAULT_GPU}"
        )


class Multiprocessors(NamedTuple):
    """How many multiprocessors a GPU has, and how many threads each can run at once."""

    processors: int
    threads: int


class Interval(NamedTuple):
    """Bytes from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def middle(self) -> int:
        """The number halfway between the ends, rounded down."""
        return (self.low + self.high) // 2


class LiveStorage(NamedTuple):
    """One storage at the peak: the layer, the phase and, in a forward, the line that it was made in."""

    bytes: Size
    role: Role
    layer: str | None
    op: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    line: str | None = None

    @property
    def tensor(self) -> str:
        """The storage's first tensor: ``float32[64,64]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


LIVE_FIELDS: Final = Fields[LiveStorage](
    field("bytes", "bytes", "bytes", 100, "the storage's size"),
    field("role", "role", "text", 95, "its role"),
    field("layer", "layer", "path", 90, "the layer that it belongs to or was made in"),
    field("op", "op", "text", 70, "the op that made it"),
    field("phase", "made in", "text", 60, "the phase that it was made in"),
    field("tensor", "tensor", "text", 80, "its dtype and shape"),
    field("line", "line", "text", 75, "the line of the forward that made it"),
)


class StreamShare(NamedTuple):
    """The memory of one of several CUDA streams: the caching allocator reuses a block only on its own stream.

    `requested` is the most that its tensors ask for at one time, most of it as `role`, and `reserved` is what it has of
    the segments when those of all streams together are at their peak. `collectives` are the kinds that write there.
    """

    stream: int
    collectives: tuple[CollectiveKind, ...]
    role: Role
    requested: Size
    reserved: Size

    @property
    def name(self) -> str:
        """The stream's purpose if it is known (``default``, its collectives, ``CUDA graphs`` with the number of their
        pool), else its number (``stream 7``).
        """
        if self.stream >= PRIVATE_POOL:
            return f"CUDA graphs {self.stream - PRIVATE_POOL or ''}".rstrip()
        named = ", ".join(self.collectives) if self.stream else "default"
        return named or f"stream {self.stream}"


STREAM_FIELDS: Final = Fields[StreamShare](
    field("stream", "stream", "name", 100, "the default one, or what is allocated on it", get="name"),
    field("role", "mostly", "text", 90, "its largest role", drawn="role", alone="role"),
    field("requested", "holds at most", "bytes", 98, "live bytes at its own peak"),
    field("reserved", "reserved", "bytes", 99, "its segments when those of all streams are at their peak"),
    cell={"stream": lambda row, _: Label(row.name)},
)

TRAFFIC_FIELDS: Final = Fields[Traffic](
    field("kind", "collective", "name", 100, "name of the operation", cell=lambda row, _: Label(row.kind)),
    field("ranks", "among", "count", 97, "number of ranks that take part"),
    field("count", "times", "count", 98, "calls per step"),
    field("bytes", "together", "bytes", 99, "sum of the bytes that they gather, scatter or reduce"),
    field("largest", "largest", "bytes", 90, "the largest of them"),
)


class RecordStreamCost(NamedTuple):
    """The possible cost of `record_stream`: the blocks of `tensors` tensors that it handed to other streams.

    A freed block cannot be reused before those streams have passed it. `reserved` is the peak of reserved bytes where
    the GPU is so far behind the program that each block waits until the program itself waits. `runs_out` says whether
    memory may run out then: PyTorch waits for other streams before it gives up, but afterwards only asks CUDA.
    """

    tensors: Size
    reserved: Size
    runs_out: bool = False


@dataclass(frozen=True, slots=True)
class Shortage:
    """The request at which a run runs out of memory, and the figures that PyTorch's error would give, in bytes.

    The tensor asked for `request`, for which PyTorch tries to allocate `tried`. Of the card's `total` then `free` are
    left (the CUDA context taken at its largest), `allocated` are in blocks, and `reserved` in segments, after every
    cached one that can be was given back. It happens at `event` of the run, in `phase` of step `step`, in `layer`, at
    `op`. `certain`: a CUDA context as small as it may be does not help. `nccl` is what NCCL's buffers take at most of
    what is neither free nor PyTorch's.
    """

    request: int
    tried: int
    total: int
    free: int
    allocated: Size
    reserved: Size
    phase: str
    step: int
    layer: str
    op: str
    certain: bool
    event: int | None = None
    nccl: int = 0


class PhasePeak(NamedTuple):
    """The peak of one phase of a pipeline's generation, in bytes: `requested`, `allocated` and `reserved` are the
    highest levels in it.

    When `requested` is, `weights` are those of the `parts` that run in the phase, `other_weights` those of all others,
    which offloading them would free, and `activations` the rest: temporaries, workspaces, inputs. They add up to
    `requested`. It is in `layer`.
    """

    phase: str
    parts: tuple[str, ...]
    requested: Size
    allocated: Size
    reserved: Size
    weights: Size
    other_weights: Size
    activations: Size
    layer: str


@dataclass(frozen=True, slots=True)
class GpuEstimate:
    """The peak of one run on a GPU, in bytes.

    `requested` is what tensors ask for, `allocated` the blocks that the caching allocator hands out for it, `reserved`
    its segments, each at its own peak; `device` is what `nvidia-smi` would show, an interval, since the CUDA context
    cannot be derived offline, nor cuDNN's workspaces where the library is not there to be asked. `roles` add up to
    `requested`; `storages` are the largest ones alive at that moment, which falls in `peak_phase` of step `peak_step`
    (0: the run has no steps) and in `peak_layer`. `fragmentation` is the part of `reserved` at its peak that no block
    uses. `tensors` is the peak of `requested` without the workspaces of CUDA's libraries, which depend on what is
    installed.

    Near the limit of the card `reserved` counts what is left after cached segments were given back. Where the run may
    not fit, `shortage` says how it ends; where it certainly doesn't, all other figures are those of the same run with
    enough memory. `collectives` are those of a step, where the run is that of one process of many, and `nccl` is the
    part of `device` that NCCL takes for them. `streams` are those that the run allocates on, where they are several:
    their segments add up to `reserved`. `lag` says how much more that may be where the GPU lags behind the program;
    None where that makes no difference. `phases` are those of a pipeline's generation, empty for other runs.
    """

    requested: Size
    allocated: Size
    reserved: Size
    device: Interval
    fragmentation: float
    peak_phase: str
    peak_step: int
    peak_layer: str
    peak_op: str
    roles: Mapping[Role, int]
    storages: tuple[LiveStorage, ...]
    shortage: Shortage | None = None
    tensors: int | None = None
    collectives: tuple[Traffic, ...] = ()
    nccl: Interval | None = None
    streams: tuple[StreamShare, ...] = ()
    lag: RecordStreamCost | None = None
    phases: tuple[PhasePeak, ...] = ()
