"""Bytes, and a version that is a number, in and out of text. A byte count is an int until it is drawn."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from memsize.errors import InputError

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30

UNITS: dict[str, int] = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL: dict[str, int] = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BOTH = UNITS | DECIMAL
_SMALLER: Final = dict(pairwise((*reversed(UNITS),))) | dict(pairwise(("TB", "GB", "MB", "kB", "B"))) | {"KB": "B"}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Bytes(int):
    """A number of bytes, told apart from other integers so that a renderer can draw it in the unit asked for."""

    __slots__ = ()


def format_bytes(count: int, unit: str = "MiB") -> str:
    """`count` bytes as text in `unit` (a key of `UNITS` or `DECIMAL`): ``format_bytes(36895604) == "35.19 MiB"``.

    Less than a tenth of the unit is written in a smaller one, as in ``format_bytes(9640) == "9.41 KiB"``, where two
    decimals show more of it.
    """
    unit = telling_unit(count, unit)
    return f"{amount_in(count, unit)} {unit}"


def telling_unit(count: int, unit: str) -> str:
    """`unit`, or the largest smaller one that `count` bytes, if there are any, have at least a tenth of."""
    while 0 < count < _BOTH[unit] / 10:
        unit = _SMALLER[unit]
    return unit


def amount_in(count: int, unit: str) -> str:
    """`count` bytes in `unit`, without its name: a number of a column that has one unit.

    Two decimals, except that `B` is exact. A positive count too small to show is drawn as ``<0.01``: only nothing is 0.
    """
    if unit == "B":
        return f"{count:,}"
    amount = count / _BOTH[unit]
    return "<0.01" if count > 0 and amount < 0.005 else f"{amount:,.2f}"


def signed_share(before: int, after: int) -> str:
    """The change of a figure as a share of `before`: ``signed_share(100, 71) == "−29.0%"``."""
    return f"{(after - before) / before:+.1%}".replace("-", "−") if before else "from nothing"


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
