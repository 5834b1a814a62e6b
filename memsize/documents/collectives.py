"""Tables of the collectives between GPUs in a step, and of the CUDA streams that collectives and other work use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsize.documents.sections import Table
from memsize.records.cells import Cell
from memsize.records.fields import Column
from memsize.records.gpu import STREAM_FIELDS, TRAFFIC_FIELDS, StreamShare
from memsize.records.world import Traffic
from memsize.units import Bytes


def collective_tables(traffic: Sequence[Traffic]) -> tuple[Table, ...]:
    """One row for each kind of collective, the most bytes first; no table if there are no collectives."""
    caption = "What a GPU sends and gets in a step"
    return (Table.of("collectives", "Collectives", TRAFFIC_FIELDS, traffic, caption=caption),) if traffic else ()


def compared_collectives(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[Traffic]]]
) -> tuple[Table, ...]:
    """One row for each run, named by the columns `keys`, with the bytes and the number of each kind of collective; no
    table if there are no collectives.
    """
    shown = [(names, traffic) for names, traffic in runs if traffic]
    kinds = tuple(dict.fromkeys(row.kind for _, traffic in shown for row in traffic))
    columns = [*keys]
    for kind in kinds:
        columns += [
            Column(kind, kind, "bytes", 95, "the whole of what all of that kind gather, scatter or reduce in a step"),
            Column(f"{kind} times", "times", "count", 90, "how often that is", beside=kind),
        ]
    rows = tuple((*names, *_cells(kinds, traffic)) for names, traffic in shown)
    caption = "What a GPU sends and gets in a step"
    return (Table("collectives", "Collectives", tuple(columns), rows, caption=caption),) if rows else ()


def _cells(kinds: Sequence[str], traffic: Sequence[Traffic]) -> Iterable[Cell]:
    for kind in kinds:
        of_kind = [row for row in traffic if row.kind == kind]
        yield Bytes(sum(row.bytes for row in of_kind))
        yield sum(row.count for row in of_kind)


def stream_tables(shares: Sequence[StreamShare]) -> tuple[Table, ...]:
    """One row for each stream; no table if `shares` is empty."""
    caption = "What each CUDA stream takes: memory of one is not reused on others"
    return (Table.of("streams", "Streams", STREAM_FIELDS, shares, caption=caption),) if shares else ()


def compared_streams(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[StreamShare]]]
) -> tuple[Table, ...]:
    """One row for each run, named by the columns `keys`, with the reserved bytes of each stream; no table if no run
    allocates on several streams.
    """
    shown = [(cells, shares) for cells, shares in runs if shares]
    names = tuple(dict.fromkeys(share.name for _, shares in shown for share in shares))
    columns = (*keys, *(Column(name, name, "bytes", 95, "what it has of the reserved peak") for name in names))
    rows = tuple(
        (*cells, *(Bytes(sum(share.reserved for share in shares if share.name == name)) for name in names))
        for cells, shares in shown
    )
    caption = "What each CUDA stream has of the reserved peak"
    return (Table("streams", "Streams", columns, rows, caption=caption),) if rows else ()
