"""The files of torch.save: a zip archive with a record for each storage, or, before 1.6, pickles with the data behind.

In the archive ``data.pkl`` says what there is. A TorchScript archive is the same with code beside it, and with
constants in a pickle of their own. Source: `torch.serialization._save`, ``caffe2/serialize/inline_container.h``.

The legacy format is five pickles, then each storage's data behind its number of elements. Source:
`torch.serialization._legacy_save`, which ``torch.save(…, _use_new_zipfile_serialization=False)`` still calls.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Literal, NamedTuple

from memsize.checkpoints.contents import Contents, Mark, Storage, Use
from memsize.checkpoints.pickle_values import Dict, StorageValue, is_allowed
from memsize.checkpoints.pickle_walk import PickleContents, walk
from memsize.checkpoints.source import (
    BEST_PACKING,
    LONGEST_DIRECTORY,
    MOST_UNPACKED,
    Claims,
    Source,
    file_contents,
    printable,
)
from memsize.checkpoints.unpickler import Unpickler
from memsize.records.dtypes import BITS

_LOCAL, _END, _DESCRIPTOR = b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08"
_END_SIZE, _LOCAL_SIZE, _LONGEST_COMMENT = 22, 30, 0xFFFF
_ENCRYPTED, _HAS_DESCRIPTOR = 1, 8
_ZIP_DAMAGE = (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, struct.error, zlib.error)

_OWN = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
_PICKLES = {"data.pkl": "data/", "constants.pkl": "constants/"}
"""The pickles of an archive, and the folder of the storages that each one names."""


def is_zip(source: Source) -> bool:
    """Whether the file begins as a zip archive does."""
    return source.size >= _END_SIZE and source.read(0, 4, "the first record") in (_LOCAL, _END)


def read_zip(source: Source) -> Contents:
    """Read the pickles of the archive at `source`, and the positions of its records."""
    claims, index, contents = Claims(source.size), StorageIndex(source), PickleContents()
    mentioned: dict[str, None] = {}
    pickles: dict[str, _Record] = {}
    for name, record in _records(source, claims).items():
        use: Use = "headers" if name in _OWN else "other"
        if name.startswith(tuple(_PICKLES.values())):
            index.add(name, Storage(name, 0, record.offset, record.size, record.packed))
            use = "tensors"
        if name in _PICKLES:
            pickles[name], use = record, "pickle"
        claims.claim(record.offset, record.packed, use)
    for name in (name for name in _PICKLES if name in pickles):
        noted = len(contents.values)
        record = pickles[name]
        if record.unpacked is None:
            source.file.seek(record.offset)
            unpickler = Unpickler(source, record.offset + record.packed)
        else:
            unpickler = Unpickler(source, len(record.unpacked), io.BytesIO(record.unpacked))
        walk(unpickler.load(), partial(index.find, prefix=_PICKLES[name]), source, contents)
        mentioned |= unpickler.mentioned
        if name == "constants.pkl":
            del contents.values[noted:]
    if "constants.pkl" in pickles:
        contents.marks = [Mark((), "model")]
    format = "TorchScript" if "constants.pkl" in pickles else "PyTorch zip"
    return _contents(source, format, claims, index, contents, mentioned)


def _contents(
    source: Source, format: str, claims: Claims, index: StorageIndex, contents: PickleContents, mentioned: Iterable[str]
) -> Contents:
    classes = tuple(name for name in mentioned if not is_allowed(name))
    facts = {"values": tuple(contents.values), "marks": tuple(contents.marks), "module": contents.module}
    return file_contents(source, format, claims, contents.pieces, index.storages, classes=classes, **facts)


@dataclass(slots=True)
class StorageIndex:
    """The storages of one PyTorch file while it is read, found by the keys that its pickles have for them."""

    source: Source
    storages: list[Storage] = field(default_factory=list)
    _by_key: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, storage: Storage) -> None:
        """Keep `storage` under `key`."""
        self._by_key[key] = len(self.storages)
        self.storages.append(storage)

    def find(self, value: StorageValue, prefix: str = "") -> int:
        """The index of a pickle's storage, whose key follows `prefix` here. Raises `CheckpointError` if none does."""
        key = prefix + value.key
        index = self._by_key.get(key)
        if index is None:
            raise self.source.damaged(f"the storage {key!r} that its pickle names is missing")
        if value.elements * BITS[value.dtype] + 7 >> 3 > self.storages[index].bytes:
            raise self.source.damaged(
                f"the storage {key!r} should hold {value.elements:,} elements of {value.dtype} and has "
                f"{self.storages[index].bytes:,} bytes"
            )
        return index


