"""Torch's dtypes by their names, without torch: what an element takes, and second names."""

from __future__ import annotations

from typing import Final

BITS: Final[dict[str, int]] = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8"), 8),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 16),
    **dict.fromkeys(("uint32", "int32", "qint32", "float32", "complex32", "bcomplex32"), 32),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 64),
    "complex128": 128,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 8),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 8),
    "bits16": 16,
    "float4_e2m1fn_x2": 8,
    "quint4x2": 4,
    "quint2x4": 2,
}
"""Bits that an element takes, by torch's name of the dtype. torch keeps its sub-byte integers in a byte each."""

ALIASES: Final = {
    "half": "float16", "float": "float32", "double": "float64", "short": "int16", "int": "int32", "long": "int64",
    "chalf": "complex32", "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip
"""Torch's second names."""

FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
"""The plain floating ones, the widest last."""


def torch_dtype(name: str) -> str | None:
    """The full name of the dtype ``torch.<name>``; None if there is none."""
    name = ALIASES.get(name, name)
    return name if name in BITS else None


def is_float(dtype: str) -> bool:
    """Whether a dtype is a plain floating one, which a cast can halve."""
    return dtype in FLOATS
