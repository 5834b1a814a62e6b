"""GGUF, versions 2 and 3: key-value metadata, tensor descriptions, and aligned tensor data.

Source: ggml's ``docs/gguf.md``. A version 3 file may be big-endian. Version 1 had 32-bit counts and was replaced within
two weeks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from memsize.checkpoints.contents import GGML, Contents, Storage
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
        """The next `count` bytes."""
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
