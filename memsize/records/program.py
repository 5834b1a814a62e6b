"""`ProgramRun`: the memory that a program would use on a GPU, as its run on a virtual GPU showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field as attribute
from typing import ClassVar, Final, Literal, NamedTuple

from memsize.records.aggregates import alive, live_bytes
from memsize.records.answer import Answer
from memsize.records.codec import Size
from memsize.records.fields import (
    Fields,
    FlatTable,
    Label,
    Path,
    field,
    shown,
)
from memsize.records.finding import Finding
from memsize.records.gpu import Card, GpuEstimate, Interval
from memsize.records.roles import Role
from memsize.records.trace import HostRow, TensorSpec, Trace


class LiveTensor(NamedTuple):
    """A storage that is alive at the peak, and the line of the program (``"train.py:41"``) that made it."""

    bytes: Size
    role: Role
    dtype: str
    shape: tuple[int, ...]
    layer: str | None
    op: str
    phase: str
    line: str | None


TENSOR_FIELDS: Final = Fields[LiveTensor](
    field("bytes", "holds", "bytes", 100, "its size"),
    field("role", "as", "text", 98, "its role", drawn="role", alone="role"),
    shown("spec", "tensor", "specs", 70, "its first tensor", get=lambda row: [TensorSpec(row.dtype, row.shape)]),
    field("dtype"),
    field("shape", get=lambda row: ",".join(map(str, row.shape))),
    field("layer", "in", "path", 90, "the module that was running", alone="module"),
    field("op", "by", "text", 80, "the op that made it", alone="op"),
    field("phase", "phase", "text", 60, "phase that made it"),
    field("line", "made at", "text", 99, "the line of the program that made it"),
)


class Refused(NamedTuple):
    """A request for `bytes` that the card could not serve, with `free` bytes left: PyTorch raises OutOfMemoryError."""

    bytes: Size
    free: int
    reserved: Size
    op: str
    layer: str | None
    phase: str
    line: str | None


class WentOn(NamedTuple):
    """The rest of a program after its last refused request: `steps`, and the most on the `device`, None for nothing."""

    steps: int
    device: Interval | None


class FittingBatch(NamedTuple):
    """A value of the script's `argument` for its batch that fits; `largest` if the next one does not."""

    argument: str
    size: Size
    largest: bool


class WholeSteps(NamedTuple):
    """Bytes that the allocator needs for the training `steps` of a script that ran out of memory (0: for all of it).

    `batch` is a smaller one that fits.
    """

    steps: int
    needs: Size
    batch: FittingBatch | None = None


class Assumed(NamedTuple):
    """An assumption, and the lines of the program that relied on it, in order of execution."""

    text: str
    lines: tuple[str, ...]


class AfterSteps(NamedTuple):
    """The rest of a program after its steps: bytes of tensors at the highest moment of `training`, of the `evaluation`,
    and while a state was collected for a `checkpoint` (None: the script came to none).

    The evaluation saw `batches` of `of` (None: nobody knows how many there are), and each left `per_batch` behind, most
    of it made at `line`. `graph_bytes` are the activations at its peak that were kept for a backward which never ran,
    most of them made at `graph_line`. `failure` and `failed_at` say what ended it early.
    """

    training: Size
    evaluation: Size | None = None
    checkpoint: Size | None = None
    batches: Size = 0
    of: int | None = None
    per_batch: Size = 0
    line: str | None = None
    failure: str | None = None
    failed_at: str | None = None
    graph_bytes: Size = 0
    graph_line: str | None = None

    @property
    def whole_evaluation(self) -> int | None:
        """The highest moment of an evaluation of all batches."""
        if self.evaluation is None:
            return None
        return self.evaluation + self.per_batch * max((self.of or 0) - self.batches, 0)


class Holder(NamedTuple):
    """A variable of the program (``"losses"``, ``"self.seen"``) that holds `tensors`, `graphs` with what made them.

    `line` is the one that adds to it, where it was found.
    """

    name: str
    line: str | None
    tensors: Size
    graphs: bool


class Growth(NamedTuple):
    """Memory that every step leaves behind: `bytes` in the last one, most of it made at `line` and kept by `holder`."""

    bytes: Size
    line: str | None
    holder: Holder | None


class LoadedCheckpoint(NamedTuple):
    """Bytes of a checkpoint that was loaded to the GPU, was copied into the model, and is still alive at the peak.

    `name` is the variable that keeps it, where one was found.
    """

    bytes: Size
    name: str | None


class KeptGradients(NamedTuple):
    """Bytes of gradients that are alive when a later step's forward begins and could have been freed.

    `reason` is why: a ``zero_grad(set_to_none=False)`` at `line` keeps them, the one at `line`, which frees them, comes
    late, after the forward, or there is none. Of several lines, it is that of most bytes.
    """

    bytes: Size
    reason: Literal["kept", "late", "none"]
    line: str | None


class NeedsGpu(NamedTuple):
    """The code at `line` that failed for want of a real GPU: an `op` without a shape rule, a `triton` kernel, an
    `extension` in C++, or a `package` of CUDA kernels, with a substitute to use `instead`.
    """

    what: Literal["op", "triton", "extension", "package"]
    name: str | None
    line: str | None
    instead: str | None = None


class ChildRun(NamedTuple):
    """A process that a program started, which used the GPU or failed: its own memory, beside the program's.

    `rank` is which of a job it was, where a launcher started it; `reserved`, `low` and `high` are bytes at its peak,
    0 where it never used the GPU. `failure` is the error or the status that ended it, where it failed.
    """

    command: str
    rank: int | None
    steps: int
    reserved: int
    low: int
    high: int
    ran_out: bool
    failure: str | None = None


