"""The storages of a run: each that appears, is kept for backward, or disappears, as events in order.

A weak reference to each storage records the event of its end. Nothing is added up here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memsize.model.tensor_storage import dtype_name, is_wrapper, plain_tensors, shape_of
from memsize.processes.user_code import Lines, line_in_forward, shown
from memsize.records.roles import Role
from memsize.records.trace import PRIVATE_POOL, Event, Storage
from memsize.tracing.dispatch import MetaDispatchMode
from memsize.tracing.run_position import RunPosition
from memsize.tracing.saved_tensors import SavedTensor, without_graph

_NOT_SAVED: frozenset[Role] = frozenset(("parameter", "buffer", "gathered parameter"))
"""Roles of storages that exist without backward too, and so don't count as saved for it."""
_UNCLAIMED: frozenset[Role] = frozenset(("temporary", "communication"))
"""Roles that a storage has until an op or a caller shows its purpose."""
_new: Callable[..., Any] = tuple.__new__
"""Makes a named tuple of its values in order: a third of what its constructor takes, which is a function in Python."""


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows which storage it stands for."""

    __slots__ = ("address", "index")
    address: int
    index: int

    def named(self, storage: torch.UntypedStorage) -> _StorageRef:
        other = _StorageRef(storage)
        other.address, other.index = storage._cdata, self.index
        return other


@dataclass(slots=True, unsafe_hash=True)
class Row:
    """The present facts of a storage: its `bytes`, which a resize changes, and columns of `Storage`.

    Two are equal if their storages are alike, whatever keeps them.
    """

    bytes: int
    role: Role
    layer: int
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    line: int
    most_bytes: int = field(compare=False)
    """The most that the storage has taken."""
    saved_by: int = field(default=-1, compare=False)
    saved_at: int = field(default=-1, compare=False)
    doubt: int = 0


class StorageRecorder(MetaDispatchMode):
    """The storages of one run and their events, each with the phase and layer that the `clock` shows.

    `device` is where the run's tensors live: ``"meta"``, or ``"cpu"`` for a run that really computes.
    """

    _running_line = staticmethod(line_in_forward)

    def __init__(self, device: str = "meta") -> None:
        super().__init__(device)
        self.clock = RunPosition()
        self.last_op = ""
        self.events: list[Event] = []
        self.live: dict[int, _StorageRef] = {}
        self.line: int | None = None
        """The line of all storages that appear now, -1 for none; None where each has its own."""
        self.read: set[int] = set()
        """Addresses of storages that some op took as an argument."""
        self.rows: list[Row] = []
        """Every storage that has appeared, in order."""
        self._numbers: dict[Lines, int] = {}
        """The position in `lines` of each line."""
        self._saved: list[weakref.ref[SavedTensor]] = []
        self.hooks: set[Hashable] = set()
        """The behavior of hooks on gradients that were registered during the run."""
        self._compiled: set[int] = set()
        """Storages that compiled code made, whose own layers and lines are known."""
        self.streams: dict[int, int] = {}
        """The stream of each storage that is not on the default one, or `PRIVATE_POOL`."""
        self.emptied: list[int] = []
        """The events before which all that the allocator cached is given back."""
        self._pool = 0
        """The private pool in use, as a stream; 0 for none."""

    def _mark_read(self, args: Iterable[Any]) -> None:
        for item in args:
            if isinstance(item, torch.Tensor):
                self.read.add(_address(item))
            elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int:
                self._mark_read(item)

    def _end_all(self, opened: Iterable[tuple[int, int]], op: str) -> None:
        """Record the end of storages, by their index and bytes."""
        for index, size in opened:
            self.events.append(_new(Event, (index, -size, self.clock.phase, self.clock.layer, op)))

    def enter(self, tensor: torch.Tensor, role: Role, op: str = "", size: int | None = None) -> int:
        """Record the storage of `tensor` if it is new; returns its index either way.

        `size` is its size on the GPU where that differs from its size here (quantized weights).
        """
        storage = _storage(tensor)
        if storage is None:
            return -1
        address: int = storage._cdata
        live = self.live.get(address)
        if live is not None:
            return live.index
        if size is None:
            size = 0 if tensor._is_zerotensor() else storage.nbytes()  # a tangent of zeros, of forward-mode autograd
        index = self._open(role, size, op, tensor.dtype, shape_of(tensor))
        reference = _StorageRef(storage, self._leave)
        reference.address, reference.index = address, index
        self.live[address] = reference
        return index

    def _open(self, role: Role, size: int, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        clock, index = self.clock, len(self.rows)
        self.rows.append(Row(size, role, clock.layer, op, dtype, shape, self._line(), size))
        if size:
            self.events.append(_new(Event, (index, size, clock.phase, clock.layer, op)))
        self._note_stream(index)
        return index

    def _note_stream(self, index: int) -> None:
        """A storage gets its memory from the private pool while that is in use."""
        if self._pool:
            self.streams[index] = self._pool

    @contextmanager
    def private_pool(self, number: int = 0) -> Iterator[None]:
        """Take memory from a pool of CUDA graphs while open: that of compiled code, or another by its `number`."""
        before, self._pool = self._pool, PRIVATE_POOL + number
        try:
            yield
        finally:
            self._pool = before

    def is_pooled(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` is of the private pool."""
        return self.streams.get(self.index_of(tensor)) == PRIVATE_POOL

    def empty_cache(self) -> None:
        """Give back what the allocator caches, from the next event on."""
        self.emptied.append(len(self.events))

    def end(self, tensor: torch.Tensor) -> None:
        """Record the end of a storage that is still referred to."""
        reference = self.live.get(_address(tensor))
        if reference is not None:
            self._leave(reference)
            self.live[reference.address], self.rows[reference.index].bytes = reference, 0

    def _leave(self, reference: Any) -> None:
        del self.live[reference.address]
        size = self.rows[reference.index].bytes
        if size:
            self.events.append(_new(Event, (reference.index, -size, self.clock.phase, self.clock.layer, self.last_op)))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """`storage` was resized in place, as sharded training does with gathered parameters."""
        reference = self.live.get(storage._cdata)
        if reference is None:
            return
        row, size = self.rows[reference.index], storage.nbytes()
        delta, row.bytes = size - row.bytes, size
        row.most_bytes = max(size, row.most_bytes)
        if delta:
            self.events.append(Event(reference.index, delta, self.clock.phase, self.clock.layer, "resize_"))

    @staticmethod
    def addresses(tensor: torch.Tensor) -> list[int]:
        """The memory of `tensor`, as `read` names it; for a wrapper subclass, that of each inner tensor."""
        return list(map(_address, plain_tensors(tensor)))

    def index_of(self, tensor: torch.Tensor) -> int:
        """The index of the live storage of `tensor`, -1 when the ledger has not seen it."""
        live = self.live.get(_address(tensor))
        return -1 if live is None else live.index

    def mark(self, tensor: torch.Tensor, role: Role) -> None:
        """Give the storage of `tensor` a role, unless it has one already."""
        for piece in plain_tensors(tensor):
            index = self.index_of(piece)
            if index >= 0 and self.rows[index].role in _UNCLAIMED:
                self.rows[index].role = role

    def saved(self, tensor: torch.Tensor) -> SavedTensor:
        """Note that autograd keeps `tensor` for backward."""
        index = self.index_of(tensor)
        if index >= 0:
            storages: tuple[int, ...] = () if self.rows[index].role in _NOT_SAVED else (index,)
        else:  # a wrapper keeps what it is made of
            pieces = map(self.index_of, plain_tensors(tensor)) if is_wrapper(tensor) else ()
            storages = tuple(piece for piece in pieces if piece >= 0 and self.rows[piece].role not in _NOT_SAVED)
        if not storages:
            return SavedTensor(without_graph(tensor), (), self.clock.layer, -1)
        layer, line = self.clock.layer, self._line()
        if self._compiled and not self._compiled.isdisjoint(storages):  # compiled code saves everything at its end
            layer, line = self.rows[storages[0]].layer, self.rows[storages[0]].line
        saved = SavedTensor(without_graph(tensor), storages, layer, line)
        self._saved.append(weakref.ref(saved))
        for row in map(self.rows.__getitem__, storages):
            if row.saved_by < 0:
                row.saved_by, row.saved_at = layer, line
                if row.role in _UNCLAIMED:
                    row.role = "activation"
        return saved

    def forget_released(self) -> None:
        """Take storages that autograd has released, and that something else keeps alive, as not saved for backward."""
        alive = [saved for reference in self._saved if (saved := reference()) is not None]
        self._saved = list(map(weakref.ref, alive))
        saved_by: dict[int, tuple[int, int]] = {}
        for saved in alive:
            for index in saved.storages:
                saved_by.setdefault(index, (saved.layer, saved.line))
        for index in (reference.index for reference in self.live.values()):
            row = self.rows[index]
            row.saved_by, row.saved_at = saved_by.get(index, (-1, -1))
            if index not in saved_by and row.role == "activation":
                row.role = "temporary"

    def _line(self) -> int:
        if self.line is not None:
            return self.line
        line = None if self.clock.backward else self._running_line()
        return -1 if line is None else self._numbers.setdefault((line,), len(self._numbers))

    def saved_bytes(self, alive: Set[int]) -> int:
        """Return the bytes of those storages among `alive` that are saved for backward."""
        return sum(self.rows[index].most_bytes for index in alive if self.rows[index].saved_by >= 0)

    @property
    def count(self) -> int:
        """How many storages have appeared so far. Storages with this index or above are newer than this call."""
        return len(self.rows)

    def size(self, index: int) -> int:
        """The most bytes that storage `index` has taken."""
        return self.rows[index].most_bytes

    # -- the result of the run ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop recording: storages that end from now on are no events."""
        self.live.clear()

    def storages(self, saved: Set[int]) -> tuple[Storage, ...]:
        """Return every storage that appeared, in order; `saved_by` is set for those in `saved` only."""
        storages, streams = [], self.streams
        for index, row in enumerate(self.rows):
            by, at = (row.saved_by, row.saved_at) if row.saved_by >= 0 and index in saved else (-1, -1)
            own = (row.most_bytes, row.role, row.layer, row.op, dtype_name(row.dtype), row.shape)
            storages.append(_new(Storage, (*own, by, streams.get(index, 0), row.line, at, row.doubt)))
        return tuple(storages)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that storages come from, in the order in which they were met."""
        return tuple(map(shown, self._numbers))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested and opaque tensors have no storage of their own
        functional = torch._C._functorch
        wrapped = functional.is_functorch_wrapped_tensor(tensor)  # as torch.func.grad and vmap see it
        return _storage(functional.get_unwrapped(tensor)) if wrapped else None


def _address(tensor: torch.Tensor) -> int:
    try:
        address: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # as in `_storage`
        return -1
    return address
