"""Sums over a `Trace`: totals, the visible rows of the layer table, and the live bytes after each event.

Pure functions of the record, in its own order. The bytes that a module stores come from `Trace.tensors`, its outputs
and saved tensors from `Trace.layers`, for rows and totals alike, so that they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

from memsize.records.columns import places, rows_at
from memsize.records.roles import Role
from memsize.records.trace import Event, Layer, Output, Storage, StoredTensor, TensorSpec, Trace
from memsize.records.world import CollectiveKind, Traffic

_SCORES = "_safe_softmax"
COUNTED = ("parameter", "packed")
"""The kinds of tensor that count as parameters: registered ones, and the weights inside packed objects."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of one run, in bytes except `parameters` and `trainable`, which count elements, and `multiply_adds`.

    `attribute_bytes` are tensors that a module holds without registering them, `master_bytes` the copies of parameters
    that a recipe's optimizer keeps outside the model. `saved_bytes` are all tensors saved for backward, without
    parameters; the `saved_…` figures after it are the parts of it that another figure here also counts.
    """

    parameters: int = 0
    trainable: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    attribute_bytes: int = 0
    master_bytes: int = 0
    input_bytes: int = 0
    cast_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    saved_cast_bytes: int = 0
    saved_input_bytes: int = 0
    multiply_adds: int | None = None

    @property
    def frozen(self) -> float:
        """The share of the parameters without a gradient; 0 where none has one."""
        return 1 - self.trainable / self.parameters if self.trainable else 0.0

    @property
    def stored(self) -> int:
        """Bytes stored by the model itself: parameters, buffers and unregistered tensors."""
        return self.parameter_bytes + self.buffer_bytes + self.attribute_bytes

    @property
    def inference(self) -> int:
        """The model, its input, its cast copies and every output, as summaries add them up.

        An inference's peak is smaller: most outputs are freed before the last one is made.
        """
        return self.stored + self.input_bytes + self.cast_bytes + self.output_bytes

    @property
    def training(self) -> int:
        """The model, its master weights, its input, its cast copies and its saved tensors, each byte once.

        The memory of a training step just before its backward, without gradients and optimizer state.
        """
        saved_alone = self.saved_bytes - self.saved_cast_bytes - self.saved_input_bytes
        return self.stored + self.master_bytes + self.input_bytes + self.cast_bytes + saved_alone


def totals(trace: Trace) -> Totals:
    """Return the totals of `trace`."""
    return Totals(
        **_stored(trace.tensors),
        master_bytes=sum(tensor.bytes for tensor in trace.tensors if tensor.kind == "master"),
        input_bytes=sum(tensor.bytes for tensor in trace.inputs),
        **_run_sizes(trace.layers),
        saved_cast_bytes=_saved(trace, "cast copy"),
        saved_input_bytes=_saved(trace, "input"),
    )


def _stored(tensors: Iterable[StoredTensor]) -> dict[str, Any]:
    """The figures of stored tensors that `Totals` and a `Row` have."""
    sizes = dict.fromkeys(("parameters", "trainable", "parameter_bytes", "buffer_bytes", "attribute_bytes"), 0)
    for tensor in tensors:
        if tensor.kind in COUNTED:
            elements = 0 if tensor.tied_to else tensor.elements
            sizes["parameters"] += elements
            sizes["trainable"] += elements if tensor.trainable else 0
            sizes["parameter_bytes"] += tensor.bytes
        elif tensor.kind != "master":
            sizes[f"{tensor.kind}_bytes"] += tensor.bytes
    return sizes


def _run_sizes(layers: Sequence[Layer]) -> dict[str, Any]:
    """The figures of layers' calls that `Totals` and a `Row` have."""
    names = ("output_bytes", "saved_bytes", "cast_bytes")
    counts = [layer.multiply_adds for layer in layers if layer.multiply_adds is not None]
    sizes = {name: sum(map(attrgetter(name), layers)) for name in names}
    return {**sizes, "multiply_adds": sum(counts) if counts else None}


