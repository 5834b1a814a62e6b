"""NVML, the driver's library behind ``nvidia-smi``, as `pynvml`, `py3nvml` and their like load it: by ctypes.

Functions that ask for the card's name, memory, load and processes are answered for the simulated card; what a card that
computes nothing has none of is 0. Others are missing, as they are from an older driver, which such packages expect.

Source: NVIDIA's NVML API reference (nvml.h).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from memsize.processes.patches import Patch
from memsize.virtual.child_processes import Gpu
from memsize.virtual.nvidia_smi import DRIVER, uuid

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
            "nvmlDeviceGetCudaComputeCapability": lambda handle, *parts: _write_capability(parts, gpu().capability),
            "nvmlDeviceGetMemoryInfo": lambda handle, info: _write_memory(info._obj, gpu()),
            "nvmlDeviceGetUtilizationRates": lambda handle, rates: _write_rates(rates._obj),
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


def _write_capability(pointers: tuple[Any, ...], capability: str) -> int:
    for pointer, part in zip(pointers, capability.split("."), strict=True):
        _write(pointer, int(part))
    return 0


def _write_memory(info: Any, gpu: Gpu) -> int:
    info.total, info.used, info.free = gpu.total, gpu.used, gpu.total - gpu.used
    return 0


def _write_rates(rates: Any) -> int:
    rates.gpu = rates.memory = 0
    return 0


def _write(pointer: Any, value: int) -> int:
    pointer._obj.value = value
    return 0


def _write_text(buffer: Any, text: str) -> int:
    buffer.value = text.encode()
    return 0


def replacements(gpu: Callable[[], Gpu]) -> Iterator[Patch]:
    """The loader of libraries, in ctypes and in packages that have taken it from there before."""
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
