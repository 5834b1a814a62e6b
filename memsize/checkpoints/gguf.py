"""GGUF, versions 2 and 3: key-value metadata, tensor descriptions, and aligned tensor data.

Source: ggml's ``docs/gguf.md``. A version 3 file may be big-endian. Version 1 had 32-bit counts and was replaced within
two weeks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    def count(self, code: str = "Q") -> int:
        """The next number as a count of things that are read one by one."""
        count = int(self.number(code))
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


class _Described(NamedTuple):
    """One tensor's description: its data starts `offset` bytes into the tensor data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(slots=True)
class _Header:
    values: dict[str, Any] = field(default_factory=dict)
    metadata_end: int = 0
    tensors: list[_Described] = field(default_factory=list)
    end: int = 0
    big_endian: bool = False
    version: int = 0


def looks_like(source: Source) -> bool:
    """Whether the file begins with GGUF's magic."""
    return source.size >= 4 and source.read(0, 4, "the magic") == MAGIC


def read(source: Source) -> Contents:
    """Read the metadata and tensor descriptions of the file at `source`."""
    header = _header(source)
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**30:
        raise source.damaged(f"general.alignment is {printable(str(alignment), 40)}")
    data = -(-header.end // alignment) * alignment
    claims = Claims(source.size)
    claims.claim(0, 24, "headers")
    claims.claim(24, header.metadata_end - 24, "metadata")
    claims.claim(header.metadata_end, header.end - header.metadata_end, "headers")
    pieces, storages, end = [], [], data
    for index, tensor in enumerate(header.tensors):
        spec, elements, size = _measured(source, tensor)
        start = data + tensor.offset
        if start + size > source.size:
            raise source.cut_off(f"the tensor {tensor.name!r}", start + size)
        claims.claim(start, size, "tensors")
        storages.append(Storage(tensor.name, 0, start, size, size))
        pieces.append(Piece((tensor.name,), spec, elements, index, 0, size, size))
        end = max(end, start + size)
    check_apart(source, storages)
    claims.pad_gaps(header.end, min(data + -(-(end - data) // alignment) * alignment, source.size))
    format = f"GGUF v{header.version}{', big-endian' if header.big_endian else ''}"
    values = tuple((key, str(value)) for key, value in header.values.items())
    return file_contents(source, format, claims, pieces, storages, values=values)


def _measured(source: Source, tensor: _Described) -> tuple[TensorSpec, int, int]:
    block = GGML.get(tensor.type)
    if block is None:
        raise source.damaged(f"{tensor.name!r} has the unknown type {tensor.type}")
    elements = math.prod(tensor.shape)
    row = tensor.shape[0] if tensor.shape else 1
    if row % block.elements:
        raise source.damaged(
            f"{tensor.name!r} has rows of {row:,}, which {block.name} cannot cut into {block.elements}"
        )
    return TensorSpec(block.name, tensor.shape[::-1]), elements, elements // block.elements * block.bytes


def _header(source: Source) -> _Header:
    if source.size < 24:
        raise source.cut_off("the header")
    version = int.from_bytes(source.read(4, 4, "the version"), "little")
    big_endian = version != 0 and version & 0xFFFF == 0
    if big_endian:
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise source.damaged(f"it is GGUF version {version}; versions 2 and 3 are read")
    cursor = _Cursor(source, 8, ">" if big_endian else "<", "the header")
    tensors, keys = cursor.count(), cursor.count()
    source.check_count(tensors)
    if keys > MOST_KEYS:
        raise source.damaged(f"its metadata would have {keys:,} keys")
    header = _Header(big_endian=big_endian, version=version)
    cursor.what = "the metadata"
    for _ in range(keys):
        key = cursor.string()
        header.values[key] = _value(cursor, cursor.number("I"))
    header.metadata_end = cursor.position
    cursor.what = "the tensor descriptions"
    for _ in range(tensors):
        name, dimensions = cursor.string(), cursor.number("I")
        if dimensions > MOST_GGML_DIMENSIONS:
            raise source.damaged(f"{name!r} has {dimensions:,} dimensions")
        shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))
        header.tensors.append(_Described(name, shape, cursor.number("I"), cursor.number("Q")))
    header.end = cursor.position
    return header


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
