"""Bytes, and a version that is a number, in and out of text. A byte count is an int until it is drawn."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from typing import Final, NamedTuple

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


AUTO: Final = "auto"
"""In place of a unit's name: the unit that suits the size."""


class Unit(NamedTuple):
    """A unit to draw sizes in: its name and its bytes. A `rounded` one has the digits that people read, no more."""

    name: str
    bytes: int
    rounded: bool = False

    def amount(self, count: int) -> str:
        """`count` bytes without the unit's name: a number in a column that has one unit.

        Two decimals, but bytes and nothing are whole, and rounded GiB have three significant digits: 0.05, 4.88, 48.8,
        1,463.
        """
        if not count:
            return "0"
        amount = count / self.bytes
        if self.bytes == 1 or (self._is_gib and amount >= 99.95):
            return f"{amount:,.0f}"
        return f"{amount:,.1f}" if self._is_gib and amount >= 9.995 else f"{amount:,.2f}"

    @property
    def _is_gib(self) -> bool:
        return self.rounded and self.bytes == GiB


def unit_for(largest: int, name: str = AUTO, *, beside: int = 0) -> Unit:
    """The unit called `name` (a key of `UNITS` or `DECIMAL`), or by default the one that suits sizes up to `largest`.

    That is GiB from 1 GiB on (beside sizes that large from a tenth of it on, so that they compare), else MiB, or a
    smaller unit where less than a tenth of a MiB would be shown.
    """
    if name != AUTO:
        return Unit(name, _BOTH[name])
    name = _with_tenth(largest, "GiB" if max(largest, beside) >= GiB else "MiB")
    return Unit(name, UNITS[name], rounded=True)


def _with_tenth(count: int, name: str) -> str:
    """The unit called `name`, or the largest smaller one that `count` bytes, if there are any, have a tenth of."""
    while 0 < count < _BOTH[name] / 10:
        name = _SMALLER[name]
    return name


def format_bytes(count: int, unit: str = AUTO) -> str:
    """`count` bytes as text: ``format_bytes(36895604) == "35.19 MiB"``, and 48.8 GiB in place of 49,971.20 MiB.

    With the name of a `unit` they are drawn in that, but less than a tenth of it in a smaller one, as in
    ``format_bytes(9640, "MiB") == "9.41 KiB"``.
    """
    drawn = unit_for(count, unit if unit == AUTO else _with_tenth(count, unit))
    return f"{drawn.amount(count)} {drawn.name}"


def format_together(sizes: Collection[int], unit: str = AUTO) -> dict[int, str]:
    """The texts of sizes that a sentence compares: in units that suit them together.

    GiB have two decimals where three significant digits would make different sizes look equal.
    """
    if unit != AUTO:
        return {size: format_bytes(size, unit) for size in sizes}
    units = {size: unit_for(size, beside=max(sizes)) for size in sizes}
    texts = {size: f"{own.amount(size)} {own.name}" for size, own in units.items()}
    if len({*texts.values()}) < len(texts):
        exact = Unit("GiB", GiB)
        texts |= {size: f"{exact.amount(size)} GiB" for size, own in units.items() if own.name == "GiB"}
    return texts


def format_span(low: int, high: int, unit: str = AUTO, *, beside: int = 0) -> str:
    """The ends of an interval in the unit that suits its upper end, compared with `beside`: ``7.25 to 7.47 GiB``."""
    shared = unit_for(high, unit, beside=beside)
    if shared.amount(low) == shared.amount(high):
        shared = shared._replace(rounded=False)
    ends = dict.fromkeys((shared.amount(low), shared.amount(high)))
    return f"{' to '.join(ends)} {shared.name}"


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
