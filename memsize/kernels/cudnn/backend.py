"""cuDNN's backend API through ctypes: descriptors that are set, finalised, read and destroyed. No GPU is needed.

Every number here is public: the enumerations of cuDNN's header cudnn_graph.h, which do not change within a major
release. The JSON form of a device is what cuDNN itself writes for one (`CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

Handle = ctypes.c_void_p


class CudnnError(Exception):
    """cuDNN cannot answer; the message is its own. Users never see it: an estimate takes the place of the answer."""


class Kind(IntEnum):
    """`cudnnBackendDescriptorType_t`."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    EXECUTION_PLAN = 5
    FORWARD = 10
    FILTER = 11
    DATA = 12
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Attribute(IntEnum):
    """`cudnnBackendAttributeName_t`."""

    COMPUTE_TYPE = 100
    CONVOLUTION_MODE = 101
    DILATIONS = 102
    STRIDES = 103
    POST_PADDINGS = 104
    PRE_PADDINGS = 105
    SPATIAL_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIG_ENGINE = 300
    CONFIG_WORKSPACE = 303
    PLAN_HANDLE = 400
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    GRAPH_HANDLE = 800
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_TYPE = 901
    TENSOR_SHAPE = 902
    TENSOR_STRIDES = 903
    TENSOR_NAME = 906
    ENGINE_NOTES = 1303
    DEVICE_JSON = 2702


class Type(IntEnum):
    """`cudnnBackendAttributeType_t`."""

    HANDLE = 0
    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    NOTE = 11
    DESCRIPTOR = 15
    CHAR = 24


_C: Final[dict[Type, Any]] = {
    Type.HANDLE: Handle,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.DOUBLE: ctypes.c_double,
    Type.DESCRIPTOR: Handle,
    Type.CHAR: ctypes.c_char,
}
"""What an attribute's values are in C; enumerations are integers."""

_MESSAGE: Final = 1024


class Backend:
    """The entry points of one libcudnn, loaded from `path`.

    Raises OSError where it cannot be loaded, AttributeError where it is none, `CudnnError` where cuBLASLt is not there:
    without that cuDNN ends the process when its heuristics look for it.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.version = self._number("cudnnGetVersion")
        """As cuDNN counts: 92400 is 9.24.0."""
        self.newest = self._number("cudnnGetMaxDeviceVersion")
        """The newest compute capability that it knows: 1210 is 12.1."""
        # Kept: cuDNN finds what is loaded already.
        self._blas = _cublaslt(path, self._number("cudnnGetCudartVersion") // 1000)

    def _number(self, name: str) -> int:
        function = getattr(self._library, name)
        function.restype = ctypes.c_size_t
        return int(function())

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status; raises `CudnnError` with cuDNN's own message where it is not 0."""
        if getattr(self._library, name)(*arguments):
            text = ctypes.create_string_buffer(_MESSAGE)
            self._library.cudnnGetLastErrorString(text, ctypes.c_size_t(_MESSAGE))
            raise CudnnError(f"{name}: {text.value.decode(errors='replace')}")


def _cublaslt(cudnn: str, cuda: int) -> ctypes.CDLL:
    """cuBLASLt for CUDA `cuda` (its major version): beside the packages that cuDNN lies in, or the system's."""
    name = f"libcublasLt.so.{cuda}"
    packages = Path(cudnn).resolve().parent.parent.parent
    for candidate in (packages / f"cu{cuda}" / "lib" / name, packages / "cublas" / "lib" / name, name):
        try:
            return ctypes.CDLL(str(candidate))
        except OSError:
            continue
    raise CudnnError(f"cuDNN needs {name}, which is not there")


class Descriptors:
    """Descriptors that live as long as this context, and are destroyed with it, the last first."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._handles: list[Handle] = []

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Destroy what was made so far."""
        while self._handles:
            self._backend.call("cudnnBackendDestroyDescriptor", self._handles.pop())

    def empty(self, kind: Kind) -> Handle:
        """A descriptor that cuDNN is going to fill."""
        handle = Handle()
        self._backend.call("cudnnBackendCreateDescriptor", ctypes.c_int(kind), ctypes.byref(handle))
        self._handles.append(handle)
        return handle

    def make(self, kind: Kind, *attributes: tuple[int, Type, Sequence[Any]]) -> Handle:
        """A finalised descriptor with these attributes: name, type, values."""
        handle = self.empty(kind)
        for name, form, values in attributes:
            array = (_C.get(form, ctypes.c_int) * len(values))(*values)
            count = ctypes.c_int64(len(values))
            self._backend.call(
                "cudnnBackendSetAttribute", handle, ctypes.c_int(name), ctypes.c_int(form), count, ctypes.byref(array)
            )
        self._backend.call("cudnnBackendFinalize", handle)
        return handle

    def read(self, source: Handle, name: Attribute, form: Type, array: Any) -> int:
        """Fill `array` from an attribute; returns how many values were written."""
        return min(self._get(source, name, form, len(array), ctypes.byref(array)), len(array))

    def count(self, source: Handle, name: Attribute, form: Type) -> int:
        """Return how many values an attribute has."""
        return self._get(source, name, form, 0, None)

    def _get(self, source: Handle, name: Attribute, form: Type, room: int, array: Any) -> int:
        """Call `cudnnBackendGetAttribute`; returns the number of values that cuDNN has."""
        count = ctypes.c_int64()
        kinds = ctypes.c_int(name), ctypes.c_int(form)
        self._backend.call("cudnnBackendGetAttribute", source, *kinds, ctypes.c_int64(room), ctypes.byref(count), array)
        return int(count.value)
