"""Several GPUs that one process drives: what PyTorch's C++ moves between them.

`nn.DataParallel` copies a model to each GPU, scatters the batch, gathers the outputs and adds up the gradients. That is
Python, except for the functions here. NCCL sends without memory of PyTorch's own allocator.

Source: torch/csrc/cuda/comm.cpp and torch/nn/parallel/comm.py (2.11 to 2.14).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any, Final

import torch
import torch._prims_common
import torch.cuda.nccl
import torch.nn.parallel._functions
import torch.nn.parallel.comm
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from memsize.processes.patches import Patch, wrapping
from memsize.records.roles import Role
from memsize.torch_internals.meta import is_meta
from memsize.virtual.device_assignment import devices as assignment
from memsize.virtual.ledger.gpu_storages import GpuStorages

_modules: Final[tuple[Any, ...]] = (
    torch.nn.parallel._functions,
    torch.nn.parallel.comm,
    sys.modules["torch.nn.parallel.parallel_apply"],
)


def replacements(ledger: GpuStorages) -> Iterator[Patch]:
    """Patch the functions that move tensors between GPUs, so that they notify `ledger`."""
    between = _Between(ledger)
    for name in ("broadcast", "broadcast_coalesced", "scatter", "gather"):
        yield torch._C, f"_{name}", getattr(between, name)
    yield torch.cuda.nccl, "is_available", lambda tensors: all(t.is_cuda and not t.is_sparse for t in tensors)
    yield torch.cuda.nccl, "reduce", between.reduce
    in_python, comm, applying = _modules
    yield in_python, "torch", _Torch()
    yield in_python, "_streams", None
    yield applying, "threading", _InTurn
    yield wrapping(nn.Module, "_replicate_for_data_parallel", _replicate)
    yield wrapping(comm, "reduce_add_coalesced", between.add)


class _Torch:
    """The module `torch`, but for devices given by a number alone: a build without GPUs refuses those."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(named: Any) -> torch.device:
        return torch.device("cuda", named) if type(named) is int else torch.device(named)


def _replicate(original: Callable[[Any], Any], module: nn.Module) -> Any:
    """The calls of a copy of a module are watched where those of the module are."""
    copy, call = original(module), vars(module).get("_compiled_call_impl")
    if call is not None and hasattr(call, "of"):
        vars(copy)["_compiled_call_impl"] = call.of(copy)
    return copy


class _InTurn:
    """One copy of a model after the other: by the numbers of its nodes, in order, a backward finds its layers."""

    Lock = threading.Lock

    class Thread:
        def __init__(self, target: Callable[..., None], args: Any = ()) -> None:
            self.start = partial(target, *args)

        def join(self) -> None: ...


class _Between:
    """The functions of PyTorch's C++ by which one process moves tensors between its GPUs."""

    def __init__(self, ledger: GpuStorages) -> None:
        self._ledger = ledger

    def broadcast(self, tensor: Tensor, devices: Sequence[int]) -> tuple[Tensor, ...]:
        """`tensor` on each of the devices; where it is, itself."""
        own = assignment().number_of(tensor)
        self._ledger.sent("broadcast", tensor.nbytes, len(devices))
        return tuple(
            tensor if number == own else torch.empty(tensor.shape, dtype=tensor.dtype, device=f"cuda:{number}")
            for number in devices
        )

    def broadcast_coalesced(
        self, tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
    ) -> list[list[Tensor]]:
        """Copies on each device, as parts of buffers of about `buffer_size` bytes; the first device keeps its own."""
        copies: list[list[Tensor]] = [[] for _ in devices[1:]]
        for chunk in _take_tensors(tensors, buffer_size):
            _, *flat = self.broadcast(_flatten_dense_tensors(chunk), devices)
            role: Role = "parameter" if any(isinstance(buffer, nn.Parameter) for buffer in chunk) else "buffer"
            for copied, buffer in zip(copies, flat, strict=True):
                self._ledger.mark(buffer, role)
                copied += [part.detach() for part in _unflatten_dense_tensors(buffer, chunk)]
        return [list(tensors), *(list(_reorder_tensors_as(copied, tensors)) for copied in copies)]

    def scatter(
        self, tensor: Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any = None
    ) -> tuple[Tensor, ...]:
        """A part of `tensor` on each device, copied there on the stream that is given for it."""
        chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split_with_sizes(sizes, dim)
        copies = []
        for chunk, number, stream in zip(chunks, devices, streams or repeat(None), strict=False):
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                copies.append(chunk.to(torch.device("cuda", number), non_blocking=True))
            if not is_meta(chunk):  # from the CPU: what the program passes in, no gradient
                self._ledger.mark(copies[-1], "input")
        return tuple(copies)

    def gather(self, tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
        """One tensor of all of them on one device; -1 is the CPU."""
        first, sizes = tensors[0], [part.shape[dim] for part in tensors]
        shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
        device = torch.device("cpu") if destination == -1 else torch.device("cuda", assignment().named(destination))
        layouts = {torch._prims_common.suggest_memory_format(part) for part in tensors}
        layout = layouts.pop() if len(layouts) == 1 else torch.contiguous_format
        gathered = torch.empty(shape, dtype=first.dtype, device=device, memory_format=layout)
        for part, tensor in zip(gathered.split(sizes, dim), tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        return gathered

    def reduce(self, inputs: Sequence[Tensor], *args: Any, **options: Any) -> None:
        """The sum goes where there is room for it already."""
        self._ledger.sent("reduce", inputs[0].nbytes, len(inputs))

    def add(self, original: Callable[..., Any], inputs: Sequence[Sequence[Tensor]], *args: Any, **options: Any) -> Any:
        """Mark the gradients of each GPU, which live until they are added up."""
        for gradient in (item for gradients in inputs for item in gradients):
            self._ledger.mark(gradient, "unsharded gradient")
        return original(inputs, *args, **options)
