"""The region in which this process has a virtual GPU.

It is process-wide, as a GPU is: threads that the program starts see it too. One region is open at a time.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx
import torch.utils.data

from memsize.errors import InputError
from memsize.tracing.functional import functional_transforms_allowed
from memsize.tracing.ledger import resizes_seen
from memsize.tracing.run import gpu_semantics
from memsize.virtual import tensors
from memsize.virtual.driver import Driver, Event, Stream
from memsize.virtual.ledger import VirtualLedger
from memsize.virtual.tensors import Replacement

_CUDA = "12.8"
"""The CUDA version that ``torch.version.cuda`` names where PyTorch was built without."""
_CUDNN = 91501
_EAGER = "torch.compile is left out: compiled code fuses ops, and often needs less memory than what is shown"
_open = threading.Lock()


@contextmanager
def virtual_gpu(driver: Driver, ledger: VirtualLedger, more: Iterable[Replacement] = ()) -> Iterator[None]:
    """While open, this process has the GPU of `driver`, and what happens on it is recorded in `ledger`; `more` is
    replaced besides.

    Raises `InputError` when a region is open already.
    """
    # It makes tables of PyTorch's functions when it is imported, as the first optimizer does.
    importlib.import_module("torch._dynamo")
    if not _open.acquire(blocking=False):
        raise InputError("this process has a virtual GPU already")
    with ExitStack() as regions:
        regions.callback(_open.release)
        hooks = torch.autograd.graph.saved_tensors_hooks(ledger.saved, attrgetter("tensor"))
        semantics = gpu_semantics(ledger, capability=driver.card.capability)
        for region in (resizes_seen(ledger), functional_transforms_allowed(), hooks, ledger, semantics):
            regions.enter_context(region)
        regions.enter_context(_replaced((*_replacements(driver, ledger), *more)))
        yield


def _replacements(driver: Driver, ledger: VirtualLedger) -> Iterator[Replacement]:
    yield torch, "compile", _uncompiled(ledger)
    yield from tensors.replacements(lambda parameter: ledger.mark(parameter, "parameter"))
    yield from ((torch._C, name, function) for name, function in driver.functions().items())
    yield from _of_cuda(driver)
    yield from _of_backends()


def _of_cuda(driver: Driver) -> Iterator[Replacement]:
    cuda: Any = torch.cuda
    memory = driver.memory
    runtime = SimpleNamespace(cudaMemGetInfo=lambda device: (memory.free, memory.total))
    yield cuda, "_lazy_init", lambda: None
    yield cuda, "_initialized", True
    yield cuda, "_is_in_bad_fork", lambda: False
    yield cuda, "_get_device_properties", lambda device: driver.properties
    yield cuda, "_exchange_device", driver.functions()["_cuda_exchangeDevice"]
    yield cuda, "_maybe_exchange_device", driver.functions()["_cuda_maybeExchangeDevice"]
    yield cuda, "default_generators", (driver.seed,)
    yield cuda, "cudart", lambda: runtime
    yield torch.storage, "_to", _storage_to(torch._utils._to)
    yield cuda.memory, "mem_get_info", lambda device=None: (memory.free, memory.total)
    yield cuda, "mem_get_info", lambda device=None: (memory.free, memory.total)
    yield cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False
    yield cuda.nvtx, "_nvtx", _Silent()
    for owner in (torch, cuda, cuda.streams):
        yield owner, "Stream", Stream
        yield owner, "Event", Event


def _of_backends() -> Iterator[Replacement]:
    cudnn: Any = torch.backends.cudnn
    yield cudnn, "is_available", lambda: True
    yield cudnn, "version", lambda: _CUDNN
    yield torch.backends.cuda, "is_built", lambda: True
    if torch.version.cuda is None:
        yield torch.version, "cuda", _CUDA


def _uncompiled(ledger: VirtualLedger) -> Any:
    """`torch.compile` that returns what it is given: the program runs eagerly."""

    def compile(model: Any = None, **options: Any) -> Any:
        ledger.evaluator.notes[_EAGER] = None
        return (lambda each: each) if model is None else model

    return compile


def _storage_to(original: Any) -> Any:
    """`torch.load` moves storages, from which it then makes tensors."""

    def moved(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type == "cuda":
            return torch.UntypedStorage(storage.nbytes(), device="meta")
        return original(storage, device, non_blocking)

    return moved


class _Silent:
    """Ranges and marks for a profiler: nothing listens."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


@contextmanager
def _replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    before: list[Replacement] = []
    try:
        for owner, name, value in replacements:
            before.append((owner, name, vars(owner).get(name, _NOTHING)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_NOTHING = object()
