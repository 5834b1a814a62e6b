"""The ledger of a virtual GPU: only what happens on the GPU is recorded, work on the CPU is really done.

Code that asks for ``device="cuda"`` below Python (``torch.set_default_device``, ``with torch.device("cuda")``, names
imported with ``from torch import zeros``) is answered here, where its op is dispatched.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from memsize.kernels.convolution import FORWARD as CONVOLUTION
from memsize.known_values.evaluation import as_stand_ins
from memsize.model.tensor_storage import plain_tensors
from memsize.processes.user_code import Lines
from memsize.ranks.collectives import (
    NAMESPACES,
    alike,
    answer,
    bytes_moved,
    carry_over,
    group_of,
    is_given_buffers,
    kind_of,
    waited,
    waits,
)
from memsize.ranks.peer_checks import check_devices, check_layouts, check_ranks
from memsize.records.aggregates import split_phase
from memsize.records.roles import Role
from memsize.records.timeline import AROUND
from memsize.records.trace import Storage
from memsize.records.world import Collective, CollectiveKind
from memsize.torch_internals.jit_tracing import is_tracing, record_as, record_convolution, untraced
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import arguments_in
from memsize.tracing.dispatch import DETACH, has_own_dispatch
from memsize.tracing.ledger import Ledger, Workspaces
from memsize.tracing.run_position import RunPosition
from memsize.tracing.saved_tensors import SavedTensor
from memsize.virtual.backward_queue import BackwardQueue
from memsize.virtual.custom_ops import backend_of, needs_gpu, replaced_note
from memsize.virtual.data_parallel import gpu_of
from memsize.virtual.device_assignment import (
    HOST,
    DeviceAssignment,
    any_own_meta,
    claim,
    is_own_meta,
    on_gpu,
    taken_to_gpu,
)
from memsize.virtual.host_memory import HostMemory
from memsize.virtual.nested_tensors import STRIDED, is_refused
from memsize.virtual.role_clues import COPYING, FILLING, is_gradient_of_own_forward, parameter_of_first_gradient
from memsize.virtual.stream_order import StreamOrder, host_waits

_META = torch.device("meta")
_CPU = torch.device("cpu")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtypes of tensors that stand for numbers."""
_TO_COPY = torch.ops.aten._to_copy.default
_SET_STORAGE = torch.ops.aten.set_.source_Storage_storage_offset
"""As `torch.load` makes tensors."""


_GRADIENTS: dict[Role, Role] = {"parameter": "gradient", "gathered parameter": "unsharded gradient"}


class _Thread(threading.local):
    depth = 0
    clock: RunPosition | None = None


_thread = _Thread()


def below_autograd() -> bool:
    """Whether this thread is inside an op: PyTorch's own kernels in Python must see the real device of a tensor."""
    return _thread.depth > 0


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


class VirtualLedger(Ledger):
    """Records the ops on stand-ins; `observer` is called after each, when its events are there.

    `allocate` is called with a storage and its size when an event gives it memory. It raises `torch.OutOfMemoryError`
    where there is none for it, after `refuse`.
    """

    def __init__(
        self,
        workspaces: Workspaces,
        observer: Callable[[], None] = lambda: None,
        allocate: Callable[[int, int], None] = lambda storage, size: None,
    ) -> None:
        self._turn = threading.RLock()
        """One op at a time is recorded, whichever thread runs it."""
        self.current_stream: Callable[[], int] = lambda: 0
        self.devices = DeviceAssignment()
        self.streams: dict[int, int] = {}
        """The stream of each storage that is not on the default one."""
        self.order = StreamOrder(lambda: len(self.events))
        """What streams and the program wait for."""
        self.collectives: list[Collective] = []
        self._groups: dict[str, int] = {}
        """The groups of processes that collectives on the GPU were among, by name: each with its number."""
        self.alone = True
        """Whether this process runs without the others of its group, if it is in one: collectives are answered here."""
        self.host_memory = HostMemory()
        self.absent = False
        """Whether what runs is the work of another rank: it is done here without memory, and not recorded."""
        self.custom_op = ""
        """The op that is defined in Python and running."""
        self.backward_queue = BackwardQueue(self.aside)
        self.likely_state: set[int] | None = None
        """Storages that an optimizer's first step has made, as far as they look like its state; else `None`."""
        self.has_state: Callable[[], bool] = lambda: False
        """Whether the optimizer that makes its first step has state already: a copy of a gradient is none then."""
        self.loads_state = False
        """Whether an optimizer is loading a state, which it copies to its parameters' device before it keeps any."""
        self._in_pytorch = False
        self._elsewhere: dict[int, torch.UntypedStorage] = {}
        self.differentiated: Callable[[], None] = lambda: None
        """Called before each op outside of modules that shows that the program trains."""
        super().__init__("meta", workspaces)
        self.clock = _ProgramPosition()
        self.evaluator.lenient = True
        self._observer = observer
        self._allocate = allocate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_own_dispatch(types):
            return NotImplemented
        if is_tracing() is not None:
            return self._traced(func, types, args, kwargs)
        kwargs = kwargs or {}
        try:
            if func.namespace in NAMESPACES and self.alone:
                return self._between_ranks(func, types, args, kwargs)
            return self._run(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            refusal = error.with_traceback(None)
        try:
            # A kernel in C++ leaves nothing behind. The frames of a traceback would keep arguments and results alive.
            del types, args, kwargs
            raise refusal
        finally:
            del refusal

    def _traced(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that `torch.jit.trace` has not recorded itself."""
        if func is not CONVOLUTION:
            with untraced():
                return self.__torch_dispatch__(func, types, args, kwargs)
        with self.aside():
            recorded = record_convolution(args)
        if not on_gpu(args):
            return recorded
        with untraced():
            result = self.__torch_dispatch__(func, types, args, kwargs)
        record_as(result, recorded)
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        backend = backend_of(func, args, kwargs)
        if backend is None or self.absent or self.op_facts[func].rule is not None:
            result = self._placed(func, types, args, kwargs)
        else:
            result = self._run_body(backend, func, types, args, kwargs)
        if self.order.waiting and host_waits(func, args, kwargs):
            self.order.synchronize(self.order.moment((self.devices.index, self.current_stream())))
        return result

    def _run_body(self, backend: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op that is defined in Python, its ops one by one."""
        outer, depth = self.custom_op, _thread.depth
        self.custom_op, _thread.depth = func.name(), 0
        try:
            with self._again():
                return func.redispatch(backend, *args, **kwargs)
        except Exception as error:
            if not needs_gpu(error) or not on_gpu((*args, *kwargs.values())):
                raise
            _thread.depth = depth
            return self._run_fake(error, func, types, args, kwargs)
        finally:
            self.custom_op, _thread.depth = outer, depth

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Make this the mode again while open within an op, in whichever thread. A mode's own way in and out also
        changes what belongs to the whole process.
        """
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()

    def _run_fake(self, error: Exception, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the fake of an op whose body raised `error`, which is the op's own if there is no fake."""
        try:
            result = self._placed(func, types, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            raise error from None
        self.evaluator.notes[replaced_note(func, error)] = None
        return result

    def _placed(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op where its arguments are."""
        device = kwargs.get("device")
        if not self._is_on_gpu(func, args, device):
            return self._off_gpu(func, args, kwargs, device)
        gpu = self.devices.index
        if device is not None and _names_gpu(device):
            gpu = self.devices.named(device.index)
            if not self.op_facts[func].composite:  # whose ops are asked again where they are to run
                kwargs = {**kwargs, "device": _META}
        elif self.devices.has_others:
            gpu = gpu_of(func, args)
        pins = bool(kwargs.get("pin_memory")) or (func is _TO_COPY and bool(kwargs.get("non_blocking")))
        kwargs = _unpinned(kwargs)
        if self.absent or gpu != self.devices.index:
            result = self._on_other(gpu, func, args, kwargs)
            return self.host_memory.pin(result) if pins and gpu == HOST else result
        with self._turn:
            if func is not DETACH and not self.clock.inside and self._is_of_training(args):
                self.differentiated()
            _thread.depth += 1
            before = len(self.events)
            try:
                for tensor in taken_to_gpu(args) if device is None else ():
                    self.enter(tensor, "temporary", self.op_facts[func].name)
                result = super().__torch_dispatch__(func, types, args, kwargs)
                self._follow_clues(func, args, result)
                on_cpu = device is not None and device.type == "cpu"
                return self.host_memory.pin(result) if pins and on_cpu else result
            except torch.OutOfMemoryError:
                self._end_unfinished(before)
                raise
            except RuntimeError as error:
                if is_refused(error):
                    raise RuntimeError(STRIDED) from None
                raise
            finally:
                _thread.depth -= 1
                self._observer()

    def _follow_clues(self, func: Any, args: Any, result: Any) -> None:
        """Give a gradient its role as soon as something shows that it is one."""
        if torch._C._current_graph_task_id() != -1:
            variable = parameter_of_first_gradient(func)
            if variable is not None:
                self._note_gradient(variable, result)
        elif is_gradient_of_own_forward(func, args, result) and self._role_of(args[0]) == "parameter":
            self.mark(result, "gradient")

    def _note_gradient(self, variable: torch.Tensor, gradient: torch.Tensor) -> None:
        """Autograd keeps the first `gradient` of `variable`: a parameter, or the whole one of a sharded one."""
        owner = next(iter(plain_tensors(variable)))
        self.mark_unowned(owner)
        role = _GRADIENTS.get(self._role_of(owner))
        index = self.index_of(gradient)
        if role is not None and index >= 0 and self.rows[index].role in ("temporary", "activation"):
            self.rows[index].role = role

    def _role_of(self, tensor: torch.Tensor) -> Role:
        index = self.index_of(tensor)
        return "temporary" if index < 0 else self.rows[index].role

    def mark_unowned(self, tensor: torch.Tensor) -> None:
        """Give a leaf that requires gradients the role of a parameter, if no module has made it: one that checkpointing
        has detached is an activation.
        """
        if tensor.is_leaf and tensor.requires_grad:
            index = self.index_of(tensor)
            if index >= 0 and self.rows[index].layer < 0 and self.rows[index].role == "temporary":
                self.rows[index].role = "parameter"

    def saved(self, tensor: torch.Tensor) -> SavedTensor:
        """As the base class has it; a leaf that the program differentiates by is a parameter."""
        self.mark_unowned(tensor)
        return super().saved(tensor)

    def _end_unfinished(self, before: int) -> None:
        """End what a kernel that failed took for itself after event `before`. A library keeps the workspaces it has."""
        sizes: dict[int, int] = {}
        for event in self.events[before:]:
            sizes[event.storage] = sizes.get(event.storage, 0) + event.delta
        alive = {reference.index for reference in self.live.values()}
        taken = ((index, size) for index, size in sizes.items() if size > 0 and index not in alive)
        self._end_all([(index, size) for index, size in taken if self.rows[index].role != "workspace"], self.last_op)

    def _on_other(self, gpu: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on a GPU that nobody looks at, or on the host."""
        with self._turn:
            self.clock.tick()
            self.last_op = func._overloadpacket.__name__
            _thread.depth += 1
            try:
                if gpu == HOST and not _writes_into_memory(func, args):
                    args, kwargs = as_stand_ins((args, kwargs))
                result = self.run_op(func, args, kwargs)
                for tensor in arguments_in(result if isinstance(result, (tuple, list)) else (result,)):
                    new = is_meta(tensor) and self.index_of(tensor) < 0 and self.devices.put(tensor, gpu)
                    if new and gpu == HOST:
                        self.host_memory.copies.enter(tensor.untyped_storage())
                return result
            finally:
                _thread.depth -= 1
                self._observer()

    def _between_ranks(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A collective; one on the GPU is recorded, and the buffers that it works on are marked."""
        kind, has_buffers = kind_of(func), is_given_buffers(func)
        if waits(func):
            return waited(func, args[0])
        with self._turn:
            self.clock.tick()
            before = len(self.events)
            if kind is not None and has_buffers:
                group = group_of(args)
                check_ranks(func, args, group.size())
                check_devices(arguments_in(args), group)
                if kind == "all-reduce":
                    check_layouts(arguments_in(args), group)
            result = answer(kind, func, args) if has_buffers else self._run(func, types, args, kwargs)
            self.last_op = func._overloadpacket.__name__
            if kind is not None and not has_buffers:
                carry_over(kind, args, result)
            if kind is not None and on_gpu(args) and not self.absent:
                group = group_of(args)
                number = self._groups.setdefault(group.group_name, len(self._groups))
                buffers = list(arguments_in(args if has_buffers else (result,)))
                moved, stream = bytes_moved(args, None if has_buffers else result), self._stream_of(buffers)
                self.sent(kind, moved, group.size(), before, number, stream)
                for tensor in buffers:
                    self.mark(tensor, "communication")
            elif kind is not None and has_buffers:
                self.evaluator.rely_on(alike(kind))
        return result

    def _stream_of(self, buffers: Sequence[torch.Tensor]) -> int:
        """The stream of the first of a collective's buffers, which is what it writes."""
        return self.streams.get(self.index_of(buffers[0]), 0) if buffers else 0

    def sent(
        self, kind: CollectiveKind, size: int, ranks: int, before: int | None = None, group: int = -1, stream: int = 0
    ) -> None:
        """A collective of `size` bytes among so many ranks of a group, after so many events: by default now."""
        clock, position = self.clock, len(self.events) if before is None else before
        self.collectives.append(Collective(kind, size, ranks, clock.phase, clock.layer, position, group, stream))

    @contextmanager
    def absently(self) -> Iterator[None]:
        """While open, what runs is the work of other ranks."""
        before, self.absent = self.absent, True
        try:
            yield
        finally:
            self.absent = before

    @contextmanager
    def in_pytorch(self) -> Iterator[None]:
        """While open, PyTorch's own C++ code makes tensors like those that it has: on the GPU."""
        self._in_pytorch = True
        try:
            yield
        finally:
            self._in_pytorch = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While open, this thread asks PyTorch about shapes: it runs ops that are none of the program's."""
        with _disable_current_modes():
            _thread.depth += 1
            try:
                yield
            finally:
                _thread.depth -= 1

    def _is_on_gpu(self, func: Any, args: Any, device: torch.device | None) -> bool:
        if on_gpu(args) or (func is _SET_STORAGE and is_meta(args[0])):
            return True
        if device is None or device.type == "cpu" or (func is _TO_COPY and is_own_meta(args[0])):
            return False
        return _names_gpu(device) or self._in_pytorch or self.clock.inside

    def _off_gpu(self, func: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        """Run an op on the CPU, or on the program's own `meta` tensors, which nobody records."""
        if not any_own_meta(args) and (device is None or device.type != "meta"):
            args = _with_numbers_as_tensors(func, args)
            result = func(*args, **_unpinned(kwargs))
            return self.host_memory.pin(result) if kwargs.get("pin_memory") else result
        if func is _TO_COPY and device is not None and (device.type == "cpu" or _names_gpu(device)):
            return func(args[0], device=_CPU)  # PyTorch's error: there is no data
        if device is not None and device.type == "cpu":
            return func(*args, **kwargs)
        _thread.depth += 1
        try:
            return claim(self.run_op(func, args, kwargs))
        finally:
            _thread.depth -= 1

    @property
    def clock(self) -> RunPosition:
        """Where this thread is in the run."""
        return _thread.clock or self._clock

    @clock.setter
    def clock(self, clock: RunPosition) -> None:
        self._clock = clock

    def begin_step(self, number: int) -> None:
        """Start the step of that number, in this thread and in the main one."""
        for clock in {self._clock, self.clock}:
            clock.step = number
            clock.phase = clock.index("step")

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """While open, this thread, which the program started, calls modules and runs backwards of its own."""
        _thread.clock = _ClockBeside(self._clock)
        self.backward_queue.begin_thread()
        try:
            yield
        finally:
            _thread.clock = None

    def _is_of_training(self, args: Any) -> bool:
        """Whether autograd records an op with these arguments, or it ends an evaluation by its use of gradients."""
        if torch.is_grad_enabled() and _any_requires_grad(args):
            return True
        if split_phase(self.clock.phases[self.clock.phase])[0] != "evaluation":
            return False
        indices = map(self.index_of, filter(is_meta, arguments_in(args)))
        return any(index >= 0 and self.rows[index].role == "gradient" for index in indices)

    def _open(self, role: Role, size: int, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        index = super()._open(self._likely_role(op) if role == "temporary" else role, size, op, dtype, shape)
        self._allocated(index)
        if size:
            self._allocate(index, size)
        return index

    def _likely_role(self, op: str) -> Role:
        """The role of a new storage that nothing else has shown the purpose of."""
        if self._in_pytorch:
            return "communication"  # the buckets of DistributedDataParallel, whose hooks may send something else
        if self.loads_state and op in COPYING:
            return "optimizer state"
        if self.likely_state is None or op not in FILLING or (op == "clone" and self.has_state()):
            return "temporary"
        if split_phase(self.clock.phases[self.clock.phase])[0] != "optimizer":
            return "temporary"
        self.likely_state.add(self.count)
        return "optimizer state"

    def _allocated(self, index: int) -> None:
        """A storage gets its memory from the stream that this thread works on."""
        if stream := self.current_stream():
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
            self._allocated(index)
        elif before != storage.nbytes():
            self._freed(index)
        super().resized(storage)
        if storage.nbytes() > before:
            try:
                self._allocate(index, storage.nbytes())
            except torch.OutOfMemoryError:
                storage.resize_(before)
                raise

    def _leave(self, reference: Any) -> None:
        if self.rows[reference.index].bytes:
            self._freed(reference.index)
        super()._leave(reference)

    def _freed(self, index: int) -> None:
        """The next event frees the block of a storage."""
        if index in self.order.used:
            self.order.free(index, (self.devices.index, self.streams.get(index, 0)))

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        """``tensor.record_stream(stream)``: once it is freed, its memory waits for that stream."""
        for piece in plain_tensors(tensor):
            if (index := self.index_of(piece)) >= 0:
                self.order.use(index, (stream.device_index, stream.stream_id))

    def made_at(self, storage: int, lines: Lines) -> None:
        """`lines` of the program made `storage`."""
        self.rows[storage].line = self._numbers.setdefault(lines, len(self._numbers))

    def _running_line(self) -> None:
        """Far above PyTorch's own calls: looked up for large storages alone, by the program (`made_at`)."""

    def storages(self, saved: Set[int]) -> tuple[Storage, ...]:
        """As the base class has them, with their streams."""
        storages = list(super().storages(saved))
        for index, stream in self.streams.items():
            storages[index] = storages[index]._replace(stream=stream)
        return tuple(storages)

    def share(self, part: torch.UntypedStorage, whole: torch.UntypedStorage) -> None:
        """The memory of `part` is that of `whole`, which is there as long as the part is."""
        reference = self.live.get(whole._cdata)
        if reference is not None:
            self.live[part._cdata] = reference.named(part)
        weakref.finalize(part, self._unshare, part._cdata, whole)

    def _unshare(self, part: int, _: torch.UntypedStorage) -> None:
        self.live.pop(part, None)

    @contextmanager
    def elsewhere(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """While open, these tensors are not on the GPU: whoever shards or moves them there makes others."""
        storages = [piece.untyped_storage() for tensor in tensors for piece in plain_tensors(tensor)]
        self._elsewhere = {storage._cdata: storage for storage in storages}
        try:
            yield
        finally:
            self._elsewhere = {}

    def enter(self, tensor: torch.Tensor, role: Role, op: str = "", size: int | None = None) -> int:
        """As the base class; nothing for what is `elsewhere`, on the host, or on a GPU that nobody looks at."""
        if not is_meta(tensor) and not tensor.is_quantized:
            return -1
        if self.devices.number_of(tensor) != self.devices.index:
            return -1
        if self._elsewhere and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._elsewhere:
            return -1
        return super().enter(tensor, role, op, size)

    def stand_in(self, tensor: torch.Tensor) -> None:
        """Let `tensor`, which has memory on the CPU, be a stand-in on the host from here on."""
        with self._turn, self.aside():
            fresh = as_stand_ins(tensor.detach()).requires_grad_(tensor.requires_grad)
        if self.devices.put(fresh, HOST):
            self.host_memory.copies.enter(fresh.untyped_storage())
        torch._C._swap_tensor_impl(tensor, fresh)

    def assign_role(self, tensor: torch.Tensor, role: Role, layer: int) -> None:
        """Give the storage of `tensor` a role and a layer that were not known when it was made.

        What is gathered from shards stays that: a module stores it while it is there, also before its first forward.
        """
        index = self.index_of(tensor)
        if index >= 0:
            self.rows[index].layer = layer
            if self.rows[index].role != "gathered parameter":
                self.rows[index].role = role

    def own(self, module: nn.Module, layer: int) -> None:
        """Give the tensors that `module` itself stores their role and their layer."""
        roles: tuple[tuple[Role, Any], ...] = (("parameter", module._parameters), ("buffer", module._buffers))
        for role, tensors in roles:
            for tensor in tensors.values():
                for piece in () if tensor is None else plain_tensors(tensor):
                    self.assign_role(piece, role, layer)

    def belongs(self, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """Let the storage of `tensor`, which no module made, be in the layer of that of `owner`."""
        index, owner_index = self.index_of(tensor), self.index_of(owner)
        if index >= 0 and owner_index >= 0 and self.rows[index].layer < 0:
            self.rows[index].layer = self.rows[owner_index].layer

    def refuse(self, storage: int) -> None:
        """Forget the last event of `storage`: there was no memory for it."""
        position = next(i for i in reversed(range(len(self.events))) if self.events[i].storage == storage)
        self.rows[storage].bytes -= self.events.pop(position).delta


def _writes_into_memory(func: Any, args: Any) -> bool:
    """Whether an op changes its first argument, and that is no stand-in."""
    return func._schema.is_mutable and not all(map(is_meta, arguments_in(args[:1])))


def _with_numbers_as_tensors(func: Any, args: Any) -> Any:
    """The arguments of an op, with tensors where it wants them: of those that stand for numbers in a graph, PyTorch
    hands a dispatch mode the numbers.
    """
    kinds = [type(value) for value in args]
    if not any(kind in _NUMBERS for kind in kinds):
        return args
    wanted = (str(argument.type) == "Tensor" for argument in func._schema.arguments)
    return tuple(
        torch.scalar_tensor(value, dtype=_NUMBERS[kind], device=_CPU) if is_tensor and kind in _NUMBERS else value
        for value, kind, is_tensor in zip(args, kinds, wanted, strict=False)
    )


def _any_requires_grad(args: Iterable[Any]) -> bool:
    """Whether autograd records an op with these arguments: one on the GPU requires a gradient."""
    return any(tensor.requires_grad and is_meta(tensor) for tensor in arguments_in(args))


def _unpinned(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Memory of the CPU can be pinned only where there is CUDA; it is as large either way."""
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _names_gpu(device: torch.device) -> bool:
    """Whether an op that names `device` means the GPU; a `meta` without number may be the program's own."""
    return device.type == "cuda" or (device.type == "meta" and device.index is not None)
