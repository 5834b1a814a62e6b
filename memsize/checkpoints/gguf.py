"""GGUF, versions 2 and 3: key-value metadata, tensor descriptions, and aligned tensor data.

Source: ggml's ``docs/gguf.md``. A version 3 file may be big-endian. Version 1 had 32-bit counts and was replaced within
two weeks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from memsize.checkpoints.contents import Contents, Storage
from memsize.checkpoints.source import (
    MOST_GGML_DIMENSIONS,
    MOST_KEYS,
    Claims,
    Piece,
    Source,
    check_apart,
    file_contents,
    printable,
)
from memsize.records.trace import TensorSpec

MAGIC = b"GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_CHUNK = 1 << 20
_SHOWN_ARRAY = 8


class Block(NamedTuple):
    """`bytes` hold `elements`: 18 bytes for 32 elements of Q4_0."""

    name: str
    elements: int
    bytes: int


_GGML = """
0 float32 1 4       1 float16 1 2       2 Q4_0 32 18        3 Q4_1 32 20        4 Q4_2 16 10        5 Q4_3 16 12
6 Q5_0 32 22        7 Q5_1 32 24        8 Q8_0 32 34        9 Q8_1 32 40        10 Q2_K 256 84      11 Q3_K 256 110
12 Q4_K 256 144     13 Q5_K 256 176     14 Q6_K 256 210     15 Q8_K 256 292     16 IQ2_XXS 256 66   17 IQ2_XS 256 74
18 IQ3_XXS 256 98   19 IQ1_S 256 50     20 IQ4_NL 32 18     21 IQ3_S 256 110    22 IQ2_S 256 82     23 IQ4_XS 256 136
24 int8 1 1         25 int16 1 2        26 int32 1 4        27 int64 1 8        28 float64 1 8      29 IQ1_M 256 56
30 bfloat16 1 2     31 Q4_0_4_4 32 18   32 Q4_0_4_8 32 18   33 Q4_0_8_8 32 18   34 TQ1_0 256 54     35 TQ2_0 256 66
36 IQ4_NL_4_4 32 18 37 IQ4_NL_4_8 32 18 38 IQ4_NL_8_8 32 18 39 MXFP4 32 17      40 NVFP4 64 36      41 Q1_0 128 18
"""
_FIELDS = _GGML.split()

GGML: dict[int, Block] = {
    int(number): Block(name, int(elements), int(size))
    for number, name, elements, size in zip(*(_FIELDS[start::4] for start in range(4)), strict=True)
}
"""ggml's types by number (ggml.h `enum ggml_type` and ggml.c `type_traits`), with those it has since removed."""


@dataclass(slots=True)
class _Cursor:
    """A position in the file, with the piece around it read ahead. Numbers are in the file's byte order."""

    source: Source
    position: int
    order: str = "<"
    what: str = "the metadata"
    _chunk: bytes = b""
    _base: int = 0

    def take(self, count: int) -> bytes:
        start = self.position - self._base
        if start < 0 or start + count > len(self._chunk):
            ahead = min(max(count, _CHUNK), self.source.size - self.position)
            if count > ahead:
                raise self.source.cut_off(self.what)
            self._chunk, self._base, start = self.source.read(self.position, ahead, self.what), self.position, 0
        self.position += count
        return self._chunk[start : start + count]

    def skip(self, count: int) -> None:
        """Go on by `count` bytes, which must be there."""
        if self.position + count > self.source.size:
            raise self.source.cut_off(self.what)
        self.position += count

    def number(self, code: str) -> Any:
        """The next number, of a `struct` code."""
        return struct.unpack(self.order + code, self.take(struct.calcsize(code)))[0]

    def count(self) -> int:
        """The next number as a count of things that are read one by one."""
        count = int(self.number("Q"))
        self.spend(count, f"{self.what} would hold {count:,} entries")
        return count

    def spend(self, entries: int, refusal: str) -> None:
        """Take `entries` from the budget; raises `CheckpointError` with `refusal` when too few are left."""
        self.source.budget.entries -= entries
        if self.source.budget.entries < 0:
            raise self.source.damaged(refusal)

    def string(self, longest: int = 1000) -> str:
        """The next string; what is longer than `longest` bytes is cut."""
        length = int(self.number("Q"))
        data = self.take(min(length, longest))
        self.skip(length - len(data))
        text = data.decode("utf-8", "replace")
        return printable(text + "…" if length > longest else text)


_Described = tuple[str, tuple[int, ...], int, int]
"""One tensor's name, shape and type, and where its data starts in the tensor data."""


