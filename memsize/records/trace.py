"""The frozen record of one run of one model under one scenario. Only `tracing` makes a `Trace`; nothing changes it.

A run may have several root modules, each traced as a model of its own (a generator and its discriminator), and may be
that of one process among many.

Sizes are exact integers in bytes. A dtype is torch's own name without the prefix (``"float32"``). A path is a module's
qualified name, ``""`` for the model itself. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple

from memsize.records.codec import Index, Size
from memsize.records.roles import Role
from memsize.records.world import ALONE, Collective, World

Kind = Literal["parameter", "buffer", "attribute", "packed", "master"]
"""How a tensor is held: registered, as a plain attribute, inside a packed object of a quantized module; or, outside the
model, as the float32 master copy of a parameter that a recipe's optimizer keeps."""

Memory = Literal["new", "view", "in place", "passed"]
"""Where an output's bytes are: new memory, a view of older memory, older memory written in place, or what came in."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's dtype and shape; its text is ``float32[1,3,64,64]``.

    None is a dimension in which the parts of a nested tensor differ: ``float32[3,*,64]``.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('*' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor of the model's input. `name` is its argument's (``"input_ids"``) or its position (``"0"``)."""

    name: str
    spec: TensorSpec
    bytes: Size


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a module returned, and the bytes of new memory it brought (0 unless `memory` is ``"new"``)."""

    spec: TensorSpec
    memory: Memory
    bytes: Size


@dataclass(frozen=True, slots=True)
class Layer:
    """One module. Every figure is the module's own, without its children: rows add up to the totals.

    `parameters` counts elements of the parameters registered on the module itself, `parameter_bytes` and `buffer_bytes`
    what they store; a tensor that an earlier module also holds counts there. `output_bytes` is memory that the module's
    outputs brought and no inner module had returned before; `saved_bytes` what its ops keep for backward and no earlier
    op did, parameters apart; `cast_bytes` the copies of parameters that autocast made in it. `inputs` are the tensors
    that its calls were given, `kernel` is the window that it says it slides over its input (``(3, 3)``).
    """

    path: str
    type: str
    depth: int
    leaf: bool
    calls: Size
    outputs: tuple[Output, ...]
    parameters: Size
    trainable: Size
    parameter_bytes: Size
    buffer_bytes: Size
    output_bytes: Size
    saved_bytes: Size
    cast_bytes: Size
    root: Annotated[int, Index("roots")] = 0
    """Which of `Trace.roots` it belongs to. Where there are several, `path` begins with the root's name."""
    aliases: tuple[str, ...] = ()
    """The paths of the same module elsewhere in the model."""
    inputs: tuple[TensorSpec, ...] = ()
    kernel: tuple[int, ...] = ()
    multiply_adds: int | None = None
    """Multiply-adds of the layer's matrix products and convolutions; None where no run counted them."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One plain tensor inside a wrapper or a packed object: int8 data, its scales, its zero points."""

    name: str
    spec: TensorSpec
    bytes: Size


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One parameter, buffer or other tensor that the model holds.

    `bytes` is what it stores and no tensor named before it does (0 when tied). `reported_bytes` is what PyTorch itself
    would say: elements × element size of the dtype that the tensor claims. They differ for wrapper subclasses, packed
    objects, expanded and sparse tensors. `parts` lists what a wrapper really holds.
    """

    name: str
    kind: Kind
    layer: str
    spec: TensorSpec
    elements: Size
    bytes: Size
    reported_bytes: Size
    trainable: bool
    tied_to: str | None = None
    wrapper: str | None = None
    parts: tuple[StoredPart, ...] = ()
    used: bool | None = None
    """Whether any op of the run read it; None when no run was completed."""
    differentiable: bool | None = None
    """Whether a gradient can reach it from the model's output; None when no run was completed."""

    def seen(self, used: bool, differentiable: bool) -> StoredTensor:
        """The same tensor with what a run showed of it. Every run says so of every tensor: `replace` is too slow."""
        return StoredTensor(*(*_before_runs(self), used, differentiable))


_before_runs: Final[Callable[[StoredTensor], tuple[Any, ...]]] = attrgetter(
    *(field.name for field in fields(StoredTensor) if field.name not in ("used", "differentiable"))
)


OptionalLayer = Annotated[int, Index("layers", optional=True)]
OptionalLine = Annotated[int, Index("lines", optional=True)]


PRIVATE_POOL: Final = 1 << 16
"""From here on, streams stand for pools of CUDA graphs, whose memory is reused within a pool only. The first is that of
compiled code.
"""


class Storage(NamedTuple):
    """One block of memory of the run. `layer` and `saved_by` index `Trace.layers`; -1 is none.

    `stream` is the CUDA stream that it is allocated on: the caching allocator reuses a block on its own stream only.
    `line` and `saved_at` index `Trace.lines`: the line of a forward that made it, and the one whose op keeps it for
    backward. A backward itself runs no lines. `doubt` is above 0 for the workspace of a convolution of a class for
    which cuDNN, asked without a GPU, may name another plan than it runs: the less sure, the higher.
    """

    bytes: Size
    role: Role
    layer: OptionalLayer
    op: str
    dtype: str
    shape: tuple[int, ...]
    saved_by: OptionalLayer
    stream: int = 0
    line: OptionalLine = -1
    saved_at: OptionalLine = -1
    doubt: int = 0


class Event(NamedTuple):
    """`delta` bytes of `Trace.storages[storage]` appear (> 0) or disappear (< 0); a resize is one event of its
    difference.

    `phase` indexes `Trace.phases`, `layer` indexes `Trace.layers` (-1: outside every module).
    """

    storage: Annotated[int, Index("storages")]
    delta: int
    phase: Annotated[int, Index("phases")]
    layer: OptionalLayer
    op: str


