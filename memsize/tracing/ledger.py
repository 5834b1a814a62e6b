"""The ledger: what each op of a run allocates, in the order of its kernel.

Ops run without computing anything (`dispatch`). The storages among their outputs that are new, and what a GPU's kernel
takes meanwhile, become events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from memsize.kernels.convolution import FORWARD, TRACED, TRACED_AS
from memsize.kernels.convolution_workspaces import NONE, ConvolutionWorkspaces
from memsize.kernels.matmul import takes_cublas, takes_cublaslt
from memsize.kernels.multiply_adds import FLOPS_OF_ONE
from memsize.kernels.reduction_scratch import scratch
from memsize.kernels.registry import Temporary
from memsize.known_values.propagation import carry_over
from memsize.model.tensor_storage import plain_tensors, shape_of
from memsize.records.gpu import Multiprocessors
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.sparse_tensors import PARTS, parts_of
from memsize.tracing.dispatch import (
    DETACH,
    OpFacts,
    has_own_dispatch,
    replaced_by_fake,
    without_launches,
)
from memsize.tracing.storages import StorageRecorder


class Workspaces(NamedTuple):
    """Bytes that a GPU's libraries take from the allocator.

    `blas` is cuBLAS's workspace, one for each thread that multiplies matrices (the forward's and autograd's own). `lt`
    is cuBLASLt's for products with a bias or in float8, where it does not share that of cuBLAS: with `keeps_lt` one for
    each thread too, else taken during each product. `convolutions` gives what cuDNN takes during each convolution.
    `multiprocessors` decide what PyTorch's own reductions take.
    """

    blas: int = 0
    lt: int = 0
    convolutions: ConvolutionWorkspaces | None = None
    keeps_lt: bool = False
    multiprocessors: Multiprocessors | None = None


NO_WORKSPACES = Workspaces()
Handles: TypeAlias = dict[bool, tuple[int, int]]
"""The workspaces that threads have, by whether they run a backward: the storage and its bytes."""
_OWN_CONVOLUTION = "_slow_conv2d"
"""The op that takes cuBLAS's workspace for a convolution of PyTorch's own."""


class Ledger(StorageRecorder):
    """The events of one run, as its ops cause them.

    `workspaces` are those of the simulated GPU, if there is one.
    """

    def __init__(self, device: str = "meta", workspaces: Workspaces = NO_WORKSPACES) -> None:
        super().__init__(device)
        self.workspaces = workspaces
        self.counts = True
        """Whether multiply-adds are counted: tables show those of the first forward."""
        self.multiply_adds: dict[int, int] = {}
        """By layer."""
        self.layer_inside: Callable[[int, str], int] = lambda layer, path: layer
        """The layer of the module at a path below that of another layer."""
        self._compiled_in = -1
        self._handles: Handles = {}
        self._lt_handles: Handles = {}

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
        if op.is_cublas and takes_cublas(args):
            self.open_blas_handle(op.name)
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
            self._note(result[::-1] if op.last_first else result, op.name)
        if op.result_first:
            copies = self._open_copies(op, args, kwargs)
        if op.is_cublaslt and takes_cublaslt(args, kwargs):
            self._note_cublaslt(op.name)
        opened = [] if op.temporaries is None else self._open_temporaries(op.temporaries(*args), op.name)
        if op.reduction is not None and (gpu := self.workspaces.multiprocessors) is not None:
            opened += self._open_temporaries(scratch(op.reduction(*args), gpu), op.name)
        self._end_all(opened, op.name)
        self._end_all(copies, op.name)

    def _note_cublaslt(self, op: str) -> None:
        blas, lt, _, keeps_lt, _ = self.workspaces
        if lt and not keeps_lt:
            self._borrow(lt, 0, op)
        elif size := lt or blas:
            self._keep_workspace(self._lt_handles if lt else self._handles, size, op)

    def open_blas_handle(self, op: str) -> None:
        """Record the workspace of the thread's cuBLAS handle, if `op` is the first to need one."""
        if self.workspaces.blas:
            self._keep_workspace(self._handles, self.workspaces.blas, op)

    def _keep_workspace(self, threads: Handles, size: int, op: str) -> None:
        """A thread's first matrix product creates a handle, whose workspace is kept from then on."""
        if self.clock.backward not in threads:
            threads[self.clock.backward] = self._open("workspace", size, op, torch.uint8, (size,)), size

    def free_workspaces(self) -> None:
        """Free what `_keep_workspace` has kept, as ``torch._C._cuda_clearCublasWorkspaces()`` does."""
        for handles in (self._handles, self._lt_handles):
            self._end_all(handles.values(), "clear_workspaces")
            handles.clear()

    @contextmanager
    def workspaces_apart(self, apart: tuple[Handles, Handles] | None = None) -> Iterator[None]:
        """While open, matrix products take the workspaces `apart`, which stay, or new ones, which are freed at the
        end."""
        before = self._handles, self._lt_handles
        self._handles, self._lt_handles = apart or ({}, {})
        try:
            yield
        finally:
            if apart is None:
                self.free_workspaces()
            self._handles, self._lt_handles = before

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
            self._borrow(*convolutions.forward(args, result), name)
        else:
            for gradient, workspace in zip(result, (*convolutions.backward(args), NONE), strict=True):
                self._note(gradient, name)
                self._borrow(*workspace, name)

    def _note_own_convolution(self, columns: Temporary, result: Any, op: str) -> None:
        """PyTorch's own kernel multiplies `columns`. One buffer serves both gradients, and that of the weight comes
        last (cuda/ConvolutionMM2d.cu, `slow_conv2d_backward_out_cuda`).
        """
        first, *rest = result if isinstance(result, tuple) else (result,)
        self._note(first, op)
        opened = self._open_temporaries([columns] if columns.bytes else (), op)
        if opened:
            self.open_blas_handle(_OWN_CONVOLUTION)
        self._note(rest[::-1], op)
        self._end_all(opened, op)

    def _borrow(self, size: int, doubt: int, op: str) -> None:
        """Record a workspace that an op takes and gives back."""
        if size:
            index = self._open("workspace", size, op, torch.uint8, (size,))
            self.rows[index].doubt = doubt
            self._end_all([(index, size)], op)

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
        if op.is_cublas and takes_cublas(args):
            self.open_blas_handle(op.name)
        self._note_kernel(op, args, kwargs, None)
