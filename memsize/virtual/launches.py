"""Launches that a virtual GPU leaves out: CUDA graphs, which run eagerly instead, and kernels outside of PyTorch.

Code inside a capture runs at once, and allocates from the graph's own memory pool. A kernel of Triton, NVRTC or
bitsandbytes' native library, or of DeepSpeed's optimizers, writes into existing tensors, so nothing is allocated; known
values of its arguments become unknown.
Scratch memory of a kernel (`triton.set_allocator`) is not counted.

Source: torch/cuda/graphs.py and memory.py; DeepSpeed 0.19, `op_builder/builder.py` (`load`) and `ops/adam/`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import torch

from memsize.device.cards import DeviceProperties
from memsize.processes.patches import LatePatches, Patch, wrapping
from memsize.records.finding import join_names
from memsize.tracing.dispatch import left_out
from memsize.tracing.ledger import Handles
from memsize.virtual.ledger.gpu_ledger import VirtualLedger

_EAGER = "CUDA graphs are not captured: their code runs once, in a memory pool that is never given back"


def replacements(ledger: VirtualLedger) -> Iterator[Patch]:
    """Patch the classes and functions for CUDA graphs and memory pools. A note is left when a graph is captured."""
    cuda: Any = torch.cuda
    numbers = itertools.count(1)
    workspaces: tuple[Handles, Handles] = {}, {}
    """Those of the stream on which all graphs are captured (`graph.default_capture_stream`)."""

    def handle() -> tuple[int, int]:
        return 0, next(numbers)

    class CUDAGraph:
        """A graph whose capture is an ordinary run, and whose replay does nothing: its outputs are there."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool = handle()
            self._capture = ExitStack()

        def capture_begin(self, pool: Any = None, *args: Any, **options: Any) -> None:
            ledger.evaluator.notes.setdefault(_EAGER)
            self._pool = pool or self._pool
            self._capture.enter_context(ledger.private_pool(self._pool[1]))
            self._capture.enter_context(ledger.workspaces_apart(workspaces))

        def capture_end(self) -> None:
            self._capture.close()

        def pool(self) -> Any:
            return self._pool

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: None  # instantiate, replay, reset, debug_dump …

    class MemPool:
        """A pool from which tensors are allocated where `use_mem_pool` says so."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.id = handle()

        def use_count(self) -> int:
            return 1

        def snapshot(self, include_traces: bool = True) -> list[Any]:
            return []

    for owner in (cuda, cuda.graphs):
        yield owner, "CUDAGraph", CUDAGraph
        yield owner, "graph_pool_handle", handle
    for owner in (cuda, cuda.memory):
        yield owner, "MemPool", MemPool
        yield owner, "use_mem_pool", lambda pool, device=None: ledger.private_pool(pool.id[1])
    yield from _nvrtc(ledger)


# -- kernels that are compiled at run time ----------------------------------------------------------------------------

MODULE: Final = "triton.runtime.autotuner"
"""What imports the rest of Triton's launching, and is imported with it."""
_NOTE: Final = "{} kernels are not run ({}): they write to existing tensors and allocate no memory"


class _NotRun:
    """The kernels of one compiler that were left out, as a note names them."""

    def __init__(self, ledger: VirtualLedger, compiler: str) -> None:
        self._ledger, self._compiler = ledger, compiler
        self._names: dict[str, None] = {}

    def launch(self, name: str, *args: Any, **options: Any) -> None:
        left_out(*args, **options)
        notes, op = self._ledger.evaluator.notes, self._ledger.custom_op
        notes.pop(self._note, None)
        self._names[name + (f" in {op}" if op else "")] = None
        notes[self._note] = None

    @property
    def _note(self) -> str:
        return _NOTE.format(self._compiler, join_names(tuple(self._names)))


