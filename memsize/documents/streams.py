"""The CUDA streams of a run beside one another: what each holds, and has of the allocator's segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsize.documents.sections import Table
from memsize.records.cells import Cell, Label
from memsize.records.fields import Column
from memsize.records.gpu import StreamShare
from memsize.records.roles import noun
from memsize.units import Bytes


def stream_tables(shares: Sequence[StreamShare]) -> tuple[Table, ...]:
    """One row for each stream; no table where there are none."""
    columns = (
        Column("stream", "stream", "name", 100, "the default one, or what is allocated on it"),
        Column("role", "mostly", "text", 90, "what most of it is for", alone="role"),
        Column("requested", "holds at most", "bytes", 98, "live bytes at its own peak"),
        Column("reserved", "reserved", "bytes", 99, "its segments when those of all streams are at their peak"),
    )
    rows = tuple((Label(each.name), noun(each.role), Bytes(each.requested), Bytes(each.reserved)) for each in shares)
    caption = "What each CUDA stream takes: memory of one is not reused on others"
    return (Table("streams", "Streams", columns, rows, caption=caption),) if rows else ()


def compared_streams(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[StreamShare]]]
) -> tuple[Table, ...]:
    """One row for each run, which its `keys` name, with what each stream has of its segments; no table where no run
    allocates on several.
    """
    found = [(cells, shares) for cells, shares in runs if shares]
    names = tuple(dict.fromkeys(each.name for _, shares in found for each in shares))
    columns = (*keys, *(Column(name, name, "bytes", 95, "what it has of the reserved peak") for name in names))
    rows = tuple((*cells, *(_reserved(shares, name) for name in names)) for cells, shares in found)
    caption = "What each CUDA stream has of the reserved peak"
    return (Table("streams", "Streams", columns, rows, caption=caption),) if rows else ()


def _reserved(shares: Sequence[StreamShare], name: str) -> Bytes:
    return Bytes(sum(each.reserved for each in shares if each.name == name))
