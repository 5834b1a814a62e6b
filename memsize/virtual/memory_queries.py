"""Answers of the CUDA runtime and profilers to a program: used and free memory, load of the GPU.

Memory is that of the simulated allocator; a load, a temperature or a clock there is none, and it is 0. Source:
torch/cuda/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memsize.processes.patches import Patch, wrapping
from memsize.virtual import nvml
from memsize.virtual.allocator_state import DeviceMemory
from memsize.virtual.device_assignment import devices
from memsize.virtual.driver import Driver

_SUCCESS = 0
_IDLE = ("utilization", "temperature", "power_draw", "clock_rate")


class Runtime:
    """The functions of the CUDA runtime that PyTorch binds: each that is not about memory succeeds and does nothing."""

    cudaError = SimpleNamespace(success=_SUCCESS)  # noqa: N815

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:  # noqa: N802
        """Return the free and the total bytes of the GPU."""
        devices().check_index(device)
        return self._memory.free, self._memory.total

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *args: _SUCCESS


def replacements(driver: Driver) -> Iterator[Patch]:
    """Where PyTorch, or the program itself, asks."""
    cuda: Any = torch.cuda
    memory, runtime = driver.memory, Runtime(driver.memory)
    yield cuda, "_cudart", runtime
    yield cuda, "cudart", lambda: runtime
    for owner in (cuda, cuda.memory):
        yield owner, "list_gpu_processes", lambda device=None: "GPU:0\nno processes are running"
    yield from ((cuda, name, lambda device=None: 0) for name in _IDLE)
    yield cuda, "memory_usage", lambda device=None: round(100 * (1 - memory.free / memory.total))
    yield cuda, "device_memory_used", lambda device=None: memory.total - memory.free
    yield wrapping(torch.autograd.profiler.profile, "__init__", _profile)
    yield from nvml.replacements(driver.gpu)


def _profile(original: Callable[..., None], profiler: Any, *args: Any, **options: Any) -> None:
    """A profiler sees what runs on the CPU: where CUPTI is missing, it would complain of each op."""
    if options.get("use_device") == "cuda" or options.pop("use_cuda", False):
        options |= {"use_device": None, "use_cpu": True}
    original(profiler, *args, **options)
