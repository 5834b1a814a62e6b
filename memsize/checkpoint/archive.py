"""A zip archive by its own records: every entry with where its data lies, and every byte of the file claimed once.

Source: PKWARE's APPNOTE 6.3.9. Python's `zipfile` says neither where an entry's data begins nor what lies between
entries, and trusts the sizes that it is told.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from memsize.checkpoint.accounting import Claims
from memsize.checkpoint.source import Source
from memsize.checkpoint.texts import printable

_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_CENTRAL, _LOCAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"
_END_SIZE, _END64_SIZE, _LOCATOR64_SIZE, _CENTRAL_SIZE, _LOCAL_SIZE = 22, 56, 20, 46, 30
_LONGEST_COMMENT = 0xFFFF
_ZIP64, _FULL32 = 1, 0xFFFFFFFF
STORED, DEFLATED = 0, 8
_ENCRYPTED, _HAS_DESCRIPTOR = 1, 8

MOST_ENTRIES = 1_000_000
LONGEST_DIRECTORY = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of an archive: `packed` bytes from `offset` of the file, which unpack to `size`."""

    name: str
    method: int
    offset: int
    packed: int
    size: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """One record as the central directory lists it."""

    name: bytes
    flags: int
    method: int
    packed: int
    size: int
    header: int


def looks_like(source: Source) -> bool:
    """Whether the file begins as a zip archive does."""
    return source.size >= _END_SIZE and source.read(0, 4, "the first record") in (_LOCAL, _END)


def entries(source: Source, claims: Claims) -> dict[str, Entry]:
    """The records of the archive by name. Claims its headers and its padding; what an entry holds is for the caller.

    Raises `CheckpointError` for an archive that is cut off, encrypted, or whose records overlap or share a name.
    """
    found: dict[str, Entry] = {}
    position, before = 0, ""
    for listed in sorted(_directory(source, claims), key=lambda entry: entry.header):
        entry = _located(source, listed, claims)
        if listed.header < position:
            raise source.damaged(f"its records {before!r} and {entry.name!r} overlap")
        if entry.name in found:
            raise source.damaged(f"it has two records called {entry.name!r}")
        found[entry.name] = entry
        position, before = entry.offset + entry.packed, entry.name
    return found


def unpacked(source: Source, entry: Entry, most: int, what: str) -> bytes:
    """What `entry` unpacks to, refused when it is more than `most` bytes, whatever size it claims."""
    if entry.method == STORED:
        if entry.packed > most:
            raise source.damaged(f"{what} has {entry.packed:,} bytes, more than the {most:,} that memsize reads")
        return source.read(entry.offset, entry.packed, what)
    if entry.method != DEFLATED:
        raise source.damaged(f"{what} is compressed by method {entry.method}, which PyTorch does not read either")
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    parts, room, position, end = [], most, entry.offset, entry.offset + entry.packed
    try:
        while position < end and not machine.eof:
            data = source.read(position, min(1 << 16, end - position), what)
            position += len(data)
            while data:
                parts.append(machine.decompress(data, room + 1))
                room -= len(parts[-1])
                if room < 0:
                    raise source.damaged(f"{what} unpacks to more than the {most:,} bytes that memsize reads")
                data = machine.unconsumed_tail
    except zlib.error as error:
        raise source.damaged(f"{what} cannot be decompressed ({error})") from error
    return b"".join(parts)


def _directory(source: Source, claims: Claims) -> Iterator[_Listed]:
    """The central directory's entries."""
    count, size, start = _end_record(source, claims)
    if count > MOST_ENTRIES or size > LONGEST_DIRECTORY:
        raise source.damaged(f"its directory lists {count:,} records in {size:,} bytes")
    data = source.read(start, size, "the zip directory")
    claims.claim(start, size, "headers")
    position = 0
    for _ in range(count):
        if data[position : position + 4] != _CENTRAL or position + _CENTRAL_SIZE > len(data):
            raise source.damaged("its zip directory is not one")
        fields = struct.unpack_from("<6H3L5H2L", data, position + 4)
        flags, method, packed, full = fields[2], fields[3], fields[7], fields[8]
        name_size, extra_size, comment_size, header = fields[9], fields[10], fields[11], fields[15]
        name_end = position + _CENTRAL_SIZE + name_size
        name, extra = data[position + _CENTRAL_SIZE : name_end], data[name_end : name_end + extra_size]
        full, packed, header = _wide(source, extra, full, packed, header)
        yield _Listed(name, flags, method, packed, full, header)
        position = name_end + extra_size + comment_size