class _NvrtcKernel:
    """The result of `torch.cuda._compile_kernel` (torch/cuda/_utils.py, 2.9 to 2.14)."""

    def __init__(self, name: str, left_out: _NotRun) -> None:
        self._name, self._left_out = name, left_out

    def __call__(self, grid: Any = (), block: Any = (), args: Any = None, *_: Any, **__: Any) -> None:
        self._left_out.launch(self._name, args)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        pass


def _nvrtc(ledger: VirtualLedger) -> Iterator[Patch]:
    kernels = _NotRun(ledger, "NVRTC")
    for name in ("_compile_kernel", "compile_kernel"):
        if hasattr(torch.cuda, name):
            yield torch.cuda, name, lambda source, kernel, *_, **__: _NvrtcKernel(kernel, kernels)


def later(ledger: VirtualLedger, gpu: DeviceProperties) -> dict[str, LatePatches]:
    """Return the patches of Triton, for when the program has imported it."""
    kernels = _NotRun(ledger, "Triton")

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        if getattr(kernel, "configs", None):
            kernel.best_config = kernel.configs[0]  # programs read its block sizes after a launch
        while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):  # an autotuner, a set of heuristics
            kernel = kernel.fn
        kernels.launch(getattr(kernel, "__name__", "a kernel without a name"), *args, **options)

    return {
        MODULE: lambda module: [
            (module.Autotuner, "run", noted),
            (sys.modules["triton.runtime.jit"].JITFunction, "run", noted),
            *_triton_driver(gpu),
        ],
        "bitsandbytes.cextension": lambda module: [
            wrapping(getattr(module, library), "__getattr__", _native_function)
            for library in ("BNBNativeLibrary", "ErrorHandlerMockBNBNativeLibrary")
            if hasattr(module, library)
        ],
        "deepspeed.ops.op_builder.builder": lambda module: [wrapping(module.OpBuilder, "load", _optimizer_kernels)],
    }


def _triton_driver(gpu: DeviceProperties) -> Iterator[Patch]:
    """Triton's driver for the simulated GPU. Libraries choose block sizes, and with them buffers, by what it answers.

    Source: triton/backends/nvidia/driver.py and driver.c (3.6 to 3.9).
    """
    drivers: Any = sys.modules.get("triton.runtime.driver")
    backends: Any = getattr(sys.modules.get("triton.backends"), "backends", {})
    if drivers is None or "nvidia" not in backends:
        return
    driver: Any = object.__new__(backends["nvidia"].driver)  # its own __init__ loads libcuda
    super(type(driver), driver).__init__()
    driver.utils, driver.launcher_cls = _TritonUtils(gpu), _launch_compiled
    yield drivers.driver, "_active", driver


class _TritonUtils:
    """The compiled part of the driver."""

    def __init__(self, gpu: DeviceProperties) -> None:
        self._gpu = gpu

    def get_device_properties(self, _: int) -> dict[str, int]:
        gpu = self._gpu
        return {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.regs_per_multiprocessor,
            "multiprocessor_count": gpu.multi_processor_count,
            "warpSize": gpu.warp_size,
        }


def _launch_compiled(*_: Any) -> None:
    """The launcher of a kernel that a program compiles itself."""
    raise RuntimeError("a compiled Triton kernel can be launched only on a real GPU")


def _native_function(original: Callable[[Any, str], Any], library: Any, name: str) -> Any:
    """A function that a program calls by itself, with addresses, as axolotl and Unsloth do; bitsandbytes' own calls
    are ops. Those on the CPU are in the library for the CPU, the others need not be.
    """
    return (lambda *_: 0) if name.startswith("c") and "cpu" not in name else original(library, name)


_DEEPSPEED_OPTIMIZERS: Final = frozenset(
    f"{device}_{name}" for device in ("fused", "cpu") for name in ("adam", "adagrad", "lion")
)


class _InPlace:
    """A compiled module whose functions write to their arguments."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return left_out


def _optimizer_kernels(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
    """The compiled part of DeepSpeed's optimizers, on the GPU or on the host. Their state is made in Python."""
    return _InPlace() if builder.name in _DEEPSPEED_OPTIMIZERS else original(builder, *args, **options)
