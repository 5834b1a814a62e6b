"""Answers of the CUDA runtime, profilers and NVML to a program: used and free memory, load of the GPU.

Memory is that of the simulated allocator; a load, a temperature or a clock there is none, and it is 0.

NVML is the driver's library behind ``nvidia-smi``, which `pynvml`, `py3nvml` and their like load by ctypes. Functions
that ask for the card's name, memory, load and processes are answered. Others are missing, as they are from an older
driver, which such packages expect. Source: torch/cuda/__init__.py; NVIDIA's NVML API reference (nvml.h).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final

import torch

from memsize.processes.patches import Patch, assign, wrapping
from memsize.virtual.device_assignment import devices
from memsize.virtual.driver.caching_allocator import DeviceMemory
from memsize.virtual.driver.functions import Driver
from memsize.virtual.driver.nvidia_smi import DRIVER, Gpu, uuid

_SUCCESS = 0
_IDLE = ("utilization", "temperature", "power_draw", "clock_rate")
_LIBRARY: Final = re.compile(r"(?:.*[/\\])?(?:lib)?(?:nvidia-ml|nvml)\b.*")
_PACKAGES: Final = ("pynvml", "py3nvml.py3nvml")
_INVALID_ARGUMENT: Final = 2
_VERSION: Final = re.compile(r"_v\d+$")
_NUMBERS: Final = (
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
"""Functions of a handle and a number that is 0: a count of processes, too."""
_NUMBERS_OF: Final = ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetTemperature")
"""Functions of a handle, a kind, and a number that is 0."""


class Runtime:
    """The functions of the CUDA runtime that PyTorch binds: each that is not about memory succeeds and does nothing."""

    cudaError = SimpleNamespace(success=_SUCCESS)  # noqa: N815

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:  # noqa: N802
        """Return the free and the total bytes of the GPU."""
        devices().numbered(device)  # which raises where there is no such GPU
        return self._memory.free, self._memory.total

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *args: _SUCCESS


def replacements(driver: Driver) -> Iterator[Patch]:
    """Patches of the functions by which PyTorch, or the program itself, asks about the GPU."""
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
    yield from _nvml_replacements(driver.gpu)


def _profile(original: Callable[..., None], profiler: Any, *args: Any, **options: Any) -> None:
    """A profiler sees what runs on the CPU: where CUPTI is missing, it would complain of each op. PyTorch 2.14 refuses
    `use_cuda`."""
    has_use_cuda = "use_cuda" in signature(original).parameters
    if options.get("use_device") == "cuda" or (has_use_cuda and options.pop("use_cuda", False)):
        options |= {"use_device": None, "use_cpu": True}
    original(profiler, *args, **options)


# -- NVML -------------------------------------------------------------------------------------------------------------


class Library:
    """The library: its functions take what ctypes passes, write through pointers, and return an error code."""

    def __init__(self, gpu: Callable[[], Gpu]) -> None:
        self._functions: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: 0,
            "nvmlInitWithFlags": lambda flags: 0,
            "nvmlShutdown": lambda: 0,
            "nvmlErrorString": lambda code: b"Invalid Argument",
            "nvmlSystemGetDriverVersion": lambda text, length: _write_text(text, DRIVER),
            "nvmlSystemGetNVMLVersion": lambda text, length: _write_text(text, DRIVER),
            "nvmlDeviceGetCount": lambda count: _write(count, gpu().gpus),
            "nvmlDeviceGetHandleByIndex": lambda index, handle: _write_handle(index, handle, gpu().gpus),
            "nvmlDeviceGetIndex": lambda handle, index: _write(index, _number_of(handle)),
            "nvmlDeviceGetName": lambda handle, text, length: _write_text(text, gpu().name),
            "nvmlDeviceGetUUID": lambda handle, text, length: _write_text(text, uuid(_number_of(handle))),
            "nvmlDeviceGetCudaComputeCapability": lambda handle, *parts: _write(*parts, *gpu().capability.split(".")),
            "nvmlDeviceGetMemoryInfo": lambda handle, info: _fill(
                info, total=gpu().total, used=gpu().used, free=gpu().total - gpu().used
            ),
            "nvmlDeviceGetUtilizationRates": lambda handle, rates: _fill(rates, gpu=0, memory=0),
            **dict.fromkeys(_NUMBERS, lambda handle, number, *rest: _write(number, 0)),
            **dict.fromkeys(_NUMBERS_OF, lambda handle, kind, number: _write(number, 0)),
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = self._functions.get(_VERSION.sub("", name))
        if function is None:
            raise AttributeError(name)
        return lambda *args: function(*args)  # which ctypes' attributes, such as restype, are assigned to


def _number_of(handle: Any) -> int:
    return (ctypes.cast(handle, ctypes.c_void_p).value or 1) - 1


def _write_handle(index: Any, handle: Any, gpus: int) -> int:
    number = int(getattr(index, "value", index))
    if not 0 <= number < gpus:
        return _INVALID_ARGUMENT
    ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = number + 1
    return 0


def _write(*pointers: Any) -> int:
    """Write each of the values in the second half of the arguments through the pointer in the first half."""
    half = len(pointers) // 2
    for pointer, value in zip(pointers[:half], pointers[half:], strict=True):
        pointer._obj.value = int(value)
    return 0


def _fill(pointer: Any, **fields: int) -> int:
    for name, value in fields.items():
        assign(pointer._obj, name, value)
    return 0


def _write_text(buffer: Any, text: str) -> int:
    buffer.value = text.encode()
    return 0


def _nvml_replacements(gpu: Callable[[], Gpu]) -> Iterator[Patch]:
    """Patch the loader of libraries, in ctypes and in packages that have taken it from there before."""
    library = Library(gpu)

    class Loading(ctypes.CDLL):
        def __new__(cls, name: Any = None, *args: Any, **options: Any) -> Any:
            if isinstance(name, str) and _LIBRARY.fullmatch(name):
                return library
            return super().__new__(cls)

    yield ctypes, "CDLL", Loading
    for package in _PACKAGES:
        module = sys.modules.get(package)
        if module is not None:
            yield module, "CDLL", Loading
            yield module, "nvmlLib", None
            yield module, "_nvmlLib_refcount", 0
            yield module, "_nvmlGetFunctionPointer_cache", {}
