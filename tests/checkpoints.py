"""Makers of checkpoint files for tests: by hand, byte by byte, where a library would not write what is wanted."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memsize.checkpoints import pickle_values as pickle_values, read as read
from memsize.checkpoints.breakdown import Breakdown as Breakdown, halved as halved
from memsize.checkpoints.contents import (
    USES as USES,
    Contents as Contents,
    FileRecord as FileRecord,
    Mark as Mark,
    Match as Match,
    Storage as Storage,
    Tensor as Tensor,
    View as View,
)
from memsize.checkpoints.gguf import GGML as GGML
from memsize.checkpoints.pickle_values import (
    STORAGES as STORAGES,
    Blob as Blob,
    Dict as Dict,
    Object as Object,
    is_allowed as is_allowed,
    is_refused as is_refused,
)
from memsize.checkpoints.safetensors import SAFETENSORS as SAFETENSORS
from memsize.checkpoints.source import Claims as Claims, Piece as Piece, Source as Source, share_out as share_out
from memsize.checkpoints.state_dict_diff import (
    Expected as Expected,
    compared as compared,
    expected_from as expected_from,
)
from memsize.checkpoints.unpickler import Unpickler as Unpickler

_STRING, _ARRAY, _UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    """A pickle's BINUNICODE instruction."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def write_zip(path: Path, pickle: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    """A file as `torch.save` would write it, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3\n")
        for name, data in records.items():
            archive.writestr(f"archive/data/{name.removeprefix('_')}", data)
    return path


def write_legacy(path: Path, pickle: bytes) -> Path:
    """A file as PyTorch before 1.6 wrote it, with a pickle of one's own and no storages."""
    start = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03." + b"\x80\x02}."
    path.write_bytes(start + pickle + b"\x80\x02].")
    return path


def write_safetensors(path: Path, header: Any, data: int = 0) -> Path:
    """A header, as JSON or as bytes, and `data` zero bytes."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + data)
    return path


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """One tensor of a safetensors header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def gguf_bytes(
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    values: Mapping[str, str | int | Sequence[str]] | None = None,
    *,
    data: int = 0,
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A GGUF file: tensors as name, dimensions (rows last), type and offset; then padding and `data` zero bytes."""

    def string(value: str) -> bytes:
        return struct.pack(f"{order}Q", len(value.encode())) + value.encode()

    def value_of(value: str | int | Sequence[str]) -> bytes:
        if isinstance(value, str):
            return struct.pack(f"{order}I", _STRING) + string(value)
        if isinstance(value, int):
            return struct.pack(f"{order}II", _UINT32, value)
        items = b"".join(map(string, value))
        return struct.pack(f"{order}IIQ", _ARRAY, _STRING, len(value)) + items

    values = dict(values or {})
    out = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(values))
    out += b"".join(string(key) + value_of(value) for key, value in values.items())
    for name, shape, kind, offset in tensors:
        out += string(name) + struct.pack(f"{order}I", len(shape))
        out += struct.pack(f"{order}{len(shape)}Q", *shape) + struct.pack(f"{order}IQ", kind, offset)
    return out + bytes(-len(out) % alignment) + bytes(data)