def _wide(source: Source, extra: bytes, full: int, packed: int, header: int) -> tuple[int, int, int]:
    """The sizes and the offset, taken from the zip64 field where they do not fit into 32 bits."""
    values = [full, packed, header]
    if _FULL32 not in values:
        return full, packed, header
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        if kind == _ZIP64:
            field = extra[position + 4 : position + 4 + size]
            wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            full, packed, header = (next(wide, value) if value == _FULL32 else value for value in values)
            return full, packed, header
        position += 4 + size
    raise source.damaged("its zip directory lacks the sizes of a large record")


def _end_record(source: Source, claims: Claims) -> tuple[int, int, int]:
    """How many entries the central directory has, its size, and where it starts."""
    size = min(source.size, _END_SIZE + _LONGEST_COMMENT)
    tail = source.read(source.size - size, size, "the zip directory")
    place = tail.rfind(_END)
    if place < 0 or place + _END_SIZE > len(tail):
        raise source.cut_off("its data: the directory that stands at the end of a zip archive is missing")
    start = source.size - size + place
    fields = struct.unpack_from("<4H2LH", tail, place + 4)
    count, directory_size, directory = fields[3], fields[4], fields[5]
    claims.claim(start, _END_SIZE + fields[6], "headers")
    if start >= _LOCATOR64_SIZE:
        locator = source.read(start - _LOCATOR64_SIZE, _LOCATOR64_SIZE, "the zip64 locator")
        if locator[:4] == _LOCATOR64:
            claims.claim(start - _LOCATOR64_SIZE, _LOCATOR64_SIZE, "headers")
            return _end_record64(source, claims, struct.unpack_from("<Q", locator, 8)[0])
    return count, directory_size, directory


def _end_record64(source: Source, claims: Claims, start: int) -> tuple[int, int, int]:
    record = source.read(start, _END64_SIZE, "the zip64 directory")
    if record[:4] != _END64:
        raise source.damaged("its zip64 directory is not one")
    length, count, size, directory = *struct.unpack_from("<Q", record, 4), *struct.unpack_from("<3Q", record, 32)
    claims.claim(start, 12 + length, "headers")
    return count, size, directory


def _located(source: Source, listed: _Listed, claims: Claims) -> Entry:
    """Where an entry's data lies, from its local header. PyTorch aligns it by a longer extra field."""
    name = printable(listed.name.decode("utf-8", "replace"))
    what = f"the record {name!r}"
    if listed.flags & _ENCRYPTED:
        raise source.damaged(f"{what} is encrypted")
    header = source.read(listed.header, _LOCAL_SIZE, what)
    if header[:4] != _LOCAL:
        raise source.damaged(f"{what} is not where the zip directory says")
    name_size, extra_size = struct.unpack_from("<2H", header, 26)
    fixed = _LOCAL_SIZE + name_size
    offset = listed.header + fixed + extra_size
    if offset + listed.packed > source.size:
        raise source.cut_off(what, offset + listed.packed)
    if listed.method == STORED and listed.packed != listed.size:
        raise source.damaged(f"{what} is stored as it is, yet claims {listed.packed:,} and {listed.size:,} bytes")
    claims.claim(listed.header, fixed, "headers")
    claims.claim(listed.header + fixed, extra_size, "padding")
    if listed.flags & _HAS_DESCRIPTOR:
        _claim_descriptor(source, offset + listed.packed, claims)
    return Entry(name, listed.method, offset, listed.packed, listed.size)


def _claim_descriptor(source: Source, start: int, claims: Claims) -> None:
    """The sizes that may stand behind an entry's data, in 32 or 64 bits."""
    data = source.read(start, min(24, source.size - start), "a zip data descriptor")
    if data[:4] != _DESCRIPTOR:
        return
    short = data[16:20] in (_LOCAL, _CENTRAL)
    claims.claim(start, 16 if short else 24, "headers")