def _saved(trace: Trace, role: Role) -> int:
    alike = rows_at(trace.storages, places(trace.storages, "role", {role}))
    return sum(storage.bytes for storage in alike if storage.saved_by >= 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the layer table: a module, a module with all that is below it, or a tensor that stands alone.

    `layers` names the modules it adds up (none for a tensor's row). `dtypes` are those of its stored parameters, the
    one with the most bytes first. `marks` are short remarks: ``never called``, ``tied to embed.weight``, ``×3``.
    `aliases` are the other paths of the module.
    """

    path: str
    type: str
    depth: int
    layers: tuple[str, ...]
    calls: int | None = None
    outputs: tuple[Output, ...] = ()
    dtypes: tuple[str, ...] = ()
    parameters: int = 0
    trainable: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    attribute_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    cast_bytes: int = 0
    marks: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    kernel: tuple[int, ...] = ()
    multiply_adds: int | None = None

    @property
    def hollow(self) -> bool:
        """Whether the row has no figure at all."""
        stored = (self.parameters, self.parameter_bytes, self.buffer_bytes, self.attribute_bytes)
        return not any((*stored, self.output_bytes, self.saved_bytes, self.cast_bytes, self.multiply_adds))


@dataclass(frozen=True, slots=True)
class _Group:
    """A visible row: its module, the modules folded into it, and the tensors that they hold."""

    head: Layer
    folded: tuple[Layer, ...]
    tensors: tuple[StoredTensor, ...]


def visible(trace: Trace, depth: int | None = None) -> tuple[Row, ...]:
    """The rows of the layer table down to `depth` (None: all of it); at every depth they add up to `totals(trace)`.

    A module below the cut is part of its nearest visible ancestor. Where a module's children are visible, the tensors
    registered on the module itself get rows of their own, and a module with no figure of its own gets none, unless it
    has several paths. Tensors that are not registered get rows wherever they are not below the cut.
    """
    rows: list[Row] = []
    failed = trace.failure.layer if trace.failure else None
    for group in _groups(trace, depth):
        head = group.head
        above_cut = depth is None or head.depth < depth
        is_open = above_cut and not head.leaf
        inside: list[StoredTensor] = []
        alone: list[StoredTensor] = []
        for tensor in group.tensors:
            (alone if (above_cut if tensor.kind == "attribute" else is_open) else inside).append(tensor)
        row = _layer_row(group, inside, trace)
        if not (is_open and row.hollow) or head.path == failed or head.aliases:
            rows.append(row)
        rows.extend(_tensor_row(tensor, head.depth + 1) for tensor in alone)
    return tuple(rows)


def _groups(trace: Trace, depth: int | None) -> Iterator[_Group]:
    """Return one group per visible module, in the trace's order. Every layer and tensor is in exactly one group."""
    heads = {layer.path: layer for layer in trace.layers if depth is None or layer.depth <= depth}
    if not heads:
        return
    members: dict[str, list[Layer]] = {path: [] for path in heads}
    tensors: dict[str, list[StoredTensor]] = {path: [] for path in heads}
    for layer in trace.layers:
        members[nearest(layer.path, heads)].append(layer)
    for tensor in trace.tensors:
        tensors[nearest(tensor.layer, heads)].append(tensor)
    for path, head in heads.items():
        yield _Group(head, tuple(members[path]), tuple(tensors[path]))


def nearest(path: str, heads: Container[str]) -> str:
    """The path itself, or the nearest one above it, that is among `heads`."""
    while path and path not in heads:
        path = path.rpartition(".")[0]
    return path


def own_rows(trace: Trace) -> tuple[Row, ...]:
    """One row per module, hollow ones too, each with the module's own figures and nothing from its children."""
    return tuple(_layer_row(group, group.tensors, trace) for group in _groups(trace, None))


def _layer_row(group: _Group, tensors: Sequence[StoredTensor], trace: Trace) -> Row:
    return Row(
        path=group.head.path,
        type=group.head.type,
        depth=group.head.depth,
        layers=tuple(layer.path for layer in group.folded),
        calls=group.head.calls,
        outputs=group.head.outputs,
        dtypes=stored_dtypes(tensor for tensor in tensors if tensor.kind in COUNTED),
        **_stored(tensors),
        **_run_sizes(group.folded),
        marks=tuple(_layer_marks(group, tensors, trace)),
        aliases=group.head.aliases,
        inputs=group.head.inputs,
        kernel=group.head.kernel,
    )


_TENSOR_TYPES = {
    "master": "Master weight",
    "parameter": "Parameter",
    "packed": "Packed",
    "buffer": "Buffer",
    "attribute": "Tensor (not registered)",
}


def _tensor_row(tensor: StoredTensor, depth: int) -> Row:
    return Row(
        path=tensor.name,
        type=_TENSOR_TYPES[tensor.kind],
        depth=depth,
        layers=(),
        dtypes=stored_dtypes([tensor]),
        **_stored([tensor]),
        marks=(*_tensor_marks([tensor]), *(["never used"] if tensor.used is False else [])),
    )


def stored_dtypes(tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """The dtypes in which `tensors` are really stored, a wrapper's inner ones, the one with the most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        for part in tensor.parts or (tensor,):
            sizes[part.spec.dtype] += part.bytes
    return tuple(dtype for dtype, _ in sizes.most_common())


_MEMORY_MARKS = {"view": "view", "in place": "in place", "passed": "returns its input"}
"""Marks of outputs without new memory."""


def _layer_marks(group: _Group, tensors: Sequence[StoredTensor], trace: Trace) -> Iterator[str]:
    head, failure = group.head, trace.failure
    if failure and head.path == failure.layer:
        yield "failed here"
    if head.aliases:
        yield f"also {_first_of(head.aliases)}"
    if head.calls > 1:
        yield f"×{head.calls}"
    if failure is None and trace.ran:
        yield from _call_marks(group, tensors, "never called")
    elif failure and head.path != failure.layer:
        yield from _call_marks(group, tensors, "not reached")
    if head.leaf and head.outputs:
        memory = dict.fromkeys(output.memory for output in head.outputs)
        yield from (_MEMORY_MARKS[kind] for kind in memory if kind in _MEMORY_MARKS)
    yield from _tensor_marks(tensors)


def _call_marks(group: _Group, tensors: Sequence[StoredTensor], missing: str) -> Iterator[str]:
    idle = {layer.path for layer in group.folded if layer.leaf and not layer.calls}
    read = {tensor.layer for tensor in tensors if tensor.used}
    leaves = sum(layer.leaf for layer in group.folded)
    idle_unread = len(idle - read)
    if idle_unread:
        yield missing if idle_unread == leaves else f"{idle_unread} of {leaves} {missing}"
    if idle & read:
        yield "used, not called" if len(idle) == leaves else f"{len(idle & read)} used, not called"
    unread = [t for t in tensors if t.used is False and t.kind in COUNTED and t.layer not in idle]
    if unread:
        names = (tensor.name.removeprefix(f"{tensor.layer}.") for tensor in unread)
        yield f"never used: {f'{len(unread)} parameters' if len(unread) > 2 else ', '.join(names)}"


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _tensor_marks(tensors: Sequence[StoredTensor]) -> Iterator[str]:
    ties = list(dict.fromkeys(tensor.tied_to for tensor in tensors if tensor.tied_to))
    if ties:
        yield f"tied to {_first_of(ties)}"
    registered = [tensor for tensor in tensors if tensor.kind == "parameter"]
    if registered and not any(tensor.trainable for tensor in registered):
        yield "frozen"
    if any(t.trainable and t.used and t.differentiable is False for t in registered):
        yield "no gradient"
    yield from dict.fromkeys(tensor.wrapper for tensor in tensors if tensor.wrapper)


def live_bytes(events: Iterable[Event]) -> tuple[int, ...]:
    """Return the live bytes after each event."""
    return tuple(accumulate(event.delta for event in events))


def alive(trace: Trace, index: int) -> dict[int, int]:
    """The bytes of each storage that is alive after event `index`: keys index `Trace.storages`."""
    sizes: dict[int, int] = {}
    for storage, delta, *_ in trace.events[: index + 1]:
        size = sizes.get(storage, 0) + delta
        if size:
            sizes[storage] = size
        else:
            sizes.pop(storage, None)
    return sizes


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of live bytes: the first event that reaches it (-1 when there is none), and the bytes by role."""

    index: int
    bytes: int
    roles: Mapping[Role, int]


def attention_scores(trace: Trace, counts: Callable[[int, Storage], bool]) -> tuple[int, tuple[str, ...]]:
    """The bytes of attention scores, their dropout and gradients among the storages that `counts` picks, by number, and
    the dtypes in their layers.

    They are those of PyTorch's mathematical path, the only one that calls `_safe_softmax`
    (aten/src/ATen/native/transformers/attention.cpp).
    """
    if not places(trace.storages, "op", {_SCORES}):
        return 0, ()
    picked = [storage for number, storage in enumerate(trace.storages) if counts(number, storage)]
    scores = {(storage.layer, storage.shape) for storage in picked if storage.op == _SCORES}
    layers = {layer for layer, _ in scores}
    dtypes = {storage.dtype for storage in trace.storages if storage.layer in layers}
    size = sum(storage.bytes for storage in picked if (storage.layer, storage.shape) in scores)
    return size, tuple(sorted(dtypes))


def summit(trace: Trace) -> int:
    """The index of the first event at which live bytes reach their maximum; -1 where nothing is ever alive."""
    live = live_bytes(trace.events)
    return live.index(max(live)) if max(live, default=0) > 0 else -1


def peak(trace: Trace) -> Peak:
    """The peak of `trace`: its roles add up to its bytes."""
    index = summit(trace)
    if index < 0:
        return Peak(-1, 0, {})
    roles: Counter[Role] = Counter()
    for storage, size in alive(trace, index).items():
        roles[trace.storages[storage].role] += size
    return Peak(index, roles.total(), dict(roles))


def split_phase(text: str) -> tuple[str, int]:
    """Split a recorded phase such as ``"backward 2"`` into its name and its step."""
    name, _, step = text.rpartition(" ")
    return (name, int(step)) if step.isdecimal() and name else (text, 0)


def traffic(trace: Trace) -> tuple[Traffic, ...]:
    """Sum the collectives of the last step with an optimizer update, else of the last with any; largest sum first."""
    by_step: dict[int, dict[tuple[CollectiveKind, int], list[int]]] = {}
    for entry in trace.collectives:
        _, step = split_phase(trace.phases[entry.phase])
        by_step.setdefault(step, {}).setdefault((entry.kind, entry.ranks), []).append(entry.bytes)
    updated = {step for name, step in map(split_phase, trace.phases) if name == "optimizer"}
    last = by_step.get(max(updated & by_step.keys() or by_step.keys(), default=0), {})
    summaries = (Traffic(*key, len(sizes), sum(sizes), max(sizes)) for key, sizes in last.items())
    return tuple(sorted(summaries, key=lambda entry: -entry.bytes))
