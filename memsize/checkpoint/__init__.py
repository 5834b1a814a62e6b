"""Checkpoint files: what each byte of one is for, from its headers alone, and without running anything that is in it.

safetensors, GGUF, PyTorch's zip and legacy formats, and sets of these in several files. Nothing here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from memsize.checkpoint import gguf, safetensors, sharded, torch_legacy, torch_zip
from memsize.checkpoint.archive import looks_like as looks_like_zip
from memsize.checkpoint.record import Contents
from memsize.checkpoint.source import Source, opened
from memsize.checkpoint.texts import printable
from memsize.errors import CheckpointError

__all__ = ["Contents", "read"]


def read(path: str | os.PathLike[str]) -> Contents:
    """What the checkpoint at `path` holds: a file, an index of several files, or a folder with either.

    Raises `CheckpointError` for what is not a checkpoint, is damaged, or would run code when it is loaded.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return sharded.read_folder(place, read_file)
    if place.name.endswith(".json"):
        return sharded.read_index(place, read_file)
    return sharded.one_of_several(read_file(place), place)


def read_file(path: Path) -> Contents:
    """What the single file at `path` holds."""
    with opened(path) as source:
        contents = _read_source(source)
        # A byte that two records claim would count twice: only a file made to deceive has one.
        if contents.files[0].bytes_for("tensors") != sum(storage.file_bytes for storage in contents.storages):
            raise source.damaged("its records overlap")
        return contents


def _read_source(source: Source) -> Contents:
    if source.size == 0:
        raise CheckpointError(f"{source.name} is empty")
    if gguf.looks_like(source):
        return gguf.read(source)
    if looks_like_zip(source):
        return torch_zip.read(source)
    if torch_legacy.looks_like(source):
        return torch_legacy.read(source)
    if safetensors.looks_like(source) or source.name.endswith(".safetensors"):
        _check_pointer(source)
        return safetensors.read(source)
    _check_pointer(source)
    raise CheckpointError(_unknown(source))


_POINTER = b"version https://git-lfs.github.com/spec/"


def _check_pointer(source: Source) -> None:
    """Refuse what git-lfs leaves in place of a file that was not fetched."""
    start = source.read(0, min(source.size, 200), "its first bytes")
    if start.startswith(_POINTER):
        size = next((line[5:] for line in start.splitlines() if line.startswith(b"size ")), b"")
        real = f" of {int(size):,} bytes" if size.isdigit() else ""
        raise CheckpointError(f"{source.name} is a Git LFS pointer, not the file{real} itself: git lfs pull fetches it")


def _unknown(source: Source) -> str:
    start = source.read(0, min(source.size, 16), "its first bytes")
    known = "safetensors, GGUF, and what torch.save writes"
    if start[:1] == b"\x80" or start[:1] in (b"(", b"]", b"}"):
        return f"{source.name} is a plain pickle and not what torch.save writes; memsize reads {known}"
    if start.lstrip()[:1] == b"<":
        return f"{source.name} is a web page, perhaps in place of a download; memsize reads {known}"
    if start.startswith(b"\x89HDF"):
        return f"{source.name} is an HDF5 file; memsize reads {known}"
    shown = printable(start.decode("latin-1"))
    return f"{source.name} is not a checkpoint that memsize knows (it begins with {shown!r}); it reads {known}"
