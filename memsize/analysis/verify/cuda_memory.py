"""The memory of a real GPU: the caching allocator's peaks and history, the process's use, the software stack.

Sources: torch/cuda/memory.py (`memory_stats_as_nested_dict`, `_record_memory_history`, `_snapshot`), c10's
DeviceStats.h for what each counter counts, torch/csrc/cuda/memory_snapshot.cpp and c10/cuda/CUDACachingAllocator.cpp
for the history.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, Final, NamedTuple

import torch

from memsize.device.allocator_config import settings_in
from memsize.errors import InputError
from memsize.records.measurement import DeviceUse, Peaks, SoftwareStack

_MAX_ENTRIES: Final = 2_000_000
"""The most entries that a history keeps: a step of a large model makes some 10,000."""


class AllocationEvent(NamedTuple):
    """`delta` bytes of `storage` appear (> 0) or disappear (< 0). A storage below 0 is older than the history."""

    storage: int
    delta: int


def allocation_events(trace: Iterable[Mapping[str, Any]]) -> Iterator[AllocationEvent]:
    """The events of one device's history, in order; storages are counted from 0.

    `trace` is one list of ``torch.cuda.memory._snapshot()["device_traces"]``. Of its actions, ``alloc`` and
    ``free_requested`` are a tensor's beginning and end, with the bytes that were asked for. Segments are the
    allocator's own, and ``free_completed`` follows a free at once unless another stream still uses the block.
    """
    live: dict[int, AllocationEvent] = {}
    begun = older = 0
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = event = AllocationEvent(begun, entry["size"])
            begun += 1
            yield event
        elif entry["action"] == "free_requested":
            allocated = live.pop(entry["addr"], None)
            if allocated is None:
                older += 1
                allocated = AllocationEvent(-older, entry["size"])
            yield AllocationEvent(allocated.storage, -allocated.delta)


class CudaMemory:
    """The memory of one CUDA device. Created before the process touches the device, it knows what other processes hold
    there.

    Raises `InputError` where there is no such device.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._others = _nvml_used(self.device)
        if not torch.cuda.is_available():
            raise InputError("this machine has no GPU that PyTorch can use: verify runs the step for real on one")
        if index >= torch.cuda.device_count():
            raise InputError(f"this machine has no GPU {index}")
        if torch.cuda.get_allocator_backend() != "native":
            raise InputError("verify reads PyTorch's own caching allocator: set no other in PYTORCH_CUDA_ALLOC_CONF")

    def settle(self) -> None:
        """Free what is not in use, so that the next run starts as in a new process: cuBLAS's workspaces too, which
        PyTorch makes again when they are needed.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()

    def live_bytes(self) -> int:
        """Bytes of tensors that are alive now."""
        return self._read("allocated_bytes", "current")

    def reset(self) -> None:
        """Start the peaks again from what is held now."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> Peaks:
        """The peaks since the last reset."""
        torch.cuda.synchronize(self.device)
        return Peaks(*(self._read(f"{name}_bytes", "peak") for name in ("requested", "allocated", "reserved")))

    def count(self) -> int:
        """How many allocations there were so far."""
        return self._read("allocation", "allocated")

    @contextmanager
    def recorded(self) -> Iterator[list[AllocationEvent]]:
        """Record allocations and frees while open, in a list that is filled at its end. Without Python stacks: they
        take time, and the marked step shows more.
        """
        events: list[AllocationEvent] = []
        history: Any = torch.cuda.memory._record_memory_history
        history("all", context=None, stacks="python", max_entries=_MAX_ENTRIES, clear_history=True)
        try:
            yield events
            events += allocation_events(torch.cuda.memory._snapshot()["device_traces"][self.device.index])
        finally:
            history(None)

    def use(self) -> DeviceUse | None:
        """The bytes that the process takes on the device now, the CUDA context included."""
        torch.cuda.synchronize(self.device)
        own = _nvml_of_this_process(self.device)
        if own is not None:
            return DeviceUse(own, "NVML, this process")
        now = _nvml_used(self.device)
        if now is not None and self._others is not None:
            return DeviceUse(now - self._others, "NVML, growth of the device")
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceUse(total - free, "mem_get_info")

    def stack(self) -> SoftwareStack:
        _, total = torch.cuda.mem_get_info(self.device)
        return SoftwareStack(
            gpu=torch.cuda.get_device_name(self.device),
            capability=torch.cuda.get_device_capability(self.device),
            total=total,
            torch=str(torch.__version__),
            python=platform.python_version(),
            driver=_driver(),
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            cublas=_cublas(),
            allocator=settings_in(os.environ),
            cublas_config=os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            module_loading=os.environ.get("CUDA_MODULE_LOADING"),
        )

    def _read(self, name: str, kind: str) -> int:
        """One of the allocator's counters; before the first allocation there are none."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        return int(stats[name]["all"][kind]) if stats else 0


def _nvml_used(device: torch.device) -> int | None:
    """The bytes that all processes take on the device; None if NVML does not answer. Makes no CUDA context."""
    with suppress(Exception):  # no pynvml, no driver, no right to ask: each raises something of its own
        return int(torch.cuda.device_memory_used(device))
    return None


def _nvml_of_this_process(device: torch.device) -> int | None:
    """None where NVML does not know our process by its number (in a container), or may not tell its memory."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((int(process.usedGpuMemory) for process in running if process.pid == os.getpid()), None)
    return None


def _driver() -> str | None:
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    return None


def _cublas() -> str | None:
    major = (torch.version.cuda or "").partition(".")[0]
    with suppress(OSError, AttributeError):
        get_version = ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion
        get_version.restype = ctypes.c_size_t
        number = get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    for name in ("nvidia-cublas", f"nvidia-cublas-cu{major}"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
