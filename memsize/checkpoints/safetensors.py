"""safetensors: eight bytes of header length, a JSON header, and the tensors' data one after the other.

What its own library refuses (a range outside the file, ranges that overlap, sizes that disagree with shapes) is refused
here too. Bytes between ranges are shown as unclaimed, although the library refuses those as well.
"""

from __future__ import annotations

import math
from typing import Any

from memsize.checkpoints.contents import Contents, Storage
from memsize.checkpoints.source import (
    LONGEST_HEADER,
    MOST_DIMENSIONS,
    Claims,
    Piece,
    Source,
    check_apart,
    file_contents,
    printable,
)
from memsize.errors import suggestion
from memsize.files import MOST_VALUES, parse_json
from memsize.records.trace import TensorSpec

_METADATA = "__metadata__"

SAFETENSORS: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8), "F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6),
    "U8": ("uint8", 8), "I8": ("int8", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "I16": ("int16", 16), "U16": ("uint16", 16), "F16": ("float16", 16), "BF16": ("bfloat16", 16), "I32": ("int32", 32),
    "U32": ("uint32", 32), "F32": ("float32", 32), "C64": ("complex64", 64), "F64": ("float64", 64),
    "I64": ("int64", 64), "U64": ("uint64", 64),
}  # fmt: skip
"""safetensors' names: torch's name, and bits per element."""


def looks_like(source: Source) -> bool:
    """Whether the file begins as a safetensors file does: a header length and a brace."""
    if source.size < 10:
        return False
    start = source.read(0, 9, "the header length")
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER


def read(source: Source) -> Contents:
    header, base = _header(source)
    metadata = header.pop(_METADATA, None)
    pieces: list[Piece] = []
    storages: list[Storage] = []
    claims = Claims(source.size)
    claims.claim(0, base, "headers")
    source.check_count(len(header))
    # Taken out one by one: with every entry kept, a large header takes as much memory as all that is made of it.
    for name in tuple(header):
        piece, begin = _entry(source, printable(name), header.pop(name), len(pieces))
        claims.claim(base + begin, piece.span, "tensors")
        storages.append(Storage(piece.keys[0], 0, base + begin, piece.span, piece.span))
        pieces.append(piece)
    check_apart(source, storages)
    texts = metadata.items() if isinstance(metadata, dict) else ()
    values = tuple((printable(str(name)), printable(str(value))) for name, value in texts)
    return file_contents(source, "safetensors", claims, pieces, storages, values=values)


def _header(source: Source) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(source.read(0, 8, "the header length"), "little")
    if length > LONGEST_HEADER:
        raise source.damaged(f"its header claims {length:,} bytes; safetensors allows {LONGEST_HEADER:,}")
    try:
        header = parse_json(source.read(8, length, "the header"), source.budget.grown(MOST_VALUES), _without_doubles)
    except _DoubleNameError as error:
        raise source.damaged(f"its header names {printable(str(error))!r} twice") from None
    except ValueError as error:
        raise source.damaged(f"its header is not JSON that can be read: {error}") from error
    if not isinstance(header, dict):
        raise source.damaged("its header is not a JSON object")
    return header, 8 + length


class _DoubleNameError(Exception):
    """A name that a JSON object has twice."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        raise _DoubleNameError(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return entries


def _entry(source: Source, name: str, value: Any, index: int) -> tuple[Piece, int]:
    try:
        code, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        counts = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise source.damaged(f"the header's entry for {name!r} is not that of a tensor") from None
    possible = all(type(count) is int and 0 <= count < 2**63 for count in counts) and len(shape) <= MOST_DIMENSIONS
    if not possible or begin > end:
        raise source.damaged(f"{name!r} has a shape or data offsets that cannot be: {str(counts)[:100]}")
    if not isinstance(code, str) or code not in SAFETENSORS:
        hint = suggestion(str(code)[:20], SAFETENSORS)
        raise source.damaged(f"{name!r} has the unknown dtype {printable(str(code), 20)!r}: {hint}")
    dtype, bits = SAFETENSORS[code]
    elements, size = math.prod(shape), end - begin
    if elements * bits != size * 8:
        described = f"{code}{shape}"[:80]
        raise source.damaged(f"{name!r} is said to be {described}, which does not take its {size:,} bytes of data")
    return Piece((name,), TensorSpec(dtype, tuple(shape)), elements, index, 0, size, size), begin
