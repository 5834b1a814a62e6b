"""The record of a run that makes given steps, in columns: that of a thousand sequences has a million events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memsize.analysis.generation.steps import SETUP, Step, Structure
from memsize.records.columns import Coded, Columns, Shapes
from memsize.records.trace import Event, Storage

if TYPE_CHECKING:
    from memsize.records.columns import Integers


class Put(NamedTuple):
    """Steps put together: the phases, storages, events and lines of a record."""

    phases: tuple[str, ...]
    storages: Columns[Storage]
    events: Columns[Event]
    lines: tuple[str, ...]


def put_together(steps: Iterable[tuple[Step, Sequence[int] | None]]) -> Put:
    """The run that makes `steps`, the setup first; of some only the events of these numbers (None: all of them).

    An event of a storage that was left out before must be left out too.
    """
    tables = _Tables({}, {}, {}, {})
    record, plans = _Record(), dict[tuple[int, int], _Plan]()
    for number, (step, kept) in enumerate(steps, SETUP):
        key = id(step.structure), id(kept)
        if key not in plans:
            plans[key] = _Plan(step.structure, kept, min(number, 0), tables)
        record.add(number, step, plans[key])
    return record.put(tables)


class _Tables(NamedTuple):
    """The numbers of the texts that columns have."""

    roles: dict[str, int]
    ops: dict[str, int]
    dtypes: dict[str, int]
    lines: dict[str, int]


class _Record:
    """The columns of a record, a piece for each step."""

    def __init__(self) -> None:
        self._phases: dict[str, int] = {}
        self._storages: list[Sequence[Integers]] = []
        self._events: list[Sequence[Integers]] = []
        self._numbers: list[Integers] = []
        """For each step the numbers of the storages that it made, by their places."""
        self._count = 0

    def add(self, number: int, step: Step, plan: _Plan) -> None:
        """What the step of that number makes."""
        import numpy as np

        self._numbers.append(plan.numbered(self._count))
        self._count += len(plan.made)
        about = np.empty(len(plan.kept), dtype=np.int32)
        for age, at, places in plan.ages:
            about[at] = self._numbers[0 if age == SETUP else number - age + 1][places]
        labels = (f"{stage} {number}" if number > 0 else stage for stage in plan.stages)
        phases = _coded(labels, self._phases)[plan.stage]
        self._events.append((about, step.deltas[plan.kept], phases, plan.layers, plan.ops))
        self._storages.append((step.sizes[plan.bytes], step.sizes[plan.sizes], *plan.storages))

    def put(self, tables: _Tables) -> Put:
        """All of them together."""
        import numpy as np

        stored, happened = zip(*self._storages, strict=True), zip(*self._events, strict=True)
        taken, sizes, role, layer, op, dtype, rank, stream, line = map(np.concatenate, stored)
        about, delta, phase, within, by = map(np.concatenate, happened)
        roles, ops, dtypes, lines = map(tuple, tables)
        shape = Shapes(sizes, np.cumsum(rank) - rank, rank)
        of = Coded(role, roles), layer, Coded(op, ops), Coded(dtype, dtypes), shape
        unsaved = np.full(self._count, -1, dtype=np.int32)
        storages = Columns(Storage, taken, *of, unsaved, stream, line, unsaved)
        events = Columns(Event, about, delta, phase, within, Coded(by, ops))
        return Put(tuple(self._phases), storages, events, lines)


class _Plan:
    """What the steps of one structure put into a record: the numbers of the events that are `kept`, by the `ages` of
    their storages the positions and places of those, and the places of those that are `made`, which are of age `new`;
    and what of the columns is the same for all of them.
    """

    def __init__(self, structure: Structure, kept: Sequence[int] | None, new: int, tables: _Tables) -> None:
        import numpy as np

        self._places = len(structure.storages)
        self.kept = np.arange(len(structure.events)) if kept is None else np.array(kept)
        happenings = [structure.events[index] for index in self.kept.tolist()]
        self.stages = list(dict.fromkeys(each.stage for each in happenings))
        self.stage = _column(self.stages.index(each.stage) for each in happenings)
        self.layers = _column(each.layer for each in happenings)
        self.ops = _coded((each.op for each in happenings), tables.ops)
        self.made = _column(dict.fromkeys(each.place for each in happenings if each.age == new))
        made = [structure.storages[place] for place in self.made.tolist()]
        self.storages = (
            _coded((each.role for each in made), tables.roles),
            _column(each.layer for each in made),
            _coded((each.op for each in made), tables.ops),
            _coded((each.dtype for each in made), tables.dtypes),
            _column(each.dims for each in made),
            _column(each.stream for each in made),
            _column(tables.lines.setdefault(each.line, len(tables.lines)) if each.line else -1 for each in made),
        )
        self.bytes = len(structure.events) + self.made
        starts = [len(structure.events) + structure.offsets[place] for place in self.made.tolist()]
        self.sizes = _column(
            n for start, each in zip(starts, made, strict=True) for n in range(start, start + each.dims)
        )
        of_age: dict[int, list[int]] = {}
        for position, each in enumerate(happenings):
            of_age.setdefault(each.age, []).append(position)
        self.ages = [(age, np.array(at), _column(happenings[n].place for n in at)) for age, at in of_age.items()]

    def numbered(self, first: int) -> Integers:
        """By their places, the numbers of the storages that a step makes, from `first` on; -1 for others."""
        import numpy as np

        own = np.full(self._places, -1, dtype=np.int32)
        own[self.made] = np.arange(first, first + len(self.made))
        return own


def _column(values: Iterable[int]) -> Integers:
    import numpy as np

    return np.fromiter(values, dtype=np.int32)


def _coded(texts: Iterable[str], table: dict[str, int]) -> Integers:
    return _column(table.setdefault(text, len(table)) for text in texts)
