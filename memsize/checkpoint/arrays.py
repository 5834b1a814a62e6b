"""numpy arrays in a pickle: the tensor that one amounts to, where its bytes stand in the pickle itself.

numpy pickles an array as ``_reconstruct(ndarray, (0,), b'b')`` with a state of version, shape, dtype, Fortran order and
bytes; from protocol 5 on as ``_frombuffer``. Only arrays of more than a kilobyte are shown: the bytes of smaller ones
count with the pickle that they are in.
"""

from __future__ import annotations

import math
from typing import Any

from memsize.checkpoint.dtypes import BITS
from memsize.checkpoint.rebuild import sizes
from memsize.checkpoint.values import Blob, Global, Object, TensorValue

_ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_BUFFERS = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


def array_of(value: Object) -> TensorValue | None:
    """The array that an object is, None when it is none or a small one."""
    path = str(value.made_by)
    state = value.states[0] if value.states else None
    if path in _ARRAYS and isinstance(state, tuple) and len(state) == 5:
        return _array(state[1], state[2], state[4])
    if path in _BUFFERS and len(value.args) == 4:
        buffer, dtype, shape, _ = value.args
        return _array(shape, dtype, buffer)
    return None


def _array(shape: Any, kind: Any, data: Any) -> TensorValue | None:
    dtype = _dtype(kind)
    if dtype is None or not isinstance(data, Blob):
        return None
    try:
        extent = sizes(shape)
    except ValueError:
        return None
    elements = math.prod(extent)
    if elements * BITS[dtype] >> 3 > data.length:
        return None
    # A text holds each byte above 127 in two: what the elements take is its first part, the rest is encoding.
    return TensorValue(dtype, (elements,), (1,), 0, data) if len(extent) == 0 else _contiguous(dtype, extent, data)


def _contiguous(dtype: str, shape: tuple[int, ...], data: Blob) -> TensorValue:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorValue(dtype, shape, tuple(reversed(strides)), 0, data)


def _dtype(kind: Any) -> str | None:
    """torch's name of ``numpy.dtype('f4', …)``."""
    if not (isinstance(kind, Object) and kind.made_by == Global("numpy.dtype") and kind.args):
        return None
    code = kind.args[0]
    if not isinstance(code, str) or not code[1:].isdecimal() or len(code) > 4:
        return None
    if code == "b1":
        return "bool"
    name = f"{_KINDS.get(code[0], '')}{int(code[1:]) * 8}"
    return name if name in BITS else None