# The zip archive


class _Record(NamedTuple):
    """One record of an archive: `packed` bytes from `offset` of the file, which unpack to `size`.

    `unpacked` has these if it is a pickle that is compressed.
    """

    offset: int
    packed: int
    size: int
    unpacked: bytes | None = None


class _Guarded:
    """A file for `zipfile`, which would read a directory of any size that an archive claims."""

    def __init__(self, source: Source) -> None:
        self._source, self._most = source, source.budget.grown(LONGEST_DIRECTORY)
        self.seek, self.tell, self.seekable = source.file.seek, source.file.tell, source.file.seekable

    def read(self, count: int = -1) -> bytes:
        """The next `count` bytes, or the rest where that is short enough."""
        if count > self._most:
            raise self._source.damaged(f"its zip directory claims {count:,} bytes")
        return self._source.file.read(count if count >= 0 else self._most)


def _records(source: Source, claims: Claims) -> dict[str, _Record]:
    """The records of the archive by their names within its folder. Claims its headers and its padding.

    Raises `CheckpointError` for an archive that is cut off, encrypted, or whose records overlap or share a name.
    """
    try:
        if not zipfile.is_zipfile(source.file):
            raise source.cut_off("its data: the directory that stands at the end of a zip archive is missing")
        archive = zipfile.ZipFile(_Guarded(source), metadata_encoding="utf-8")
    except _ZIP_DAMAGE as error:
        raise source.damaged(f"its zip directory is not one ({printable(str(error))})") from error
    records: dict[str, _Record] = {}
    position, before = 0, ""
    folders = [name.removesuffix("data.pkl") for name in archive.namelist() if f"/{name}".endswith("/data.pkl")]
    if not folders:
        raise source.damaged("it is a zip archive without a data.pkl, so not a file that torch.save wrote")
    folder = printable(min(folders, key=len))
    for info in sorted(archive.infolist(), key=attrgetter("header_offset")):
        name = printable(info.filename)
        record = _located(source, info, f"the record {name!r}", claims)
        if info.header_offset < position:
            raise source.damaged(f"its records {before!r} and {name!r} overlap")
        key = name.removeprefix(folder)
        if key in records:
            raise source.damaged(f"it has two records called {name!r}")
        if key in _PICKLES and info.compress_type != zipfile.ZIP_STORED:
            record = record._replace(unpacked=_unpacked(source, archive, info, f"the record {key!r}"))
        records[key] = record
        position, before = record.offset + record.packed, name
    # The directory and its end record; bytes behind these stay unclaimed.
    size = min(source.size, _END_SIZE + _LONGEST_COMMENT)
    end = source.size - size + source.read(source.size - size, size, "the zip directory").rfind(_END)
    claims.claim(archive.start_dir, end + _END_SIZE + len(archive.comment) - archive.start_dir, "headers")
    return records


def _located(source: Source, info: zipfile.ZipInfo, what: str, claims: Claims) -> _Record:
    """Where a record's data lies, from its local header, which `zipfile` reads only to give the data out.

    PyTorch aligns the data by a longer extra field: that is padding.
    """
    if info.flag_bits & _ENCRYPTED:
        raise source.damaged(f"{what} is encrypted")
    header = source.read(info.header_offset, _LOCAL_SIZE, what)
    if header[:4] != _LOCAL:
        raise source.damaged(f"{what} is not where the zip directory says")
    name_size, extra_size = struct.unpack_from("<2H", header, 26)
    fixed = _LOCAL_SIZE + name_size
    offset, packed = info.header_offset + fixed + extra_size, info.compress_size
    if offset + packed > source.size:
        raise source.cut_off(what, offset + packed)
    if info.compress_type == zipfile.ZIP_STORED and packed != info.file_size:
        raise source.damaged(f"{what} is stored as it is, yet claims {packed:,} and {info.file_size:,} bytes")
    claims.claim(info.header_offset, fixed, "headers")
    claims.claim(info.header_offset + fixed, extra_size, "padding")
    if info.flag_bits & _HAS_DESCRIPTOR:
        # The sizes may stand behind the data, in 32 or 64 bits.
        start = offset + packed
        data = source.read(start, min(24, source.size - start), "a zip data descriptor")
        if data[:4] == _DESCRIPTOR:
            claims.claim(start, 16 if data[16:18] == b"PK" else 24, "headers")
    return _Record(offset, packed, info.file_size)


