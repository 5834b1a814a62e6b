"""Lines and tables that several documents have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsize.documents.sections import Notes, Part, Phrase, Remark, Section, Table
from memsize.records.fields import Cell, Column
from memsize.records.gpu import STREAM_FIELDS, TRAFFIC_FIELDS, Card, StreamShare
from memsize.records.roles import Role, noun
from memsize.records.timeline import Timeline
from memsize.records.trace import InputTensor, Trace
from memsize.records.world import Traffic
from memsize.units import Bytes


def said_once(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    """Merge remarks that differ only in their row into one that names each row once: ``fp16, bf16: training: …``."""
    rows: dict[tuple[str, str], dict[str, None]] = {}
    for remark in remarks:
        rows.setdefault((remark.status, remark.text), {})[remark.row] = None
    return tuple(Remark(", ".join(names), status, text) for (status, text), names in rows.items())


def input_text(tensor: InputTensor) -> str:
    """An input of a model in words: its spec, with its name unless that is only a position."""
    return str(tensor.spec) if tensor.name.isdecimal() else f"{tensor.name} {tensor.spec}"


def role_part(role: Role) -> Part:
    """The part of the bytes that have a role."""
    return Part(role, noun(role), role)


def listed(title: str, lines: tuple[str, ...]) -> tuple[Section, ...]:
    """A section with `lines` under `title`; nothing if there are no lines."""
    return (Notes(title, lines),) if lines else ()


def versions(runs: Iterable[Trace | Timeline], cards: Iterable[Card] = ()) -> tuple[Phrase, ...]:
    """A line for each release of PyTorch that ran something, for each stack that was simulated, and for each card."""
    runs = tuple(runs)
    lines: list[Phrase] = [(f"PyTorch {release}",) for release in dict.fromkeys(run.torch for run in runs) if release]
    lines += [(f"simulated: {stack}",) for stack in dict.fromkeys(run.stack for run in runs) if stack]
    for card in dict.fromkeys(cards):
        major, minor = card.capability
        kernels = f"compute capability {major}.{minor}" + ("" if card.platform == "CUDA" else ", which stands in")
        lines.append((f"{card.name}:", Bytes(card.bytes), f"of memory ({card.source});", kernels))
    return tuple(lines)


def collective_tables(traffic: Sequence[Traffic]) -> tuple[Table, ...]:
    """One row for each kind of collective, the most bytes first; no table if there are no collectives."""
    caption = "Collectives of one GPU in a step"
    return (Table.of("collectives", "Collectives", TRAFFIC_FIELDS, traffic, caption=caption),) if traffic else ()


def compared_collectives(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[Traffic]]]
) -> tuple[Table, ...]:
    """A row per run, named by the columns `keys`: bytes and number of each kind of collective; no table without any."""
    shown = [(names, traffic) for names, traffic in runs if traffic]
    columns, rows = [*keys], [[*names] for names, _ in shown]
    for kind in dict.fromkeys(row.kind for _, traffic in shown for row in traffic):
        columns += [
            Column(kind, kind, "bytes", 95, "the whole of what all of that kind gather, scatter or reduce in a step"),
            Column(f"{kind} times", "times", "count", 90, "how often that is", beside=kind),
        ]
        for cells, (_, traffic) in zip(rows, shown, strict=True):
            of_kind = [row for row in traffic if row.kind == kind]
            cells += [Bytes(sum(row.bytes for row in of_kind)), sum(row.count for row in of_kind)]
    caption = "Collectives of one GPU in a step"
    table = Table("collectives", "Collectives", tuple(columns), tuple(map(tuple, rows)), caption=caption)
    return (table,) if rows else ()


def stream_tables(shares: Sequence[StreamShare]) -> tuple[Table, ...]:
    """One row for each stream; no table if `shares` is empty."""
    caption = "Memory of each CUDA stream, which other streams cannot reuse"
    return (Table.of("streams", "Streams", STREAM_FIELDS, shares, caption=caption),) if shares else ()


def compared_streams(
    keys: Sequence[Column], runs: Iterable[tuple[tuple[Cell, ...], Sequence[StreamShare]]]
) -> tuple[Table, ...]:
    """A row per run, named by the columns `keys`: the reserved bytes of each stream; no table where all have one."""
    shown = [(cells, shares) for cells, shares in runs if shares]
    names = tuple(dict.fromkeys(share.name for _, shares in shown for share in shares))
    columns = (*keys, *(Column(name, name, "bytes", 95, "its part of the reserved peak") for name in names))
    rows = tuple(
        (*cells, *(Bytes(sum(share.reserved for share in shares if share.name == name)) for name in names))
        for cells, shares in shown
    )
    caption = "Reserved peak by CUDA stream"
    return (Table("streams", "Streams", columns, rows, caption=caption),) if rows else ()
