"""cuDNN 9.0 to 9.10, which take the description of a GPU from a handle instead: memsize hands them one that it wrote.

A real handle comes from `cudnnCreate`, which needs a driver. Its first bytes are the description of the device, in the
order of `described`: read back, in 9.11, from a description that was made from JSON, whose integers all differed. In
older releases one of them is missing and the compute capability stands at byte 96, which was found by changing one
integer at a time in 9.1.0, 9.5.1 and 9.10.2, until their heuristics answered for a GPU. Nothing else of a handle is
read on the way to a plan.

In 9.1 some plans need a driver: they cannot be finalised, with a message about reserved space on the host. They are of
engines that work on channels last, and convert row-major tensors in their workspace. cuDNN 9.24, where they can be
finalised, takes exactly that for 695 of 704 of their plans on an A100 (engines 46, 58 and 65); the others are gradients
with a stride.

Limit: a library gets a process of its own (`memsize.kernels.cudnn.installed`), in which a mistake here would end.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from math import prod
from typing import Final

from memsize.kernels.cudnn.backend import Attribute, Backend, CudnnError, Descriptors, Handle, Kind, Type
from memsize.kernels.cudnn.plans import (
    WIDTHS,
    Convolution,
    Library,
    Plan,
    configs_of,
    device_properties,
    graph_of,
    is_allowed,
    notes_of,
)
from memsize.units import dotted_cudnn

HANDLED: Final = range(90_100, 91_100)
_SIZE: Final = 1 << 16
"""More than any handle has; what is not described is 0."""
_WARNINGS: Final = 1 << 2
"""`CUDNN_SEV_WARNING_EN`."""
_NEEDS_DRIVER: Final = b"host reserved space"
_BYTES: Final = 16
"""Channels are padded to as many bytes; as many follow the tensors."""

_CALLBACK: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class HandleLibrary(Library):
    """One libcudnn of `HANDLED`. Raises OSError where it cannot be loaded, `CudnnError` for another release."""

    def __init__(self, path: str) -> None:
        self._backend = Backend(path)
        self.version = self._backend.version
        if self.version not in HANDLED:
            raise CudnnError(
                f"cuDNN {dotted_cudnn(self.version)} is not known to answer for a handle that it did not make"
            )
        self._handles: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = {}
        self._plan_of: dict[tuple[Convolution, tuple[int, int]], Plan | None] = {}
        self._messages: list[bytes] = []
        self._callback = _CALLBACK(lambda severity, data, debug, message: self._messages.append(_text(message)))
        self._backend.call("cudnnSetCallback", ctypes.c_uint(_WARNINGS), None, self._callback)

    def _plans(self, convolution: Convolution, capability: tuple[int, int], mode: int, most: int | None) -> list[Plan]:
        handle = self._handle(capability)
        with Descriptors(self._backend) as descriptors:
            attribute = (Attribute.GRAPH_HANDLE, Type.HANDLE, [handle])
            graph = graph_of(descriptors, convolution, attribute)
            configs = configs_of(descriptors, graph, None, mode, most)
            return list(self._working(descriptors, configs, convolution, handle))

    def _working(
        self, descriptors: Descriptors, configs: list[Handle], convolution: Convolution, handle: int
    ) -> Iterator[Plan]:
        """Yield the plans of configurations that PyTorch would try and that work."""
        for config in configs:
            plan = Plan(0, notes_of(descriptors, config))
            if is_allowed(plan, convolution):
                workspace = self._workspace(descriptors, config, convolution, handle)
                if workspace is not None:
                    yield plan._replace(workspace=workspace)

    def _workspace(self, descriptors: Descriptors, config: Handle, convolution: Convolution, handle: int) -> int | None:
        """Return the bytes of a plan's workspace; None where it does not work."""
        self._messages.clear()
        size = (ctypes.c_int64 * 1)()
        try:
            plan = descriptors.make(
                Kind.EXECUTION_PLAN,
                (Attribute.PLAN_HANDLE, Type.HANDLE, [handle]),
                (Attribute.PLAN_CONFIG, Type.DESCRIPTOR, [config]),
            )
        except CudnnError:
            return converted(convolution) if any(_NEEDS_DRIVER in message for message in self._messages) else None
        descriptors.read(plan, Attribute.PLAN_WORKSPACE, Type.INT64, size)
        return int(size[0])

    def _handle(self, capability: tuple[int, int]) -> int:
        """Return the address of a handle for a GPU of this compute capability."""
        if 100 * capability[0] + 10 * capability[1] > self._backend.newest:
            raise CudnnError(f"cuDNN {self} does not know compute capability {capability[0]}.{capability[1]}")
        if capability not in self._handles:
            self._handles[capability] = ctypes.create_string_buffer(described(capability), _SIZE)
        return ctypes.addressof(self._handles[capability])


def described(capability: tuple[int, int]) -> bytes:
    """The description of a GPU as it lies in a handle."""
    properties = device_properties(capability)
    names = (
        *("maxGridSize", "maxBlockSize", "regsPerBlock", "multiProcessorCount", "warpSize", "maxSharedMemoryPerBlock"),
        *("maxSharedMemoryPerBlockOptin", "maxRegistersPerSM", "maxCtasPerSM", "maxThreadsPerBlock", "maxThreadsPerSM"),
        *("pciDeviceId", "isTccDriver", "supportCoopLaunch", "totalGlobalMem", "smClockRateKHz", "memClockRateKHz"),
        *("l2CacheSize", "cudaDeviceId", "deviceVer", "driverVer"),
    )
    values: list[int] = []
    for name in names:
        value = properties[name]
        values.extend(value if isinstance(value, list) else [int(value)])  # type: ignore[call-overload]
    return struct.pack("<18iq6i", *values)


def converted(convolution: Convolution) -> int:
    """The workspace of a plan that converts row-major tensors: all three, with channels padded to 16 bytes."""
    width = WIDTHS[convolution.dtype]
    if convolution.channels_last:
        return 0
    step = _BYTES // width

    def padded(channels: int) -> int:
        return -(-channels // step) * step

    (n, c, *x), (k, r, *w), (m, o, *y) = convolution.x, convolution.w, convolution.y
    sizes = (n * padded(c) * prod(x), padded(k) * padded(r) * prod(w), m * padded(o) * prod(y))
    return width * sum(sizes) + _BYTES


def _text(address: int) -> bytes:
    """A message of cuDNN: lines that each end with a zero, and then another zero."""
    lines = []
    while line := ctypes.string_at(address):
        lines.append(line)
        address += len(line) + 1
    return b"\n".join(lines)
