"""The ledger of a virtual GPU: only what happens on the GPU is recorded, work on the CPU is really done.

Code that asks for ``device="cuda"`` below Python (``torch.set_default_device``, ``with torch.device("cuda")``, names
imported with ``from torch import zeros``) is answered here, where its op is dispatched.

`torch.library.custom_op`, `triton_op`, `register_kernel` and `Library.impl` give PyTorch's dispatcher a function in
Python. On the GPU the one for CUDA is called, or else that for any device: what it allocates counts, and its ops are
seen one by one. A body may need the GPU itself, as that of a wrapper around an extension; then the op's fake stands for
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import _pop_mode, _push_mode

from memsize.kernels.convolution import FORWARD as CONVOLUTION
from memsize.kernels.strides import contiguous
from memsize.known_values.evaluation import as_stand_ins
from memsize.model.tensor_storage import PLAIN_TYPES
from memsize.processes.patches import assigned
from memsize.ranks.collectives import (
    NAMESPACES,
    alike,
    answer,
    bytes_moved,
    carry_over,
    group_of,
    is_asynchronous,
    is_given_buffers,
    kind_of,
    waited,
    waits,
)
from memsize.ranks.peers import check
from memsize.records.aggregates import split_phase
from memsize.torch_internals.jit_tracing import is_tracing, record_as, record_convolution, untraced
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import arguments_in
from memsize.tracing.dispatch import DETACH, OpFacts, body_of, has_own_dispatch, replaced_by_fake
from memsize.tracing.ledger import Workspaces
from memsize.virtual.device_assignment import HOST, any_own_meta, claim, gpu_of, is_own_meta, on_gpu, taken_to_gpu
from memsize.virtual.host_memory import staged_for_host
from memsize.virtual.ledger.gpu_storages import GpuStorages, thread
from memsize.virtual.ledger.stream_order import Queue, host_waits
from memsize.virtual.nested_tensors import STRIDED, is_refused

_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
_NUMBERS: Final = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtypes of tensors that stand for numbers."""
_TO_COPY: Final = torch.ops.aten._to_copy.default
_COPY: Final = torch.ops.aten.copy_.default
_SET_STORAGE: Final = torch.ops.aten.set_.source_Storage_storage_offset
"""As `torch.load` makes tensors."""
_AVOIDS: Final = "TORCH_NCCL_AVOID_RECORD_STREAMS"
_TRUE: Final = ("1", "y", "yes", "t", "true")
_RECORDS: Final = (
    "before PyTorch 2.8, what asynchronous collectives read and write is reused only once the GPU has done them; "
    f"{_AVOIDS}=1 prevents that"
)
_NEEDS_GPU: Final = (RuntimeError, ImportError, OSError, AssertionError)
"""What code raises that does not find its GPU."""


