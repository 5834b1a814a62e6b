"""The ledger: records every storage that appears, is kept for backward, or disappears while a model runs.

Ops run without computing anything (`dispatch`). New storages among their outputs become events; a weak reference to
each storage records the event of its end. Nothing is added up here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memsize.kernels.convolution import FORWARD, TRACED, TRACED_AS, ConvolutionWorkspaces
from memsize.kernels.matmul import takes_cublas, takes_cublaslt
from memsize.kernels.multiply_adds import FLOPS_OF_ONE
from memsize.kernels.registry import Temporary
from memsize.known_values.propagation import carry_over
from memsize.model.tensor_storage import dtype_name, is_wrapper, plain_tensors, shape_of
from memsize.processes.user_code import Lines, line_in_forward, shown
from memsize.records.roles import Role
from memsize.records.trace import Event, Storage
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.sparse_tensors import PARTS, parts_of
from memsize.tracing.dispatch import (
    DETACH,
    MetaDispatchMode,
    OpFacts,
    has_own_dispatch,
    replaced_by_fake,
    without_launches,
)
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


class Workspaces(NamedTuple):
    """Bytes that a GPU's libraries take from the allocator.

    `blas` is cuBLAS's workspace, one for each thread that multiplies matrices (the forward's and autograd's own). `lt`
    is cuBLASLt's for products with a bias or in float8, where it does not share that of cuBLAS: with `keeps_lt` one for
    each thread too, else taken during each product. `convolutions` gives what cuDNN takes during each convolution.
    """

    blas: int = 0
    lt: int = 0
    convolutions: ConvolutionWorkspaces | None = None
    keeps_lt: bool = False


NO_WORKSPACES = Workspaces()
_OWN_CONVOLUTION = "_slow_conv2d"
"""The op that takes cuBLAS's workspace for a convolution of PyTorch's own."""


class Ledger(MetaDispatchMode):
    """The events of one run, each with the phase and layer that the `clock` shows.

    `device` is where the run's tensors live: ``"meta"``, or ``"cpu"`` for a run that really computes. `workspaces` are
    those of the simulated GPU, if there is one.
    """

    _running_line = staticmethod(line_in_forward)

    def __init__(self, device: str = "meta", workspaces: Workspaces = NO_WORKSPACES) -> None:
        super().__init__(device)
        self.clock = RunPosition()
        self.workspaces = workspaces
        self.last_op = ""
        self.events: list[Event] = []
        self.live: dict[int, _StorageRef] = {}
        self.counts = True
        """Whether multiply-adds are counted: tables show those of the first forward."""
        self.multiply_adds: dict[int, int] = {}
        """By layer."""
        self.line: int | None = None
        """The line of all storages that appear now, -1 for none; None where each has its own."""
        self.read: set[int] = set()
        """Addresses of storages that some op took as an argument."""
        self.rows: list[Row] = []
        """Every storage that has appeared, in order."""
        self._numbers: dict[Lines, int] = {}
        """The position in `lines` of each line."""
        self._saved: list[weakref.ref[SavedTensor]] = []
        self.layer_inside: Callable[[int, str], int] = lambda layer, path: layer
        """The layer of the module at a path below that of another layer."""
        self._compiled_in = -1
        self._compiled: set[int] = set()
        """Storages that compiled code made, whose own layers and lines are known."""
        self._handles: set[bool] = set()
        self._lt_handles: set[bool] = set()

    # -- what happens during the run ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_own_dispatch(types):
            return NotImplemented
        if func is DETACH:
            return carry_over(args[0], func(*args))
        if func is TRACED:
            func, args = FORWARD, args[:TRACED_AS]
        kwargs, op = kwargs or {}, self.op_facts[func]
        self.clock.tick()
        self.last_op = op.name
        if op.is_cublas and self.workspaces.blas and takes_cublas(args):
            self._keep_workspace(self._handles, self.workspaces.blas, op.name)
        self._mark_read(args)
        replaced = () if op.sparse_rule is None else parts_of(args)  # alive until the new ones are there
        result = self._result(func, args, kwargs, op)
        if self.counts and op.flops is not None:
            count = op.flops(*args, **kwargs, out_val=result) // FLOPS_OF_ONE
            self.multiply_adds[self.clock.layer] = self.multiply_adds.get(self.clock.layer, 0) + count
        if op.allocates_result_alone:
            self._note(result, op.name)
        else:
            self._note_kernel(op, args, kwargs, result)
        del replaced
        return result

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any], op: OpFacts) -> Any:
        """Return the result of an op. That of one defined in Python comes from its body, whose ops are seen one by one;
        where the body needs a GPU, from its fake.
        """
        if op.body is None or op.rule is not None or self._computes:
            return self.run_op(func, args, kwargs, op)
        try:
            with self, without_launches():
                return func.redispatch(op.body, *args, **kwargs)
        except Exception as error:
            result = self.run_op(func, args, kwargs, op)
            self.evaluator.notes[replaced_by_fake(func, error)] = None
            return result

    def _mark_read(self, args: Iterable[Any]) -> None:
        for item in args:
            if isinstance(item, torch.Tensor):
                self.read.add(_address(item))
            elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int:
                self._mark_read(item)

    def _note(self, result: Any, op: str) -> None:
        """Record the storages of what an op returned: a tensor, or nested sequences of them."""
        if isinstance(result, torch.Tensor):
            # Quantized tensors are really there: `meta` has none.
            here = result.device == self.device if self._computes else is_meta(result)
            if result.layout in PARTS:
                for part in plain_tensors(result) if here else ():
                    self.enter(part, "temporary", op)
            elif here or result.is_quantized:
                self.enter(result, "temporary", op)
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._note(item, op)

    def _note_kernel(self, op: OpFacts, args: Any, kwargs: Any, result: Any) -> None:
        """Record the allocations of a kernel in order: copies of arguments, freed at its end, its result, and
        workspaces and temporaries.
        """
        copies = [] if op.result_first else self._open_copies(op, args, kwargs)
        if op.is_forward or op.is_backward:
            self._note_convolution(op, args, result)
        else:
            self._note(result, op.name)
        if op.result_first:
            copies = self._open_copies(op, args, kwargs)
        if op.is_cublaslt and takes_cublaslt(args, kwargs):
            self._note_cublaslt(op.name)
        if op.temporaries is not None:
            self._end_all(self._open_temporaries(op.temporaries(*args), op.name), op.name)
        self._end_all(copies, op.name)

    def _note_cublaslt(self, op: str) -> None:
        blas, lt, _, keeps_lt = self.workspaces
        if lt and not keeps_lt:
            self._borrow(lt, op)
        elif size := lt or blas:
            self._keep_workspace(self._lt_handles if lt else self._handles, size, op)

    def _keep_workspace(self, threads: set[bool], size: int, op: str) -> None:
        """A thread's first matrix product creates a handle, whose workspace is kept from then on."""
        if self.clock.backward not in threads:
            self._open("workspace", size, op, torch.uint8, (size,))
            threads.add(self.clock.backward)

    def _open_copies(self, op: OpFacts, args: Any, kwargs: Any) -> list[tuple[int, int]]:
        copied = () if op.copies is None else op.copies(args, kwargs)
        copies = (Temporary(shape_of(tensor), tensor.dtype) for tensor, _ in copied if tensor.numel())
        return self._open_temporaries(copies, op.name)

    def _open_temporaries(self, temporaries: Iterable[Temporary], op: str) -> list[tuple[int, int]]:
        """Record allocations of a kernel that are gone at its end; returns the index and the bytes of each."""
        return [(self._open("temporary", t.bytes, op, t.dtype, t.shape), t.bytes) for t in temporaries]

    def _note_convolution(self, op: OpFacts, args: Any, result: Any) -> None:
        """Each result is made, then its workspace is taken and given back."""
        convolutions, name = self.workspaces.convolutions, op.name
        if convolutions is None:
            self._note(result, name)
        elif (columns := convolutions.columns(op.is_backward, args, result)) is not None:
            self._note_own_convolution(columns, result, name)
        elif op.is_forward:
            self._note(result, name)
            self._borrow(convolutions.forward(args, result), name)
        else:
            for gradient, size in zip(result, (*convolutions.backward(args), 0), strict=True):
                self._note(gradient, name)
                self._borrow(size, name)

    def _note_own_convolution(self, columns: Temporary, result: Any, op: str) -> None:
        """PyTorch's own kernel multiplies `columns`. One buffer serves both gradients, and that of the weight comes
        last (cuda/ConvolutionMM2d.cu, `slow_conv2d_backward_out_cuda`).
        """
        first, *rest = result if isinstance(result, tuple) else (result,)
        self._note(first, op)
        opened = self._open_temporaries([columns] if columns.bytes else (), op)
        if opened and self.workspaces.blas:
            self._keep_workspace(self._handles, self.workspaces.blas, _OWN_CONVOLUTION)
        self._note(rest[::-1], op)
        self._end_all(opened, op)

    def _borrow(self, size: int, op: str) -> None:
        """Record a workspace that an op takes and gives back."""
        if size:
            self._end_all([(self._open("workspace", size, op, torch.uint8, (size,)), size)], op)

    def _end_all(self, opened: Iterable[tuple[int, int]], op: str) -> None:
        """Record the end of storages, by their index and bytes."""
        for index, size in opened:
            self.events.append(_new(Event, (index, -size, self.clock.phase, self.clock.layer, op)))

    # -- calls from outside ------------------------------------------------------------------------------------------

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
        return index

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
    def addresses(tensor: torch.Tensor) -> set[int]:
        """The memory of `tensor`, as `read` names it; for a wrapper subclass, that of each inner tensor."""
        return set(map(_address, plain_tensors(tensor)))

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
            storages = [index] if self.rows[index].role not in _NOT_SAVED else []
        else:  # a wrapper keeps what it is made of
            pieces = map(self.index_of, plain_tensors(tensor)) if is_wrapper(tensor) else ()
            storages = [piece for piece in pieces if piece >= 0 and self.rows[piece].role not in _NOT_SAVED]
        layer, line = self.clock.layer, self._line() if storages else -1
        if not self._compiled.isdisjoint(storages):  # compiled code saves everything at its end
            layer, line = self.rows[storages[0]].layer, self.rows[storages[0]].line
        saved = SavedTensor(without_graph(tensor), storages, layer, line)
        if storages:
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

    # -- compiled code (`memsize.compile`) ----------------------------------------------------------------------------

    @contextmanager
    def inside_compiled(self, arguments: list[Any], forward: bool | None = None) -> Iterator[None]:
        """While open, compiled code runs with these `arguments`: it says which layer and line an allocation belongs to.
        It empties the list and so frees them as it goes; nothing here may hold them.

        `forward` says whether a forward of modules can be differentiated; None where the code is no such forward.
        """
        clock = self.clock
        clock.tick()
        self._mark_read(arguments)
        before = clock.layer, clock.pinned, self.line
        clock.pinned = self._compiled_in = clock.layer
        try:
            yield
        finally:
            clock.layer, clock.pinned, self.line = before

    def move_to(self, path: str, line: tuple[str, int] | None) -> None:
        """Attribute what compiled code does next to the module of this `path` and to this line of a forward."""
        clock = self.clock
        clock.layer = clock.pinned = self.layer_inside(self._compiled_in, path)
        is_known = line is not None and not clock.backward
        self.line = self._numbers.setdefault((line,), len(self._numbers)) if line and is_known else -1

    def allocated(self, tensor: torch.Tensor, op: str) -> None:
        """Record that compiled code has allocated `tensor` for the result of `op`."""
        self.clock.tick()
        self.last_op = op
        self._compiled.add(self.enter(tensor, "temporary", op))

    def launched(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record what a kernel takes besides its result, for which compiled code had memory."""
        op = self.op_facts[func]
        self.clock.tick()
        self.last_op = op.name
        if op.is_cublas and self.workspaces.blas and takes_cublas(args):
            self._keep_workspace(self._handles, self.workspaces.blas, op.name)
        self._note_kernel(op, args, kwargs, None)

    # -- the result of the run ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop recording: storages that end from now on are no events."""
        self.live.clear()

    def storages(self, saved: Set[int]) -> tuple[Storage, ...]:
        """Return every storage that appeared, in order; `saved_by` is set for those in `saved` only."""
        storages = []
        for index, row in enumerate(self.rows):
            by, at = (row.saved_by, row.saved_at) if row.saved_by >= 0 and index in saved else (-1, -1)
            own = (row.most_bytes, row.role, row.layer, row.op, dtype_name(row.dtype), row.shape)
            storages.append(_new(Storage, (*own, by, 0, row.line, at)))
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
