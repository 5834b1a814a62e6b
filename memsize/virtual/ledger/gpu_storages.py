"""The storages on the recorded GPU: roles that become clear later, streams, memory that is refused or shared.

Clues show what memory is for at the moment it is made, so that a run that ends there has its roles right.
Autograd hands a parameter its first gradient in an `AccumulateGrad` node: it detaches the tensor that the backward
made, or copies it where something else shares or uses it (torch/csrc/autograd/functions/accumulate_grad.h). To
`torch.autograd.grad` it returns the gradient instead, after the hooks of the tensor (torch/csrc/autograd/engine.cpp). A
custom function that computes the gradient of a weight in its own forward, as fused losses do, makes it like the weight.
An optimizer fills or copies tensors for its state in its first step; its other results come from arithmetic. A batch
comes from the host: the targets and masks that only the loss takes are inputs too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _disable_current_modes

from memsize.known_values.evaluation import as_stand_ins
from memsize.model.tensor_storage import PLAIN_TYPES, plain_tensors
from memsize.processes.patches import Patch, assigned, wrapping
from memsize.processes.user_code import Lines, variables
from memsize.records.aggregates import split_phase
from memsize.records.roles import Role
from memsize.records.timeline import AROUND
from memsize.records.world import Collective, CollectiveKind
from memsize.torch_internals.meta import is_meta
from memsize.tracing.ledger import Ledger, Workspaces
from memsize.tracing.run_position import RunPosition
from memsize.tracing.saved_tensors import SavedTensor, without_graph
from memsize.virtual.device_assignment import HOST, DeviceAssignment
from memsize.virtual.host_memory import HostMemory
from memsize.virtual.ledger.stream_order import Queue, StreamOrder

_aten: Any = torch.ops.aten
_accumulating: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_KEEPING: Final = frozenset((_aten.detach.default, _aten.new_empty_strided.default, _aten.clone.default))
_LIKE: Final = frozenset(
    (_aten.zeros_like.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.new_empty.default)
)
_FILLING: Final = frozenset(
    "clone empty empty_like eye full full_like new_empty new_full new_ones new_zeros ones ones_like zeros "
    "zeros_like".split()
)
"""Names of the ops with which optimizers make their state."""
_COPYING: Final = frozenset(("_to_copy", "clone"))
"""Names of the ops with which they copy one that they load."""
_INPUTS: Final = 4
"""The position of the tensors to differentiate by among the arguments of the engine."""
_GRADIENTS: Final[dict[Role, Role]] = {"parameter": "gradient", "gathered parameter": "unsharded gradient"}


class _Thread(threading.local):
    depth = 0
    clock: RunPosition | None = None


thread: Final = _Thread()
"""How many ops this thread is inside of, and its own clock if the program started it."""


def below_autograd() -> bool:
    """Whether this thread is inside an op: PyTorch's own kernels in Python must see the real device of a tensor."""
    return thread.depth > 0


class _First(threading.local):
    """A result of a thread's first autograd node. The queue takes out the node with the highest number first."""

    def __init__(self) -> None:
        with torch.enable_grad():
            self.result = torch.zeros((), device="cpu", requires_grad=True).neg()


