"""Build the trace of a run from its steps, in columns: a run of a thousand sequences has a million events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memsize.analysis.generation.steps import SETUP, Step, Structure
from memsize.records.columns import Coded, Columns, Shapes
from memsize.records.trace import Event, Storage

if TYPE_CHECKING:
    from memsize.records.columns import Integers


class RunColumns(NamedTuple):
    """The fields of a trace that come from its steps."""

    phases: tuple[str, ...]
    storages: Columns[Storage]
    events: Columns[Event]
    lines: tuple[str, ...]


def columns_of(steps: Iterable[tuple[Step, Sequence[int] | None]]) -> RunColumns:
    """Build the columns of a run from its steps, the setup first, each with the numbers of its events to record (None:
    all of them).

    If an event of a storage is dropped, later events of the storage must be dropped too.
    """
    codes = _Codes({}, {}, {}, {})
    builder, plans = _ColumnBuilder(), dict[tuple[int, int], _Plan]()
    for number, (step, recorded) in enumerate(steps, SETUP):
        key = id(step.structure), id(recorded)
        if key not in plans:
            plans[key] = _Plan(step.structure, recorded, new_age=min(number, 0), codes=codes)
        builder.add(number, step, plans[key])
    return builder.columns(codes)


class _Codes(NamedTuple):
    """The numbers that stand for texts in columns."""

    roles: dict[str, int]
    ops: dict[str, int]
    dtypes: dict[str, int]
    lines: dict[str, int]


class _ColumnBuilder:
    """Collects the columns of a run, one array per step."""

    def __init__(self) -> None:
        self._phases: dict[str, int] = {}
        self._storages: list[Sequence[Integers]] = []
        self._events: list[Sequence[Integers]] = []
        self._numbers: list[Integers] = []
        """For each step the numbers of the storages that it allocated, by their slot in the step."""
        self._count = 0

    def add(self, number: int, step: Step, plan: _Plan) -> None:
        """Add the storages and events of step `number`."""
        import numpy as np

        self._numbers.append(plan.numbered(self._count))
        self._count += len(plan.new)
        storages = np.empty(len(plan.recorded), dtype=np.int32)
        for age, positions, slots in plan.ages:
            storages[positions] = self._numbers[0 if age == SETUP else number - age + 1][slots]
        labels = (f"{stage} {number}" if number > 0 else stage for stage in plan.stages)
        phases = _coded(labels, self._phases)[plan.stage]
        self._events.append((storages, step.deltas[plan.recorded], phases, plan.layers, plan.ops))
        self._storages.append((step.sizes[plan.bytes], step.sizes[plan.sizes], *plan.storages))

    def columns(self, codes: _Codes) -> RunColumns:
        """Join the arrays of all steps."""
        import numpy as np

        of_storages, of_events = zip(*self._storages, strict=True), zip(*self._events, strict=True)
        size, dimensions, role, layer, op, dtype, rank, stream, line = map(np.concatenate, of_storages)
        storage, delta, phase, event_layer, event_op = map(np.concatenate, of_events)
        roles, ops, dtypes, lines = map(tuple, codes)
        shape = Shapes(dimensions, np.cumsum(rank) - rank, rank)
        described = Coded(role, roles), layer, Coded(op, ops), Coded(dtype, dtypes), shape
        unsaved = np.full(self._count, -1, dtype=np.int32)
        storages = Columns(Storage, size, *described, unsaved, stream, line, unsaved)
        events = Columns(Event, storage, delta, phase, event_layer, Coded(event_op, ops))
        return RunColumns(tuple(self._phases), storages, events, lines)


class _Plan:
    """The columns that all steps of one structure share, and where their sizes go.

    `recorded` are the numbers of the events to record. `ages` lists, for each age of their storages, the positions of
    the events and the slots of the storages. `new` are the slots of the storages that a step allocates, whose age
    is `new_age`.
    """

    def __init__(self, structure: Structure, recorded: Sequence[int] | None, *, new_age: int, codes: _Codes) -> None:
        import numpy as np

        self._slots = len(structure.storages)
        self.recorded = np.arange(len(structure.events)) if recorded is None else np.array(recorded)
        events = [structure.events[number] for number in self.recorded.tolist()]
        self.stages = list(dict.fromkeys(event.stage for event in events))
        self.stage = _column(self.stages.index(event.stage) for event in events)
        self.layers = _column(event.layer for event in events)
        self.ops = _coded((event.op for event in events), codes.ops)
        self.new = _column(dict.fromkeys(event.slot for event in events if event.age == new_age))
        new = [structure.storages[slot] for slot in self.new.tolist()]
        self.storages = (
            _coded((storage.role for storage in new), codes.roles),
            _column(storage.layer for storage in new),
            _coded((storage.op for storage in new), codes.ops),
            _coded((storage.dtype for storage in new), codes.dtypes),
            _column(storage.dims for storage in new),
            _column(storage.stream for storage in new),
            _column(codes.lines.setdefault(storage.line, len(codes.lines)) if storage.line else -1 for storage in new),
        )
        self.bytes = len(structure.events) + self.new
        starts = [len(structure.events) + structure.offsets[slot] for slot in self.new.tolist()]
        ranges = (range(start, start + storage.dims) for start, storage in zip(starts, new, strict=True))
        self.sizes = _column(number for dimensions in ranges for number in dimensions)
        of_age: dict[int, list[int]] = {}
        for position, event in enumerate(events):
            of_age.setdefault(event.age, []).append(position)
        self.ages = [
            (age, np.array(positions), _column(events[position].slot for position in positions))
            for age, positions in of_age.items()
        ]

    def numbered(self, first: int) -> Integers:
        """Number the storages that a step allocates, from `first` on, by their slot; -1 for others."""
        import numpy as np

        numbers = np.full(self._slots, -1, dtype=np.int32)
        numbers[self.new] = np.arange(first, first + len(self.new))
        return numbers


def _column(values: Iterable[int]) -> Integers:
    import numpy as np

    return np.fromiter(values, dtype=np.int32)


def _coded(texts: Iterable[str], table: dict[str, int]) -> Integers:
    return _column(table.setdefault(text, len(table)) for text in texts)
