"""The CUDA streams of a run beside one another: what each holds, and has of the allocator's segments."""

from __future__ import annotations

from collections.abc import Sequence

from memsize.documents.sections import Column, Label, Table
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
