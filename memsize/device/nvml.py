"""The memory of a process on a real GPU, read by NVML through NVIDIA's package nvidia-ml-py (`pynvml`).

NVML counts what ``nvidia-smi`` shows: the allocator's segments and the CUDA context. It names processes by the numbers
that the host gives them, which are others inside a container.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from memsize.errors import InputError, first_line


class Reading(NamedTuple):
    """The bytes that one process has `used` on `card`, and those `free` of its `total`."""

    used: int
    free: int
    total: int
    card: str


class Nvml:
    """The driver of this machine's GPUs. Raises `InputError` where there is none, or no package to ask it with."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            raise InputError("this needs NVIDIA's package for NVML: pip install nvidia-ml-py") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise InputError(f"no NVIDIA GPU can be asked for its memory: {first_line(error)}") from None

    def processes(self) -> dict[int, Reading]:
        """The memory of each process, on the GPU on which it has most."""
        readings: dict[int, Reading] = {}
        for gpu in self._gpus:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
            name = self._nvml.nvmlDeviceGetName(gpu)
            card = name.decode() if isinstance(name, bytes) else str(name)  # bytes in releases before 11.510
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                reading = Reading(process.usedGpuMemory or 0, memory.free, memory.total, card)
                readings[process.pid] = max(reading, readings.get(process.pid, reading))
        return readings
