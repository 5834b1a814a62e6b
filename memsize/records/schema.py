"""Constraints on the values of records: the codec refuses a file in which they do not hold.

    class Event(NamedTuple):
        storage: Annotated[int, Index("storages")]
        delta: int

An `Index` or a `Name` refers to a field of the record that the value is part of, at any depth.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

LARGEST: Final = 2**63 - 1
"""The largest integer in a file, and minus the smallest less one: those of int64, as a size in bytes is."""


class AtLeast(NamedTuple):
    """An integer that is `least` or more."""

    least: int


class NotEmpty(NamedTuple):
    """A sequence with at least one entry."""


class Index(NamedTuple):
    """A position in the sequence `of`; -1 is none where `optional`, and its length is allowed where `end`."""

    of: str
    optional: bool = False
    end: bool = False


class Name(NamedTuple):
    """The `name` of an entry of the sequence `of`."""

    of: str


Size = Annotated[int, AtLeast(0)]
"""A number of bytes or of things: not below 0."""