def looks_like(source: Source) -> bool:
    """Whether the file begins with GGUF's magic."""
    return source.size >= 4 and source.read(0, 4, "the magic") == MAGIC


def read(source: Source) -> Contents:
    """Read the metadata and tensor descriptions of the file at `source`."""
    if source.size < 24:
        raise source.cut_off("the header")
    version = int.from_bytes(source.read(4, 4, "the version"), "little")
    big_endian = version != 0 and version & 0xFFFF == 0
    if big_endian:
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise source.damaged(f"it is GGUF version {version}; versions 2 and 3 are read")
    cursor = _Cursor(source, 8, ">" if big_endian else "<", "the header")
    count, keys = cursor.count(), cursor.count()
    source.check_count(count)
    if keys > MOST_KEYS:
        raise source.damaged(f"its metadata would have {keys:,} keys")
    cursor.what = "the metadata"
    values = {cursor.string(): _value(cursor, cursor.number("I")) for _ in range(keys)}
    alignment = values.get("general.alignment", 32)
    claims = Claims(source.size)
    claims.claim(0, 24, "headers")
    claims.claim(24, cursor.position - 24, "metadata")
    metadata_end, cursor.what = cursor.position, "the tensor descriptions"
    described = [_described(cursor) for _ in range(count)]
    claims.claim(metadata_end, cursor.position - metadata_end, "headers")
    if not isinstance(alignment, int) or not 0 < alignment <= 2**30:
        raise source.damaged(f"general.alignment is {printable(str(alignment), 40)}")
    pieces, storages = _laid_out(source, described, cursor.position, alignment, claims)
    format = f"GGUF v{version}{', big-endian' if big_endian else ''}"
    texts = tuple((key, str(value)) for key, value in values.items())
    return file_contents(source, format, claims, pieces, storages, values=texts)


def _described(cursor: _Cursor) -> _Described:
    name, dimensions = cursor.string(), cursor.number("I")
    if dimensions > MOST_GGML_DIMENSIONS:
        raise cursor.source.damaged(f"{name!r} has {dimensions:,} dimensions")
    shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _laid_out(
    source: Source, described: list[_Described], start: int, alignment: int, claims: Claims
) -> tuple[list[Piece], list[Storage]]:
    """The tensors in the data, which begins at the first multiple of `alignment` from `start` on."""
    pieces, storages = [], []
    end = data = -(-start // alignment) * alignment
    for index, (name, shape, kind, offset) in enumerate(described):
        block = GGML.get(kind)
        if block is None:
            raise source.damaged(f"{name!r} has the unknown type {kind}")
        elements, row = math.prod(shape), shape[0] if shape else 1
        if row % block.elements:
            raise source.damaged(f"{name!r} has rows of {row:,}, which {block.name} cannot cut into {block.elements}")
        size = elements // block.elements * block.bytes
        if data + offset + size > source.size:
            raise source.cut_off(f"the tensor {name!r}", data + offset + size)
        claims.claim(data + offset, size, "tensors")
        storages.append(Storage(name, 0, data + offset, size, size))
        # torch's order has rows first.
        pieces.append(Piece((name,), TensorSpec(block.name, shape[::-1]), elements, index, 0, size, size))
        end = max(end, data + offset + size)
    check_apart(source, storages)
    claims.pad_gaps(start, min(data + -(-(end - data) // alignment) * alignment, source.size))
    return pieces, storages


def _value(cursor: _Cursor, kind: int) -> Any:
    """The next metadata value; an array longer than a few is only described."""
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor)
    if kind not in _SCALARS:
        raise cursor.source.damaged(f"its metadata has the unknown type {kind}")
    return cursor.number(_SCALARS[kind])


def _array(cursor: _Cursor) -> str:
    kind, count = int(cursor.number("I")), int(cursor.number("Q"))
    if kind in _SCALARS:
        code = _SCALARS[kind]
        if count <= _SHOWN_ARRAY:
            return ", ".join(str(cursor.number(code)) for _ in range(count))
        cursor.skip(count * struct.calcsize(code))
        return f"{count:,} numbers"
    refusal = f"its metadata has an array of {count:,} values of type {kind}"
    if kind != _STRING:
        raise cursor.source.damaged(refusal)
    cursor.spend(count, refusal)
    if count <= _SHOWN_ARRAY:
        return ", ".join(cursor.string() for _ in range(count))
    size = struct.Struct(cursor.order + "Q")
    for _ in range(count):
        cursor.skip(size.unpack(cursor.take(8))[0])
    return f"{count:,} strings"
