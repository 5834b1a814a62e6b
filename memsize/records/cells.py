"""Cells: the values of a table as readers see it.

A cell is a value with a type (bytes, a share, a path, tensor specs …) and never text that was already formatted, so
that each renderer draws it in its own way and none can know more than another. None is a cell that has no meaning in
its row; `Missing` is a figure that is not known, with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from memsize.records.trace import TensorSpec
from memsize.units import Bytes


class Path(str):
    """A module's or tensor's qualified name."""

    __slots__ = ()


class Sized(int):
    """Bytes in a column of several units: drawn with their own."""

    __slots__ = ()


class Share(float):
    """A part of a whole: 0.5 is half of it."""

    __slots__ = ()


class Load(Share):
    """A part of a GPU's memory that is taken: above 1 it does not fit. Pages shade it."""

    __slots__ = ()


class Signed(int):
    """A difference in bytes, above (> 0) or below a reference."""

    __slots__ = ()


class Change(float):
    """A relative difference, above (> 0) or below a reference: 0.012 is 1.2 % more."""

    __slots__ = ()


class Words(tuple[str, ...]):
    """Short texts in one cell: marks, dtypes."""

    __slots__ = ()


class Specs(tuple[TensorSpec, ...]):
    """The tensors that a module returns."""

    __slots__ = ()


class Missing(NamedTuple):
    """A figure that is not known, and why."""

    reason: str


class Label(NamedTuple):
    """A row's name; `modelled` when its figures were not all run, `hint` says in a few words what it is."""

    text: str
    modelled: bool = False
    hint: str = ""


Cell = Label | Path | Specs | Words | Share | Change | Signed | Sized | Bytes | str | int | Missing | None


def share_of(part: int | None, whole: int | None) -> Share | None:
    """`part` as a share of `whole`; None where either is unknown or `whole` is 0."""
    return Share(part / whole) if part is not None and whole else None