CHILD_FIELDS: Final = Fields[ChildRun](
    field("command", "process", "text", 100, "the command that started it"),
    field("rank", "rank", "count", 60, "its rank in the job"),
    field("steps", "steps", "count", 70, "its optimizer steps"),
    field("reserved", "reserved", "bytes", 80, "the allocator's segments at their peak"),
    field("low", "GPU, at least", "bytes", 85, "lower bound of its figure in nvidia-smi at the peak"),
    field("high", "GPU, at most", "bytes", 90, "upper bound of its figure in nvidia-smi at the peak"),
    field("failure", "failed with", "text", 95, "the error or the status that ended it"),
)


HOST_FIELDS: Final = Fields[HostRow](
    field("kind", "memory of the host", "text", 100, "its use"),
    field("requested", "tensors", "bytes", 80, "peak of the bytes that live tensors ask for", nullable=True),
    field("reserved", "takes", "bytes", 90, "memory that the process keeps for them"),
)


@dataclass(frozen=True, repr=False)
class ProgramRun(Answer):
    """A program's run on `card`: `steps` optimizer steps, after which it was stopped, or its own end.

    `capacity` is what the card and the program leave to PyTorch's allocator, `peak` the peak as the GPU would
    report it. `went_on` says what followed refused requests, unless they ended the program. `waits` is the line of
    a loop that waits for a number which only a GPU computes: the program was stopped there. `failure` is how it
    ended, where it failed, `failed_at` the line of it that led to the error, and `needs_gpu` what it needs a real
    GPU for. `allocator` holds the settings of the caching allocator as JSON data.
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
    growth: Growth | None = None
    kept_gradients: KeptGradients | None = None
    loaded_checkpoint: LoadedCheckpoint | None = None
    waits: str | None = None
    unwritten: tuple[str, ...] = ()
    """Remarks on writes of the program that were prevented."""
    failure: str | None = None
    failed_at: str | None = None
    needs_gpu: NeedsGpu | None = None
    allocator: str = ""
    went_on: WentOn | None = None
    children: tuple[ChildRun, ...] = ()
    after: AfterSteps | None = None
    whole: WholeSteps | None = None
    unused_checkpointing: str | None = None
    """The line or the attribute that switches activation checkpointing on, where nothing was recomputed."""
    shares_first_gpu: bool = False
    """Whether this is one of several ranks that choose no GPU, so that all put their tensors on cuda:0."""
    findings: tuple[Finding, ...] = attribute(default=())

    @property
    def gpu_children(self) -> tuple[ChildRun, ...]:
        """The processes that the program started and that used the GPU."""
        return tuple(child for child in self.children if child.high)

    @property
    def ran_out(self) -> bool:
        """True if the program ended because the card could not serve a request."""
        return bool(self.refused) and self.went_on is None

    def tables(self) -> dict[str, FlatTable]:
        """`tensors`: the largest storages alive at the peak, one row for each."""
        return {"tensors": TENSOR_FIELDS.flat(self.tensors)}


MOST_ROWS: Final = 20
"""The largest number of modules with a share; more are added to the modules that contain them."""


class ModuleShare(NamedTuple):
    """A module with all that is below it (None: what no module made), and its bytes at the run's peak by role.

    `most` is the most that it holds at any moment of the run, `type` the name of its class, empty where it is unknown.
    """

    path: str | None
    type: str
    roles: Mapping[Role, int]
    most: int


MODULE_FIELDS: Final = Fields[ModuleShare](
    field("path", "module", "name", 100, "a module with all that is below it", key="module"),
    field("type", "type", "text", 50, "its class", get=lambda share: share.type or None),
    field("total", "at the peak", "bytes", 99, "its live memory at the peak of the run"),
    field("most", "at most", "bytes", 70, "its own peak"),
    get={"total": lambda share: sum(share.roles.values())},
    cell={"path": lambda share, _: Label("outside of modules") if share.path is None else Path(share.path)},
)


def peak_by_module(trace: Trace, most_rows: int = MOST_ROWS) -> tuple[ModuleShare, ...]:
    """Return one share per module, at the greatest depth that gives at most `most_rows`. They add up to the peak."""
    levels = live_bytes(trace.events)
    if not levels:
        return ()
    live = alive(trace, levels.index(max(levels)))
    paths = {trace.storages[index].layer for index in live}
    depth = max((layer.depth for layer in trace.layers), default=0) + 1
    while depth > 1 and len({_cut(trace, layer, depth) for layer in paths}) > most_rows:
        depth -= 1
    roles: dict[str | None, dict[Role, int]] = {}
    for index, size in live.items():
        storage = trace.storages[index]
        sizes = roles.setdefault(_cut(trace, storage.layer, depth), {})
        sizes[storage.role] = sizes.get(storage.role, 0) + size
    most, types = _most(trace, depth), {layer.path: layer.type for layer in trace.layers}
    order = {path: position for position, path in enumerate(types)}
    return tuple(
        ModuleShare(path, types.get(path or "", "") if path is not None else "", roles[path], most[path])
        for path in sorted(roles, key=lambda path: order.get(path or "", -1) if path is not None else len(order))
    )


def _cut(trace: Trace, layer: int, depth: int) -> str | None:
    """The path of `layer`, or of the module above it that is at `depth` modules from the top."""
    if layer < 0:
        return None
    return ".".join(trace.layers[layer].path.split(".")[:depth])


def _most(trace: Trace, depth: int) -> dict[str | None, int]:
    now: dict[str | None, int] = {}
    most: dict[str | None, int] = {}
    groups = {layer: _cut(trace, layer, depth) for layer in range(-1, len(trace.layers))}
    for storage, delta, *_ in trace.events:
        group = groups[trace.storages[storage].layer]
        now[group] = now.get(group, 0) + delta
        most[group] = max(most.get(group, 0), now[group])
    return most