def _unpacked(source: Source, archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> bytes:
    """Unpack a record. Raises `CheckpointError` if it is too long, whatever size it claims."""
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise source.damaged(f"{what} is compressed by method {info.compress_type}, which PyTorch does not read either")
    most = MOST_UNPACKED + int(BEST_PACKING * min(info.compress_size, MOST_UNPACKED * source.budget.scale))
    try:
        with archive.open(info) as packed:
            data = packed.read(most + 1)
    except _ZIP_DAMAGE as error:
        raise source.damaged(f"{what} cannot be decompressed ({printable(str(error))})") from error
    if len(data) > most:
        raise source.damaged(f"{what} unpacks to more than the {most:,} bytes that memsize reads")
    return data


# The legacy format

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_MAGIC_PICKLES = (b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")
_COUNT = 8


def is_legacy(source: Source) -> bool:
    """Whether the file begins with the magic number, contents by any protocol."""
    start = source.read(0, min(source.size, 32), "the magic number")
    return any(magic in start for magic in _MAGIC_PICKLES) or str(MAGIC).encode() in start


def read_legacy(source: Source) -> Contents:
    """Read the pickles of the file at `source`, and the counts before each storage."""
    claims, index, contents = Claims(source.size), StorageIndex(source), PickleContents()
    source.file.seek(0)
    unpickler = Unpickler(source, source.size)
    magic, protocol, system, root, keys = (unpickler.load() for _ in range(5))
    if magic != MAGIC or protocol != PROTOCOL:
        shown = str(protocol)[:20] if isinstance(protocol, int) else type(protocol).__name__
        raise source.damaged(f"its magic number or protocol ({shown}) is not PyTorch's")
    if not isinstance(keys, list):
        raise source.damaged("its list of storages is not one")
    end = source.file.tell()
    entries = {key: value for key, value in system.pairs if isinstance(key, str)} if isinstance(system, Dict) else {}
    order: Literal["little", "big"] = "big" if entries.get("little_endian") is False else "little"
    _index_storages(source, keys, unpickler.storages, index, claims, order)
    walk(root, index.find, source, contents)
    claims.claim(0, end, "pickle")
    return _contents(source, "PyTorch legacy", claims, index, contents, unpickler.mentioned)


def _index_storages(
    source: Source, keys: list[object], mentioned: dict[str, StorageValue], index: StorageIndex, claims: Claims,
    order: Literal["little", "big"],
) -> None:  # fmt: skip
    """Find the storages in the order of the file: a number of elements, and their data."""
    position = source.file.tell()
    rest = dict(mentioned)
    for key in keys:
        storage = rest.pop(key, None) if isinstance(key, str) else None
        if not isinstance(key, str) or storage is None:
            shown = printable(str(key) if isinstance(key, str | int) else type(key).__name__, 40)
            raise source.damaged(f"it lists the storage {shown!r}, which no tensor names")
        what = f"the storage {printable(key, 40)!r}"
        count = int.from_bytes(source.read(position, _COUNT, what), order)
        size = count * BITS[storage.dtype] + 7 >> 3
        start = position + _COUNT
        if start + size > source.size:
            raise source.cut_off(what, start + size)
        claims.claim(position, _COUNT, "headers")
        claims.claim(start, size, "tensors")
        index.add(key, Storage(printable(key, 40), 0, start, size, size))
        position = start + size
