"""The collectives of a step: of one run kind by kind, of several run by run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsize.documents.sections import Table
from memsize.records.cells import Cell, Label
from memsize.records.fields import Column
from memsize.records.world import Traffic
from memsize.units import Bytes

_CAPTION = "What a GPU sends and gets in a step"


def collective_tables(traffic: Sequence[Traffic]) -> tuple[Table, ...]:
    """One row for each kind of collective, the most bytes first; no table where there are none."""
    columns = (
        Column("kind", "collective", "name", 100, "what it does"),
        Column("ranks", "among", "count", 97, "how many ranks take part"),
        Column("count", "times", "count", 98, "how often it comes in a step"),
        Column("bytes", "together", "bytes", 99, "the whole of what all of them gather, scatter or reduce"),
        Column("largest", "largest", "bytes", 90, "the largest of them"),
    )
    rows = tuple((Label(each.kind), each.ranks, each.count, Bytes(each.bytes), Bytes(each.largest)) for each in traffic)
    return (Table("collectives", "Collectives", columns, rows, caption=_CAPTION),) if rows else ()


def compared_collectives(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[Traffic]]]
) -> tuple[Table, ...]:
    """One row for each run, which its `keys` name, with the bytes and the number of each kind of collective; no table
    where there are none.
    """
    found = [(names, traffic) for names, traffic in runs if traffic]
    kinds = tuple(dict.fromkeys(each.kind for _, traffic in found for each in traffic))
    columns = [*keys]
    for kind in kinds:
        columns += [
            Column(kind, kind, "bytes", 95, "the whole of what all of that kind gather, scatter or reduce in a step"),
            Column(f"{kind} times", "times", "count", 90, "how often that is", beside=kind),
        ]
    rows = tuple((*names, *_cells(kinds, traffic)) for names, traffic in found)
    return (Table("collectives", "Collectives", tuple(columns), rows, caption=_CAPTION),) if rows else ()


def _cells(kinds: Sequence[str], traffic: Sequence[Traffic]) -> Iterable[Cell]:
    for kind in kinds:
        of_kind = [each for each in traffic if each.kind == kind]
        yield Bytes(sum(each.bytes for each in of_kind))
        yield sum(each.count for each in of_kind)
