"""The allocations and frees of one step, as a prediction or a GPU shows them: what `alignment` lays side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where something happens: the phase of the step, the layer (None: outside the model), the operation."""

    phase: str
    layer: str | None
    op: str


NOWHERE = Place("", None, "")
"""The place of what nobody noted."""


class Entry(NamedTuple):
    """`delta` bytes of `storage` appear (> 0) or disappear (< 0). `place` indexes the places of its log.

    A storage below 0 was there before the log begins.
    """

    storage: int
    delta: int
    place: int


@dataclass(frozen=True, slots=True)
class Log:
    """What was allocated and freed, in order. Places stand in a table of their own, because they come again often."""

    places: tuple[Place, ...]
    entries: tuple[Entry, ...]


class Allocation(NamedTuple):
    """One allocation: its bytes, its place, how many allocations the log had when it was freed (None: it was not), and
    whether it is alive when most bytes are."""

    bytes: int
    place: Place
    freed: int | None
    at_peak: bool


def log_of(events: Iterable[tuple[int, int, Place]]) -> Log:
    """The log of ``(storage, delta, place)``."""
    places: dict[Place, int] = {}
    entries = tuple(Entry(storage, delta, places.setdefault(place, len(places))) for storage, delta, place in events)
    return Log(tuple(places), entries)


def allocations(log: Log) -> tuple[Allocation, ...]:
    """The allocations of a log in order, each with its end.

    Growing in place is one more allocation; shrinking ends all that a storage has.
    """
    summit = _summit(log.entries)
    begun: list[Entry] = []
    held: dict[int, list[int]] = {}
    freed: dict[int, int] = {}
    alive: set[int] = set()
    for position, entry in enumerate(log.entries):
        if entry.delta > 0:
            held.setdefault(entry.storage, []).append(len(begun))
            begun.append(entry)
        else:
            freed |= dict.fromkeys(held.pop(entry.storage, ()), len(begun))
        if position == summit:
            alive = {index for indices in held.values() for index in indices}
    return tuple(
        Allocation(entry.delta, log.places[entry.place], freed.get(index), index in alive)
        for index, entry in enumerate(begun)
    )


def _summit(entries: Iterable[Entry]) -> int:
    """The first entry after which most bytes are alive; -1 where none adds to what was there before."""
    most, place = 0, -1
    for position, total in enumerate(_running(entries)):
        if total > most:
            most, place = total, position
    return place


def _running(entries: Iterable[Entry]) -> Iterator[int]:
    total = 0
    for entry in entries:
        total += entry.delta
        yield total
