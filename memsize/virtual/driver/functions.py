"""The C++ functions of `torch.cuda`, answered for a GPU that does not exist.

The Python side of `torch.cuda`, `torch.accelerator` and `torch.backends` stays PyTorch's own: streams, events, device
guards, memory statistics and random generators all go through a few functions of `torch._C`, which CPU builds lack and
CUDA builds answer only with a driver. `Driver.functions` replaces them.

Source: torch/cuda/__init__.py, memory.py, streams.py and random.py, torch/accelerator (2.11 to 2.14);
c10/cuda/CUDACachingAllocator.cpp for a device that isn't there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import DeviceProperties, multiprocessors
from memsize.processes.simulation import running_part
from memsize.records.gpu import Card
from memsize.spec.stack import INSTALLED, Stack
from memsize.virtual.device_assignment import DeviceAssignment, devices
from memsize.virtual.driver.caching_allocator import DeviceMemory
from memsize.virtual.driver.nvidia_smi import Gpu
from memsize.virtual.ledger.stream_order import Moment, Queue, StreamOrder

_TYPE: Final = 1
"""The number of the device type in streams (c10/core/DeviceType.h)."""


_NCCL: Final = (2 << 32) | (27 << 16) | 5
"""The release of NCCL, 2.27.5, as PyTorch packs it."""
_TYPES_THERE: Final = frozenset(
    getattr(torch, name)
    for name in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128".split()
)
_DOING_NOTHING: Final = """
    _cuda_init _cuda_ipc_collect _cuda_sleep _cuda_set_sync_debug_mode _host_emptyCache _cuda_resetPeakHostMemoryStats
    _cuda_resetAccumulatedHostMemoryStats _cuda_record_memory_history _cuda_record_memory_history_legacy"""
_CHOOSING: Final = """
    _cuda_exchangeDevice _cuda_maybeExchangeDevice _accelerator_exchangeDevice _accelerator_maybeExchangeDevice"""
"""Functions that take the number of a device, and return that of the one before."""


def _streams() -> StreamOrder:
    return running_part(StreamOrder)


class Stream:
    """A CUDA stream: a number to compare by. Work is done at once; the stream order notes what would be queued."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        number = device if device is None or isinstance(device, int) else torch.device(device).index
        self.device_index, self.device_type = devices().numbered(options.get("device_index", number)), _TYPE
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        numbers = _streams().numbers[self.device_index]
        self.stream_id: int = options["stream_id"] if "stream_id" in options else next(numbers)
        self.cuda_stream = self.native_handle = self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (other.device, other.stream_id) == (self.device, self.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __enter__(self) -> Stream:
        self._outer = torch.cuda.current_stream(), torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: object) -> None:
        for stream in reversed(self._outer):
            torch.cuda.set_stream(stream)

    @property
    def queue(self) -> Queue:
        """The key of this stream in the stream order."""
        return self.device_index, self.stream_id

    def query(self) -> bool:
        self.synchronize()  # the program takes it for done
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        _streams().synchronize(_streams().moment(self.queue))

    def wait_stream(self, stream: Any) -> None:
        _streams().wait(self.queue, _streams().moment(stream.queue))

    def wait_event(self, event: Any) -> None:
        _streams().wait(self.queue, event.moment)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A CUDA event: the time on the host when it was recorded, and the `moment` at which it has come."""

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        self.device = devices().device
        self.cuda_event = self.event_id = 0
        self._time = 0.0
        self.moment = Moment()

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()
        stream = stream or torch.cuda.current_stream()
        self.moment = _streams().moment(stream.queue)

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1000

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        _streams().synchronize(self.moment)

    def wait(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        stream.wait_event(self)


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


@dataclass
class Driver:
    """The GPU `card` as PyTorch's functions in C++ see it; `snapshot` makes `torch.cuda.memory._snapshot`'s result."""

    card: Card
    memory: DeviceMemory
    snapshot: Callable[[], dict[str, Any]] = lambda: {"segments": [], "device_traces": [[]]}
    stack: Stack = INSTALLED
    seed: torch.Generator = field(default_factory=torch.Generator)
    _current: _Current = field(default_factory=_Current)

    def __post_init__(self) -> None:
        self.devices = DeviceAssignment()
        self._elsewhere = DeviceMemory(self.card.bytes, 0, AllocatorConfig, (), {})
        """What this process holds on the GPUs of other processes: nothing."""

    @property
    def stream(self) -> int:
        """The stream that this thread works on; 0 is the default one."""
        return self._stream_on(self.devices.index)

    def _stream_on(self, device: int | None) -> int:
        return self._current.streams.get(self.devices.numbered(device), 0)

    @property
    def properties(self) -> DeviceProperties:
        return DeviceProperties(self.card.name, *self.card.capability, self.memory.total, *multiprocessors(self.card))

    def gpu(self) -> Gpu:
        """Return the card as it is now, for ``nvidia-smi`` and NVML."""
        memory = self.memory
        capability = ".".join(map(str, self.card.capability))
        return Gpu(self.card.name, capability, self.devices.count, memory.total, memory.total - memory.free)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions of `torch._C` by name."""
        memory, owned = self.memory, self.devices
        arch = " ".join(f"sm_{major}{minor}" for major, minor in [self.card.capability])

        def on(device: int) -> DeviceMemory:
            """Return this process's memory on a device; raise PyTorch's error for a device that does not exist."""
            if not 0 <= device < owned.count:
                raise RuntimeError(f"Invalid device argument {device}: did you call init?")
            return memory if device == owned.index else self._elsewhere

        return {
            **dict.fromkeys(_DOING_NOTHING.split(), _returning(None)),
            **dict.fromkeys(_CHOOSING.split(), owned.choose),
            **dict.fromkeys(("_cuda_setDevice", "_accelerator_setDeviceIndex"), owned.set_device),
            "_cuda_getDeviceCount": _returning(owned.count),
            "_cuda_getDevice": lambda: owned.current,
            "_cuda_isInBadFork": _returning(False),
            "_cuda_synchronize": lambda *device: _streams().synchronize_all(),
            "_cuda_getArchFlags": _returning(arch),
            "_cuda_canDeviceAccessPeer": _returning(False),
            "_cuda_getCurrentBlasHandle": _returning(0),
            "_cuda_isCurrentStreamCapturing": _returning(False),
            "_cuda_get_sync_debug_mode": _returning(0),
            "_cuda_getCurrentStream": lambda device: (self._stream_on(device), owned.numbered(device), _TYPE),
            "_cuda_getDefaultStream": lambda device: (0, owned.numbered(device), _TYPE),
            "_cuda_getCurrentRawStream": self._stream_on,
            "_cuda_setStream": self._set_stream,
            "_cuda_memoryStats": lambda device: on(device).stats(),
            "_cuda_resetPeakMemoryStats": lambda device: on(device).reset_peaks(),
            "_cuda_resetAccumulatedMemoryStats": lambda device: on(device).reset_accumulated(),
            "_cuda_emptyCache": lambda *pool: memory.empty_cache(),
            "_cuda_getMemoryFraction": lambda device: on(device).config.memory_fraction,
            "_cuda_setMemoryFraction": lambda fraction, device: on(device).set_fraction(fraction),
            "_cuda_getAllocatorBackend": _returning("native"),
            "_nccl_version": _returning(_NCCL),
            "_nccl_version_suffix": _returning(b""),
            "_cuda_hostMemoryStats": _returning({}),
            "_cuda_memorySnapshot": lambda *pool: self.snapshot(),
            "_cuda_getStreamFromExternal": lambda pointer, device: (pointer, owned.numbered(device), _TYPE),
            "_get_accelerator": _returning(torch.device("cuda")),
            "_accelerator_getAccelerator": _returning(torch.device("cuda")),
            "_accelerator_getDeviceCapability": lambda device: {"supported_dtypes": set(_TYPES_THERE)},
            "_accelerator_getDeviceIndex": lambda: owned.current,
            "_accelerator_getStream": lambda device: Stream(device, stream_id=self._stream_on(device)),
            "_accelerator_setStream": lambda stream: self._set_stream(stream.stream_id, stream.device_index),
            "_accelerator_synchronizeDevice": lambda device: _streams().synchronize_all(),
            "_accelerator_emptyCache": lambda *device: memory.empty_cache(),
            "_accelerator_getDeviceStats": lambda device: on(device).stats(),
            "_accelerator_getMemoryInfo": self._memory_info,
            "_accelerator_isAllocatorInitialized": _returning(True),
            "_accelerator_resetPeakStats": lambda device: on(device).reset_peaks(),
            "_accelerator_resetAccumulatedStats": lambda device: on(device).reset_accumulated(),
        }

    def _memory_info(self, device: int) -> tuple[int, int]:
        self.devices.numbered(device)  # which raises where there is no such GPU
        return self.memory.free, self.memory.total

    def _set_stream(self, stream_id: int, device_index: int = -1, device_type: int = _TYPE) -> None:
        self.devices.choose(device_index)
        self._current.streams[self.devices.current] = stream_id


def _returning(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer
