"""Steps that would only repeat the one before, recorded without being run.

A training step starts from the storages that the last one left. Once a step leaves and allocates the same as the one
before it, the next step differs in nothing but its number: its events follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import NamedTuple

from memsize.records.trace import Event
from memsize.tracing.ledger import Ledger, Row


class _End(NamedTuple):
    """The ledger at the end of a step: the number of events and storages so far, and the rows of live storages."""

    events: int
    storages: int
    alive: dict[int, Row]


class StepRepetition:
    """The steps of one run, as its ledger has them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._bytes: dict[int, int] = {}
        """The bytes of each storage at the last end."""
        self._ends: list[_End] = []
        self.ended()

    def ended(self) -> None:
        """A step is over, or the first is about to begin."""
        ledger = self.ledger
        for event in ledger.events[self._ends[-1].events if self._ends else 0 :]:
            self._bytes[event.storage] = self._bytes.get(event.storage, 0) + event.delta
            if not self._bytes[event.storage]:
                del self._bytes[event.storage]
        alive = {index: replace(ledger.rows[index]) for index in self._bytes}
        self._ends.append(_End(len(ledger.events), ledger.count, alive))

    @property
    def repeat_themselves(self) -> bool:
        """Whether the last two steps left the same storages and made the same allocations, in order; storages that stay
        from the earlier one on (an optimizer's state, the libraries' workspaces) are not made again.
        """
        if len(self._ends) < 3:
            return False
        first, earlier, last = self._ends[-3:]
        if Counter(earlier.alive.values()) != Counter(last.alive.values()):
            return False
        return list(self._allocations(first, earlier, last.alive)) == list(self._allocations(earlier, last, ()))

    def repeat(self) -> None:
        """Record another step like the last one; `repeat_themselves` has to hold.

        The last step's storages are made again. Where the last step freed a storage of the step before, this one frees
        the storage that the last step left in its place, whose role changes in the same way.
        """
        before, last = self._ends[-2:]
        ledger = self.ledger
        left: dict[Row, list[int]] = {}
        for index in sorted(last.alive.keys() - before.alive.keys(), reverse=True):
            left.setdefault(last.alive[index], []).append(index)
        freed = sorted(before.alive.keys() - last.alive.keys())
        follows = {index: left[before.alive[index]].pop() for index in freed}
        roles = {later: ledger.rows[earlier].role for earlier, later in follows.items()}
        copies = {index: ledger.count + number for number, index in enumerate(range(before.storages, last.storages))}
        ledger.rows += [replace(ledger.rows[index]) for index in copies]
        for later, role in roles.items():
            ledger.rows[later].role = role
        phases = ledger.clock.of_this_step()
        for storage, delta, phase, layer, op in ledger.events[before.events : last.events]:
            index = copies.get(storage, follows.get(storage, storage))
            ledger.events.append(Event(index, delta, phases[phase], layer, op))
        for reference in ledger.live.values():
            reference.index = copies.get(reference.index, reference.index)
        self.ended()

    def _allocations(self, start: _End, end: _End, apart: Container[int]) -> Iterator[tuple[object, ...]]:
        """Yield the allocations of a step, but for those of the storages `apart`."""
        for event in self.ledger.events[start.events : end.events]:
            if event.delta > 0 and event.storage not in apart:
                row = self.ledger.rows[event.storage]
                yield event.delta, event.layer, event.op, row.dtype, row.shape
