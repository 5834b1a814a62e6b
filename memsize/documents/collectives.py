"""Tables of the collectives between GPUs in a step, and of the CUDA streams that collectives and other work use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsize.documents.sections import Table
from memsize.records.cells import Cell, Label
from memsize.records.fields import Column
from memsize.records.gpu import StreamShare
from memsize.records.roles import noun
from memsize.records.world import Traffic
from memsize.units import Bytes

_CAPTION = "What a GPU sends and gets in a step"


def collective_tables(traffic: Sequence[Traffic]) -> tuple[Table, ...]:
    """One row for each kind of collective, the most bytes first; no table if there are no collectives."""
    columns = (
        Column("kind", "collective", "name", 100, "what it does"),
        Column("ranks", "among", "count", 97, "how many ranks take part"),
        Column("count", "times", "count", 98, "how often it comes in a step"),
        Column("bytes", "together", "bytes", 99, "the whole of what all of them gather, scatter or reduce"),
        Column("largest", "largest", "bytes", 90, "the largest of them"),
    )
    rows = tuple((Label(row.kind), row.ranks, row.count, Bytes(row.bytes), Bytes(row.largest)) for row in traffic)
    return (Table("collectives", "Collectives", columns, rows, caption=_CAPTION),) if rows else ()


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
    return (Table("collectives", "Collectives", tuple(columns), rows, caption=_CAPTION),) if rows else ()


def _cells(kinds: Sequence[str], traffic: Sequence[Traffic]) -> Iterable[Cell]:
    for kind in kinds:
        of_kind = [row for row in traffic if row.kind == kind]
        yield Bytes(sum(row.bytes for row in of_kind))
        yield sum(row.count for row in of_kind)


def stream_tables(shares: Sequence[StreamShare]) -> tuple[Table, ...]:
    """One row for each stream; no table if `shares` is empty."""
    columns = (
        Column("stream", "stream", "name", 100, "the default one, or what is allocated on it"),
        Column("role", "mostly", "text", 90, "what most of it is for", alone="role"),
        Column("requested", "holds at most", "bytes", 98, "live bytes at its own peak"),
        Column("reserved", "reserved", "bytes", 99, "its segments when those of all streams are at their peak"),
    )
    rows = tuple(
        (Label(share.name), noun(share.role), Bytes(share.requested), Bytes(share.reserved)) for share in shares
    )
    caption = "What each CUDA stream takes: memory of one is not reused on others"
    return (Table("streams", "Streams", columns, rows, caption=caption),) if rows else ()


def compared_streams(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[StreamShare]]]
) -> tuple[Table, ...]:
    """One row for each run, named by the columns `keys`, with the reserved bytes of each stream; no table if no run
    allocates on several streams.
    """
    shown = [(cells, shares) for cells, shares in runs if shares]
    names = tuple(dict.fromkeys(share.name for _, shares in shown for share in shares))
    columns = (*keys, *(Column(name, name, "bytes", 95, "what it has of the reserved peak") for name in names))
    rows = tuple((*cells, *(_reserved(shares, name) for name in names)) for cells, shares in shown)
    caption = "What each CUDA stream has of the reserved peak"
    return (Table("streams", "Streams", columns, rows, caption=caption),) if rows else ()


def _reserved(shares: Sequence[StreamShare], name: str) -> Bytes:
    return Bytes(sum(share.reserved for share in shares if share.name == name))