class BackwardQueue:
    """The queues of autograd's engine in all threads, after a backward that failed as a GPU leaves them; `aside` is the
    region in which autograd may run without being recorded.

    A GPU's nodes wait in the queue of a thread of its own, which drops those of a backward that has failed. Nodes of
    the CPU, which stand-ins take, wait in the queue of the thread that called: they keep their graph, and gradients on
    their way, until a later backward takes them out (torch/csrc/autograd/engine.cpp).

    `returned` is called with a leaf and its gradient as soon as the engine has one to return.
    """

    def __init__(
        self,
        aside: Callable[[], AbstractContextManager[None]],
        returned: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._aside = aside
        self._returned = returned
        self._first = _First()

    def begin_thread(self) -> None:
        """Make the first node of this thread."""
        assert self._first.result.grad_fn is not None

    def replacements(self) -> Iterator[Patch]:
        """Patch the function with which PyTorch starts autograd's engine."""
        yield wrapping(torch.autograd, "_engine_run_backward", self._run_backward)

    def _run_backward(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        inputs = () if options.get("accumulate_grad") else args[_INPUTS]
        try:
            with ExitStack() as hooks:
                for leaf in inputs:  # which may also be edges of the graph
                    if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad:
                        hooks.callback(leaf.register_hook(partial(self._returned, leaf)).remove)
                return original(*args, **options)
        except torch.OutOfMemoryError:
            if torch._C._current_graph_task_id() == -1:
                # A backward whose only node is the last that the queue takes out empties it.
                with self._aside():
                    ones = (torch.ones((), device="cpu"),)
                    first = (self._first.result,)
                    original(first, ones, True, False, (), allow_unreachable=True, accumulate_grad=True)
            raise


class _ProgramPosition(RunPosition):
    """Where a program is: code after a backward is neither evaluation nor a forward, whatever came before."""

    def _phase_after_backward(self) -> int:
        name, _ = split_phase(self.phases[self.phase])
        return self.index(AROUND) if self.layer < 0 and name in ("forward", "evaluation") else self.phase


class _ClockBeside(_ProgramPosition):
    """The clock of one more thread: it is in the step and phase that the `main` one shows, unless it opens its own."""

    def __init__(self, main: RunPosition) -> None:
        self._main, step = main, main.step
        super().__init__()
        self.phases, self.step = main.phases, step
        self._opened = 0

    @property
    def step(self) -> int:
        return self._main.step

    @step.setter
    def step(self, number: int) -> None:
        self._main.step = number

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        self._opened += 1
        try:
            with super().during(name):
                yield
        finally:
            self._opened -= 1

    def tick(self) -> None:
        if not self._opened and self._outside is None:
            self.phase = self._main.phase
        super().tick()


class GpuStorages(Ledger):
    """A ledger of the GPU that `devices` records.

    `allocate` is called with a storage and its size when an event gives it memory. It raises `torch.OutOfMemoryError`
    where there is none for it, after `refuse`.
    """

    _running_line = staticmethod(lambda: None)
    """It is far above PyTorch's own calls: looked up for large storages alone, by the program (`made_at`)."""

    def __init__(self, workspaces: Workspaces, allocate: Callable[[int, int], None]) -> None:
        self._turn = threading.RLock()
        """One op at a time is recorded, whichever thread runs it."""
        self.current_stream: Callable[[], int] = lambda: 0
        self.devices = DeviceAssignment()
        self.order = StreamOrder(lambda: len(self.events))
        self.collectives: list[Collective] = []
        self.host_memory = HostMemory()
        self.backward_queue = BackwardQueue(self.aside, self.mark_gradient)
        self.likely_state: set[int] | None = None
        """Storages that an optimizer's first step has made, as far as they look like its state; else `None`."""
        self.has_state: Callable[[], bool] = lambda: False
        """Whether the optimizer that makes its first step has state already: a copy of a gradient is none then."""
        self.has_gradients = self.has_updated = False
        """Whether a backward has reached parameters, and whether they were written to after it, in this step."""
        self.loads_state = False
        """Whether an optimizer is loading a state, which it copies to its parameters' device before it keeps any."""
        self._batches: set[int] = set()
        """Copies from the host, other than numbers, that no module, backward or optimizer made."""
        self._in_pytorch = False
        self._elsewhere: dict[int, torch.UntypedStorage] = {}
        super().__init__("meta", workspaces)
        self.clock = _ProgramPosition()
        self._allocate = allocate

    @property
    def clock(self) -> RunPosition:
        """Where this thread is in the run."""
        return thread.clock or self._clock

    @clock.setter
    def clock(self, clock: RunPosition) -> None:
        self._clock = clock

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that an op writes to these: where one is a parameter that has got a gradient, that is an update."""
        if self.has_gradients and not self.has_updated and torch._C._current_graph_task_id() == -1:
            self.has_updated = any(self._role_of(tensor) == "parameter" for tensor in tensors if is_meta(tensor))

    def begin_step(self, number: int) -> None:
        """Start the step of that number, in this thread and in the main one."""
        for clock in {self._clock, self.clock}:
            clock.step = number
            clock.phase = clock.index("step")

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """While open, this thread, which the program started, calls modules and runs backwards of its own."""
        thread.clock = _ClockBeside(self._clock)
        self.backward_queue.begin_thread()
        try:
            yield
        finally:
            thread.clock = None

    def in_pytorch(self) -> AbstractContextManager[None]:
        """While open, PyTorch's own C++ code makes tensors like those that it has: on the GPU."""
        return assigned(self, "_in_pytorch", True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While open, this thread asks PyTorch about shapes: it runs ops that are none of the program's."""
        with _disable_current_modes():
            thread.depth += 1
            try:
                yield
            finally:
                thread.depth -= 1

    def elsewhere(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """While open, these tensors are not on the GPU: whoever shards or moves them there makes others."""
        storages = [piece.untyped_storage() for tensor in tensors for piece in plain_tensors(tensor)]
        return assigned(self, "_elsewhere", {storage._cdata: storage for storage in storages})

    def _follow_clues(self, func: Any, args: Any, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            node: Any = torch._C._current_autograd_node() if func in _KEEPING else None
            if isinstance(node, _accumulating) and node.variable.grad is None:
                self.mark_gradient(node.variable, result)
        elif func is _aten._to_copy.default and result.dim() and not is_meta(args[0]) and self.clock.layer < 0:
            if split_phase(self.clock.phases[self.clock.phase])[0] != "optimizer":
                self._batches.add(self.index_of(result))
        elif _is_gradient_of_own_forward(func, args, result) and self._role_of(args[0]) == "parameter":
            self.mark(result, "gradient")

    def mark_gradient(self, variable: torch.Tensor, gradient: torch.Tensor) -> None:
        """Mark what autograd hands to `variable`, if that is a parameter, or the whole one of a sharded one."""
        owner = next(iter(plain_tensors(variable)))
        self.mark_unowned(owner)
        role = _GRADIENTS.get(self._role_of(owner))
        if role is None:
            return
        self.has_gradients = True
        for index in map(self.index_of, plain_tensors(gradient)):
            if index >= 0 and self.rows[index].role in ("temporary", "activation"):
                self.rows[index].role = role

    def _role_of(self, tensor: torch.Tensor) -> Role:
        index = self.index_of(tensor)
        return "temporary" if index < 0 else self.rows[index].role

    def _likely_role(self, op: str) -> Role:
        """The role of a new storage that nothing else has shown the purpose of."""
        if self._in_pytorch:
            return "communication"  # the buckets of DistributedDataParallel, whose hooks may send something else
        if self.loads_state and op in _COPYING:
            return "optimizer state"
        if self.likely_state is None or op not in _FILLING or (op == "clone" and self.has_state()):
            return "temporary"
        if split_phase(self.clock.phases[self.clock.phase])[0] != "optimizer":
            return "temporary"
        self.likely_state.add(self.count)
        return "optimizer state"

    def mark_unowned(self, tensor: torch.Tensor) -> None:
        """Take a leaf that requires gradients for a parameter; one that checkpointing has detached is an activation."""
        if tensor.is_leaf and tensor.requires_grad:
            index = self.index_of(tensor)
            if index >= 0 and self.rows[index].layer < 0 and self.rows[index].role == "temporary":
                self.rows[index].role = "parameter"

    def saved(self, tensor: torch.Tensor) -> SavedTensor:
        """As the base class has it; a leaf that the program differentiates by is a parameter."""
        if type(tensor) in PLAIN_TYPES and not is_meta(tensor) and not tensor.is_quantized:  # which nobody records
            return SavedTensor(without_graph(tensor), (), self.clock.layer, -1)
        self.mark_unowned(tensor)
        return super().saved(tensor)

    def own(self, module: nn.Module, layer: int) -> None:
        """Give the tensors that `module` itself stores their role and their layer."""
        roles: tuple[tuple[Role, Any], ...] = (("parameter", module._parameters), ("buffer", module._buffers))
        for role, tensor in ((role, tensor) for role, tensors in roles for tensor in tensors.values()):
            for index in () if tensor is None else map(self.index_of, plain_tensors(tensor)):
                if index >= 0:
                    self.rows[index].layer = layer
                    if self.rows[index].role != "gathered parameter":  # which a module stores while it is there
                        self.rows[index].role = role

    def belongs(self, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """Let the storage of `tensor`, which no module made, be in the layer of that of `owner`."""
        index, owner_index = self.index_of(tensor), self.index_of(owner)
        if index >= 0 and owner_index >= 0 and self.rows[index].layer < 0:
            self.rows[index].layer = self.rows[owner_index].layer

    def enter(self, tensor: torch.Tensor, role: Role, op: str = "", size: int | None = None) -> int:
        """As the base class; nothing for what is `elsewhere`, on the host, or on a GPU that nobody looks at."""
        if not is_meta(tensor) and not tensor.is_quantized:
            return -1
        if self.devices.number_of(tensor) != self.devices.index:
            return -1
        if self._elsewhere and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._elsewhere:
            return -1
        return super().enter(tensor, role, op, size)

    def _open(self, role: Role, size: int, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        index = super()._open(self._likely_role(op) if role == "temporary" else role, size, op, dtype, shape)
        if size:
            self._allocate(index, size)
        return index

    def _note_stream(self, index: int) -> None:
        """A storage gets its memory from the stream that this thread works on."""
        if stream := self._pool or self.current_stream():
            self.streams[index] = stream
        else:
            self.streams.pop(index, None)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """As the base class has it; one that was empty gets its memory anew, perhaps from another stream."""
        reference = self.live.get(storage._cdata)
        if reference is None:
            return
        index, before = reference.index, self.rows[reference.index].bytes
        if not before:
            self._note_stream(index)
        elif before != storage.nbytes():
            self._free(index)
        super().resized(storage)
        if storage.nbytes() > before:
            try:
                self._allocate(index, storage.nbytes())
            except torch.OutOfMemoryError:
                storage.resize_(before)
                raise

    def _leave(self, reference: Any) -> None:
        if self.rows[reference.index].bytes:
            self._free(reference.index)
        super()._leave(reference)

    def _free(self, index: int) -> None:
        """The next event frees the block of a storage."""
        if index in self.order.used:
            self.order.free(index, (self.devices.index, self.streams.get(index, 0)))

    def hand_over(self, tensor: torch.Tensor, queue: Queue) -> None:
        """``tensor.record_stream(stream)``: once it is freed, its memory waits for that stream."""
        for piece in plain_tensors(tensor):
            if (index := self.index_of(piece)) >= 0:
                self.order.use(index, queue)

    def share(self, part: torch.UntypedStorage, whole: torch.UntypedStorage) -> None:
        """The memory of `part` is that of `whole`, which is there as long as the part is."""
        reference = self.live.get(whole._cdata)
        if reference is not None:
            self.live[part._cdata] = reference.named(part)
        weakref.finalize(part, lambda address, _: self.live.pop(address, None), part._cdata, whole)

    def stand_in(self, tensor: torch.Tensor) -> None:
        """Let `tensor`, which has memory on the CPU, be a stand-in on the host from here on."""
        with self._turn, self.aside():
            fresh = as_stand_ins(tensor.detach()).requires_grad_(tensor.requires_grad)
        if self.devices.put(fresh, HOST):
            self.host_memory.copied(fresh.untyped_storage())
        torch._C._swap_tensor_impl(tensor, fresh)

    def refuse(self, storage: int) -> None:
        """Forget the last event of `storage`: there was no memory for it."""
        position = next(i for i in reversed(range(len(self.events))) if self.events[i].storage == storage)
        self.rows[storage].bytes -= self.events.pop(position).delta

    def _end_unfinished(self, before: int) -> None:
        """End what a kernel that failed took for itself after event `before`. A library keeps the workspaces it has."""
        sizes: dict[int, int] = {}
        for event in self.events[before:]:
            sizes[event.storage] = sizes.get(event.storage, 0) + event.delta
        lasting = {reference.index for reference in self.live.values()}
        lasting |= {index for index in sizes if self.rows[index].role == "workspace"}
        unfinished = [(index, size) for index, size in sizes.items() if size > 0 and index not in lasting]
        self._end_all(unfinished, self.last_op)

    def sent(
        self, kind: CollectiveKind, size: int, ranks: int, before: int | None = None, group: int = -1, stream: int = 0
    ) -> None:
        """A collective of `size` bytes among so many ranks of a group, after so many events: by default now."""
        clock, position = self.clock, len(self.events) if before is None else before
        self.collectives.append(Collective(kind, size, ranks, clock.phase, clock.layer, position, group, stream))

    def mark_batches(self) -> None:
        """Mark as inputs what the program copied from the host, where nothing has shown another purpose."""
        for row in (self.rows[index] for index in self._batches if index >= 0):
            if row.role in ("temporary", "activation"):
                row.role = "input"

    def made_at(self, storage: int, lines: Lines) -> None:
        """`lines` of the program made `storage`."""
        self.rows[storage].line = self._numbers.setdefault(lines, len(self._numbers))


def _is_gradient_of_own_forward(func: Any, args: Any, result: Any) -> bool:
    """Whether a custom function's forward makes `result` as the gradient of ``args[0]``, if that is a parameter."""
    if func not in _LIKE or torch.is_grad_enabled() or result.shape != args[0].shape:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # up to a custom function's forward, whose first argument is the context that it saves to
        code = frame.f_code
        is_forward = code.co_name == "forward" and code.co_argcount
        if is_forward and isinstance(dict(variables(frame)).get(code.co_varnames[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False