class DeferredFree(NamedTuple):
    """`Trace.events[event]` frees a block that other streams may still use, since `record_stream` handed it to them.

    Before event `until` at the latest the program has waited for them; it never does where that is -1. In between it
    depends on how far the GPU is whether the caching allocator can reuse the block.
    """

    event: Annotated[int, Index("events")]
    until: Annotated[int, Index("events", optional=True, end=True)]


@dataclass(frozen=True, slots=True)
class ToolReport:
    """A summary tool's figures for the same model: its count of parameters, and the bytes that it derives from them."""

    tool: str
    parameters: Size
    parameter_bytes: Size


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run stopped: the module that was running, the op if one failed, what it was given, and why."""

    layer: str
    type: str
    op: str | None
    inputs: tuple[str, ...]
    reason: str


class HostUse(NamedTuple):
    """Bytes of host memory, each at its own peak, and what all of them take at one time, `needs`.

    `tensors` are pageable: copies from the GPU, offloaded weights and optimizer state, and what is computed from them.
    `pinned` is what pinned tensors ask for, `blocks` the powers of two that PyTorch keeps for them. `managed` are the
    pages of paged optimizers, `batches` those that the workers of data loaders make ahead.

    The rest is measured while a script runs (0 elsewhere): `process` is what Python, its libraries and the script's own
    data take, `workers` what the workers of its data loaders have for themselves, and `shared` what these share with
    the script until they write to it, once for each. `mapped` are the files of weights that are read by way of the page
    cache, which the system can take back.
    """

    tensors: int = 0
    pinned: int = 0
    blocks: int = 0
    managed: int = 0
    batches: int = 0
    needs: int = 0
    process: int = 0
    workers: int = 0
    shared: int = 0
    mapped: int = 0

    @property
    def memory(self) -> int:
        """The memory that the machine has to have for all of it, but for the page cache."""
        return self.needs + self.process + self.workers

    @property
    def rows(self) -> tuple[HostRow, ...]:
        """The kinds of memory that there are, and their sum."""
        kinds = (
            HostRow("tensors", self.tensors, self.tensors),
            HostRow("pinned memory", self.pinned, self.blocks),
            HostRow("paged optimizer state", self.managed, self.managed),
            HostRow("prefetched batches", self.batches, self.batches),
        )
        used = tuple(row for row in kinds if row.reserved)
        if used:
            used = (*used, HostRow("at one time", None, self.needs))
        measured = (
            HostRow("workers of data loaders", None, self.workers),
            HostRow("copies that workers may make", None, self.shared),
            HostRow("Python, libraries and data", None, self.process),
            HostRow("page cache of weights", None, self.mapped),
        )
        return (*used, *(row for row in measured if row.reserved))


class HostRow(NamedTuple):
    """One kind of host memory: the bytes that tensors ask for at most, and those that the process keeps for them."""

    kind: str
    requested: int | None
    reserved: int


UNUSED: Final = HostUse()
"""A run that takes none of the host's memory."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything one run showed. `layers` is in registration order, the model itself first; so is each further root."""

    model: str
    scenario: str
    training: bool
    batch_size: int | None
    torch: str
    inputs: tuple[InputTensor, ...]
    layers: tuple[Layer, ...]
    tensors: tuple[StoredTensor, ...]
    phases: tuple[str, ...] = ("forward",)
    storages: Sequence[Storage] = ()
    events: Sequence[Event] = ()
    assumptions: tuple[str, ...] = ()
    """What was taken for granted where the run met a value that only real data has."""
    notes: tuple[str, ...] = ()
    """What a reader must know about how the run was made (an op that ran on the CPU, say)."""
    cudnn: str | None = None
    """The release of cuDNN that was asked for the workspaces of convolutions; None where they are estimated, or where
    no convolution was met."""
    failure: Failure | None = None
    roots: tuple[str, ...] = ("",)
    """The names of the root modules: ``""`` for the only one."""
    world: World = ALONE
    collectives: tuple[Collective, ...] = ()
    """In which the process took part, in order."""
    lines: tuple[str, ...] = ()
    """The lines outside of PyTorch that storages come from, the innermost of each (``"model.py:12"``); in a program the
    innermost of its own, with that of a package that it led to (``"train.py:12 > trainer.py:80"``).
    """
    emptied: tuple[Annotated[int, Index("events", end=True)], ...] = ()
    """The events before which all that the allocator cached was given back: the program emptied its cache, or a request
    failed.
    """
    deferred: tuple[DeferredFree, ...] = ()
    """The events that free what other streams may still use."""
    extended_from: tuple[int, ...] = ()
    """How many periods of its repeated blocks the models had whose runs this one extends (`memsize.depth`); empty for a
    run of the whole model.
    """
    host: HostUse = UNUSED
    """The host memory that the run took beside the GPU."""
    stack: str = ""
    """The PyTorch and CUDA that a GPU was simulated with (``"torch=2.6,cuda=12.4"``); empty for the installed ones."""

    def in_rows(self) -> Trace:
        """Return the same run with storages and events that are quick to go through, and larger than columns."""
        return replace(self, storages=tuple(self.storages), events=tuple(self.events))

    @property
    def ran(self) -> bool:
        """Whether the model was run; where it had no input, only what it stores is known."""
        return bool(self.storages or self.failure or any(layer.calls for layer in self.layers))

    def line_of(self, storage: int) -> str | None:
        """The line that made a storage, where that is known."""
        line = self.storages[storage].line
        return self.lines[line] if line >= 0 else None

    @property
    def streams(self) -> dict[int, int]:
        """The stream of each storage that is not on stream 0, as `memsize.device.allocator.replay` takes them."""
        return {index: storage.stream for index, storage in enumerate(self.storages) if storage.stream}