class VirtualLedger(GpuStorages):
    """Records the ops on stand-ins; `observer` is called after each, when its events are there."""

    def __init__(
        self,
        workspaces: Workspaces,
        observer: Callable[[], None] = lambda: None,
        allocate: Callable[[int, int], None] = lambda storage, size: None,
    ) -> None:
        super().__init__(workspaces, allocate)
        self._groups: dict[str, int] = {}
        """The groups of processes that collectives on the GPU were among, by name: each with its number."""
        self.records_streams = False
        """Whether collectives hand their buffers to NCCL's streams, as PyTorch did before 2.8."""
        self.alone = True
        """Whether this process runs without the others of its group, if it is in one: collectives are answered here."""
        self.absent = False
        """Whether what runs is the work of another rank: it is done here without memory, and not recorded."""
        self.custom_op = ""
        """The op that is defined in Python and running."""
        self.differentiated: Callable[[], None] = lambda: None
        """Called before each op outside of modules that shows that the program trains."""
        self.inline: Callable[[nn.Module], None] = lambda module: None
        """Called with each module whose code becomes part of a compiled function."""
        self.inlined: Callable[[bool], AbstractContextManager[None]] = lambda grad: nullcontext()
        """The region of a compiled forward of such modules."""
        self.evaluator.lenient = True
        self._observer = observer

    def absently(self) -> AbstractContextManager[None]:
        """While open, what runs is the work of other ranks."""
        return assigned(self, "absent", True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_own_dispatch(types):
            return NotImplemented
        if is_tracing() is not None:
            return self._traced(func, types, args, kwargs)
        if not kwargs and func.namespace == "aten" and args and all(map(_is_plain_on_cpu, args)):
            return func(*_with_numbers_as_tensors(func, args))  # nearly all that a program does beside the GPU
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
        recorded = None
        if func is CONVOLUTION:
            with self.aside():
                recorded = record_convolution(args)
            if not on_gpu(args):
                return recorded
        with untraced():
            result = self.__torch_dispatch__(func, types, args, kwargs)
        if recorded is not None:
            record_as(result, recorded)
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        backend = _backend_of(func, args, kwargs)
        if backend is None or self.absent or self.op_facts[func].rule is not None:
            result = self._run_in_place(func, types, args, kwargs)
        else:
            result = self._run_body(backend, func, types, args, kwargs)
        if self.order.waiting and host_waits(func, args, kwargs):
            self.order.synchronize(self.order.moment(self._queue()))
        return result

    def _queue(self) -> Queue:
        return self.devices.index, self.current_stream()

    # -- compiled code -------------------------------------------------------------------------------------------------

    @contextmanager
    def inside_compiled(self, arguments: list[Any], forward: bool | None = None) -> Iterator[None]:
        is_outside = not self.clock.inside
        self._enter_unknown(arguments)
        if is_outside and forward is None and self._is_of_training(arguments):
            self.differentiated()
        phase = self.inlined(forward) if is_outside and forward is not None else nullcontext()
        with phase, super().inside_compiled(arguments):
            yield

    def _enter_unknown(self, arguments: list[Any]) -> None:
        """Record what no op has made, such as an optimizer's state, which the compiler makes."""
        for tensor in arguments_in(arguments):
            if is_meta(tensor) and self.index_of(tensor) < 0:
                self.enter(tensor, "temporary", "")

    def allocated(self, tensor: torch.Tensor, op: str) -> None:
        with self._turn:
            super().allocated(tensor, op)
        self._observer()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def launched(self, func: Any, args: Any, kwargs: Any) -> None:
        with self._turn:
            super().launched(func, args, kwargs)
        self._observer()

    # -- ops that are defined in Python -------------------------------------------------------------------------------

    def _run_body(self, backend: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the ops of a body one by one. Where the body needs a real GPU, the op's fake stands for it, if any."""
        outer, depth = self.custom_op, thread.depth
        self.custom_op, thread.depth = func.name(), 0
        try:
            _push_mode(self)  # a mode's own way in and out also changes the whole process
            try:
                return func.redispatch(backend, *args, **kwargs)
            finally:
                _pop_mode()
        except Exception as error:
            if (
                not isinstance(error, _NEEDS_GPU)
                or isinstance(error, torch.OutOfMemoryError)
                or not on_gpu((*args, *kwargs.values()))
            ):
                raise
            thread.depth = depth
            try:
                result = self._run_in_place(func, types, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                raise error from None
            self.evaluator.notes[replaced_by_fake(func, error)] = None
            return result
        finally:
            self.custom_op, thread.depth = outer, depth

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any], op: OpFacts) -> Any:
        """Return the result of an op, whose body was run before or stays out."""
        return self.run_op(func, args, kwargs, op)

    # -- where an op runs ---------------------------------------------------------------------------------------------

    def _run_in_place(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if not self._is_on_gpu(func, args, device):
            return self._run_off_gpu(func, args, kwargs, device)
        if func in (_TO_COPY, _COPY) and all(tensor.layout is torch.strided for tensor in arguments_in(args)):
            self._stage_for_host(func, args, kwargs)
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
            return self._run_unrecorded(gpu, func, args, kwargs, pins)
        with self._turn:
            if func is not DETACH and not self.clock.inside and self._is_of_training(args):
                self.differentiated()
            thread.depth += 1
            before = len(self.events)
            try:
                for tensor in taken_to_gpu(args) if device is None else ():
                    self.enter(tensor, "temporary", self.op_facts[func].name)
                result = super().__torch_dispatch__(func, types, args, kwargs)
                if self.order.hands_over and not self.op_facts[func].composite and _launches(func):
                    self.order.launch(self._queue())
                self._follow_clues(func, args, result)
                if self.op_facts[func].writes:
                    self.note_written(arguments_in(args[:1]))
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
                thread.depth -= 1
                self._observer()

    def _stage_for_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Record what a copy to the host takes on the GPU, which is gone when it ends."""
        source, strides, non_blocking = args[0], None, kwargs.get("non_blocking")
        if func is _COPY:
            target, source, *waits = args
            on_host, dtype, non_blocking = self.devices.is_on_host(target), target.dtype, non_blocking or any(waits)
            source, strides = source.expand(target.shape), target.stride()
        else:
            device, dtype = kwargs.get("device"), kwargs.get("dtype") or source.dtype
            on_host = device is not None and (device.type == "cpu" or device == torch.device("meta", HOST))
            if kwargs.get("memory_format") is torch.contiguous_format:
                strides = contiguous(source.shape)
        if on_host and is_meta(source) and self.index_of(source) >= 0:
            with self._turn:
                self.clock.tick()
                name = self.op_facts[func].name
                staged = staged_for_host(source, strides, dtype, bool(non_blocking))
                self._end_all(self._open_temporaries(staged, name), name)

    def _is_on_gpu(self, func: Any, args: Any, device: torch.device | None) -> bool:
        if on_gpu(args) or (func is _SET_STORAGE and is_meta(args[0])):
            return True
        if device is None or device.type == "cpu" or (func is _TO_COPY and is_own_meta(args[0])):
            return False
        return _names_gpu(device) or self._in_pytorch or self.clock.inside

    def _is_of_training(self, args: Any) -> bool:
        """Whether autograd records an op with these arguments, or it ends an evaluation by its use of gradients."""
        if torch.is_grad_enabled() and any(t.requires_grad and is_meta(t) for t in arguments_in(args)):
            return True
        if split_phase(self.clock.phases[self.clock.phase])[0] != "evaluation":
            return False
        indices = map(self.index_of, filter(is_meta, arguments_in(args)))
        return any(index >= 0 and self.rows[index].role == "gradient" for index in indices)

    def _run_off_gpu(self, func: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        """Run an op on the CPU, or on the program's own `meta` tensors, which nobody records."""
        if not any_own_meta(args) and (device is None or device.type != "meta"):
            result = func(*_with_numbers_as_tensors(func, args), **_unpinned(kwargs))
            return self.host_memory.pin(result) if kwargs.get("pin_memory") else result
        if func is _TO_COPY and device is not None and (device.type == "cpu" or _names_gpu(device)):
            return func(args[0], device=_CPU)  # PyTorch's error: there is no data
        if device is not None and device.type == "cpu":
            return func(*args, **kwargs)
        thread.depth += 1
        try:
            return claim(self.run_op(func, args, kwargs))
        finally:
            thread.depth -= 1

    def _run_unrecorded(self, gpu: int, func: Any, args: Any, kwargs: Any, pins: bool) -> Any:
        """Run an op on a GPU that nobody looks at, or on the host, where its result may be pinned."""
        with self._turn:
            self.clock.tick()
            self.last_op = func._overloadpacket.__name__
            thread.depth += 1
            try:
                writes_into_memory = func._schema.is_mutable and not all(map(is_meta, arguments_in(args[:1])))
                if gpu == HOST and not writes_into_memory:
                    args, kwargs = as_stand_ins((args, kwargs))
                result = self.run_op(func, args, kwargs)
                for tensor in arguments_in(result if isinstance(result, (tuple, list)) else (result,)):
                    new = is_meta(tensor) and self.index_of(tensor) < 0 and self.devices.put(tensor, gpu)
                    if new and gpu == HOST:
                        self.host_memory.copied(tensor.untyped_storage(), pinned=pins)
                return self.host_memory.pin(result) if pins and gpu == HOST else result
            finally:
                thread.depth -= 1
                self._observer()

    # -- collectives --------------------------------------------------------------------------------------------------

    def _between_ranks(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A collective; one on the GPU is recorded, and the buffers that it works on are marked."""
        kind, has_buffers = kind_of(func), is_given_buffers(func)
        if waits(func):
            return waited(func, args[0])
        with self._turn:
            self.clock.tick()
            before = len(self.events)
            if kind is not None and has_buffers:
                check(kind, func, args, group_of(args))
            if has_buffers:
                self.note_written(arguments_in(args))
            result = answer(kind, func, args) if has_buffers else self._run(func, types, args, kwargs)
            self.last_op = func._overloadpacket.__name__
            if kind is not None and not has_buffers:
                carry_over(kind, args, result)
            if kind is not None and on_gpu(args) and not self.absent:
                group = group_of(args)
                number = self._groups.setdefault(group.group_name, len(self._groups))
                buffers = list(arguments_in(args if has_buffers else (result,)))
                moved = bytes_moved(args, None if has_buffers else result)
                stream = self.streams.get(self.index_of(buffers[0]), 0) if buffers else 0  # that of what it writes
                self.sent(kind, moved, group.size(), before, number, stream)
                for tensor in buffers:
                    self.mark(tensor, "communication")
                if self.records_streams and is_asynchronous(func, args):
                    self._record_stream(number, [*arguments_in(args), *buffers])
            elif kind is not None and has_buffers:
                self.evaluator.rely_on(alike(kind))
        return result

    def _record_stream(self, group: int, buffers: list[torch.Tensor]) -> None:
        """Hand the buffers of a collective to its group's stream, which the program's waits for before it goes on."""
        if os.environ.get(_AVOIDS, "").lower() in _TRUE:
            return
        self.evaluator.notes[_RECORDS] = None
        stream = self.devices.index, -1 - group
        self.order.wait(stream, self.order.moment(self._queue()))
        for buffer in buffers:
            self.hand_over(buffer, stream)
        self.order.wait(self._queue(), self.order.moment(stream))


def _is_plain_on_cpu(value: Any) -> bool:
    kind = type(value)
    if kind in PLAIN_TYPES:
        return not is_meta(value)
    return kind in _NUMBERS or value is None or (kind is list and bool(value) and type(value[0]) is int)


def _with_numbers_as_tensors(func: Any, args: Any) -> Any:
    """The arguments of an op, with tensors where it wants them: in a graph, tensors stand for numbers."""
    if _NUMBERS.keys().isdisjoint(map(type, args)):
        return args
    wanted = _wants_tensors(func)
    return tuple(
        torch.scalar_tensor(value, dtype=_NUMBERS[type(value)], device=_CPU)
        if index in wanted and type(value) in _NUMBERS
        else value
        for index, value in enumerate(args)
    )


_WITHOUT_KERNEL: Final = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided _unsafe_view _reshape_alias lift_fresh "
    "resize_ set_".split()
)


@cache
def _launches(func: Any) -> bool:
    """Whether an op launches a kernel, and is none that only calls others."""
    returns = func._schema.returns
    is_view = returns and all(value.alias_info and not value.alias_info.is_write for value in returns)
    return not (is_view or func._overloadpacket.__name__ in _WITHOUT_KERNEL)


@cache
def _wants_tensors(func: Any) -> frozenset[int]:
    """The positions at which an op takes a tensor and no number, whose dtype would give way to that of tensors."""
    if torch._C._should_allow_numbers_as_tensors(func._overloadpacket.__name__):
        return frozenset()
    arguments = enumerate(func._schema.arguments)
    return frozenset(index for index, argument in arguments if str(argument.type) == "Tensor")


def _unpinned(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Memory of the CPU can be pinned only where there is CUDA; it is as large either way."""
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _names_gpu(device: torch.device) -> bool:
    """Whether an op that names `device` means the GPU; a `meta` without number may be the program's own."""
    return device.type == "cuda" or (device.type == "meta" and device.index is not None)


def _backend_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the dispatch key of the Python function that runs `func` where its arguments are, None without one."""
    values = (*args, *kwargs.values())
    if any_own_meta(values):
        return None
    goes_to_gpu = on_gpu(values) or any(isinstance(v, torch.device) and v.type == "cuda" for v in values)
    return body_of(func, "CUDA" if goes_to_gpu else "CPU")
