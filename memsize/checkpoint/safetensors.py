"""safetensors: eight bytes of header length, a JSON header, and the tensors' data one after the other.

What its own library refuses (a range outside the file, ranges that overlap, sizes that disagree with shapes) is refused
here too. Bytes between ranges are shown as unclaimed, although the library refuses those as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from memsize.checkpoint.accounting import Claims
from memsize.checkpoint.dtypes import SAFETENSORS
from memsize.checkpoint.ownership import Piece, given_out
from memsize.checkpoint.record import Contents, FileRecord, Storage
from memsize.checkpoint.source import Source
from memsize.checkpoint.texts import printable
from memsize.nearest import suggestion
from memsize.record import TensorSpec

FORMAT = "safetensors"
LONGEST_HEADER = 100_000_000
"""The library's own limit (`MAX_HEADER_SIZE`)."""

MOST_VALUES = 8_000_000
"""JSON values in a header, about 700,000 tensors: what is read at once has to fit into memory."""

_METADATA = "__metadata__"
_Range = tuple[int, int, str]


def looks_like(source: Source) -> bool:
    """Whether the file begins as a safetensors file does: a header length and a brace."""
    if source.size < 10:
        return False
    start = source.read(0, 9, "the header length")
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER


def read(source: Source) -> Contents:
    """What the file at `source` holds, from its header alone."""
    header, base = _header(source)
    metadata = header.pop(_METADATA, None)
    entries = [_entry(source, name, value, base) for name, value in header.items()]
    _check_ranges(source, [(start, end, name) for _, start, end, name in entries])
    claims = Claims(source.size)
    claims.claim(0, base, "headers")
    storages = []
    for piece, start, end, _ in entries:
        claims.claim(start, end - start, "tensors")
        storages.append(Storage(".".join(piece.keys), 0, start, end - start, end - start))
    pieces = [piece for piece, *_ in _numbered(entries)]
    tensors, storages_out = given_out(pieces, storages)
    record = FileRecord(source.name, FORMAT, source.size, claims.sums(), len(tensors))
    return Contents(source.name, FORMAT, (record,), storages_out, tensors, values=tuple(_metadata(metadata)))


def _header(source: Source) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the data begins."""
    length = int.from_bytes(source.read(0, 8, "the header length"), "little")
    if length > LONGEST_HEADER:
        raise source.damaged(f"its header claims {length:,} bytes; safetensors allows {LONGEST_HEADER:,}")
    text = source.read(8, length, "the header")
    marks = sum(map(text.count, (b",", b":", b"[", b"{")))
    if marks > MOST_VALUES:
        raise source.damaged(f"its header holds about {marks:,} values, more than memsize reads ({MOST_VALUES:,})")
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except _DoubleName as error:
        raise source.damaged(f"its header names {printable(str(error))!r} twice") from None
    except (ValueError, RecursionError) as error:
        raise source.damaged(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise source.damaged("its header is not a JSON object")
    return header, 8 + length


class _DoubleName(Exception):
    """A name that a JSON object has twice."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DoubleName(next(name for name in names if names.count(name) > 1))
    return entries


def _entry(source: Source, name: str, value: Any, base: int) -> tuple[Piece, int, int, str]:
    """One tensor, and the range of its data in the file."""
    try:
        code, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        counts = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise source.damaged(f"the header's entry for {printable(name)!r} is not that of a tensor") from None
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or begin > end or len(shape) > 64:
        raise source.damaged(f"{printable(name)!r} has a shape or data offsets that cannot be: {str(counts)[:100]}")
    if not isinstance(code, str) or code not in SAFETENSORS:
        hint = suggestion(str(code)[:20], SAFETENSORS)
        raise source.damaged(f"{printable(name)!r} has the unknown dtype {printable(str(code), 20)!r}: {hint}")
    dtype, bits = SAFETENSORS[code]
    elements = math.prod(shape)
    if elements * bits != (end - begin) * 8:
        raise source.damaged(
            f"{printable(name)!r} is {code}{shape} and needs {elements * bits / 8:,.0f} bytes, but has {end - begin:,}"
        )
    piece = Piece((printable(name),), TensorSpec(dtype, tuple(shape)), elements, 0, 0, end - begin, end - begin)
    return piece, base + begin, base + end, name


def _numbered(entries: list[tuple[Piece, int, int, str]]) -> Iterator[tuple[Piece, int]]:
    from dataclasses import replace

    for index, (piece, *_) in enumerate(entries):
        yield replace(piece, storage=index), index


def _check_ranges(source: Source, ranges: list[_Range]) -> None:
    """Every range lies in the file, and no two of them overlap."""
    position, before = 0, ""
    for start, end, name in sorted(ranges):
        if end > source.size:
            raise source.cut_off(f"the tensor {printable(name)!r}", max(end for _, end, _ in ranges))
        if start < position and end > start:
            raise source.damaged(f"the data of {printable(name)!r} overlaps that of {printable(before)!r}")
        if end > start:
            position, before = end, name


def _metadata(metadata: Any) -> Iterator[tuple[str, str]]:
    if isinstance(metadata, dict):
        for name, value in metadata.items():
            yield printable(str(name)), printable(str(value))
