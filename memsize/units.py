"""Bytes, and a version that is a number, in and out of text. A byte count is an int until it is drawn."""

from __future__ import annotations

import re
from typing import Final

from memsize.errors import InputError

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30

UNITS: dict[str, int] = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL: dict[str, int] = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BOTH = UNITS | DECIMAL
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Bytes(int):
    """A number of bytes, told apart from other integers so that a renderer can draw it in the unit asked for."""

    __slots__ = ()


def format_bytes(count: int, unit: str = "MiB") -> str:
    """`count` bytes as text in `unit` (a key of `UNITS` or `DECIMAL`): ``format_bytes(36895604) == "35.19 MiB"``.

    Two decimals, except that `B` is exact. A positive count too small to show is drawn as ``<0.01``: only nothing is 0.
    """
    if unit == "B":
        return f"{count:,} B"
    amount = count / _BOTH[unit]
    if count > 0 and amount < 0.005:
        return f"<0.01 {unit}"
    return f"{amount:,.2f} {unit}"


def parse_bytes(text: str) -> int:
    """The bytes that ``"15109MiB"``, ``"80 GB"`` or ``"1048576"`` name; raises `InputError` on anything else."""
    match = _TEXT.fullmatch(text)
    unit = match and next((u for u in _BOTH if u.lower() == (match[2] or "B").lower()), None)
    if not match or not unit:
        raise InputError(f"cannot read {text!r} as a size: write it like 15109MiB, 16GB or 1048576")
    return round(float(match[1]) * _BOTH[unit])


def dotted_cudnn(version: int) -> str:
    """cuDNN's own number as people write it: 91501 is 9.15.1. Before 9 the major version stands in thousands."""
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"
