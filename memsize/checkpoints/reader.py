"""A checkpoint by its path: one file of any format, several by their index or their numbers, or a folder with these."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memsize import files
from memsize.checkpoints import gguf, safetensors, torch_files
from memsize.checkpoints.contents import Contents, Storage, Tensor
from memsize.checkpoints.source import LONGEST_INDEX, Source, opened, printable
from memsize.errors import CheckpointError
from memsize.loading.target import CHECKPOINTS
from memsize.printable import shortened
from memsize.processes.patches import collector_paused

_INDEX = (".safetensors.index.json", ".bin.index.json", ".index.json")
_NUMBERED = re.compile(r"(?P<stem>.*?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
_ASIDE = ("training_args.bin", "scheduler.pt", "scaler.pt")
"""Small files that the Trainer of transformers writes beside a model: not the model."""


def read(path: str | os.PathLike[str]) -> Contents:
    """Read the checkpoint at `path`: a file, an index of several files, or a folder with either.

    Raises `CheckpointError` for what is not a checkpoint, is damaged, or would run code when it is loaded.
    """
    # os.path answers no where pathlib raises: for names that are too long, and users that there are not.
    file = Path(os.path.expanduser(path))
    with collector_paused():
        if os.path.isdir(file):
            return _read_folder(file)
        if file.name.endswith(".json"):
            return _read_index(file)
        contents, match = _read_file(file), _NUMBERED.fullmatch(file.name)
        if match is None or int(match["count"]) < 2:
            return contents
        position = f"file {int(match['number'])} of {int(match['count'])}"
        return _noted(contents, f"This is {position}: name the folder or the index to read them all.")


def _noted(contents: Contents, *notes: str) -> Contents:
    return replace(contents, notes=(*contents.notes, *notes))


def _read_file(path: Path) -> Contents:
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
    if torch_files.is_zip(source):
        return torch_files.read_zip(source)
    if torch_files.is_legacy(source):
        return torch_files.read_legacy(source)
    start = source.read(0, min(source.size, 200), "its first bytes")
    if start.startswith(_POINTER):
        size = next((line[5:] for line in start.splitlines() if line.startswith(b"size ")), b"")
        real = f" of {int(size):,} bytes" if size.isdigit() else ""
        raise CheckpointError(f"{source.name} is a Git LFS pointer, not the file{real} itself: git lfs pull fetches it")
    if safetensors.looks_like(source) or source.name.endswith(".safetensors"):
        return safetensors.read(source)
    raise CheckpointError(_unknown(source, start[:16]))


_POINTER = b"version https://git-lfs.github.com/spec/"
"""The start of a pointer file of git-lfs, which stands in place of a file that was not fetched."""


def _unknown(source: Source, start: bytes) -> str:
    formats = "safetensors, GGUF, and what torch.save writes"
    if start[:1] == b"\x80" or start[:1] in (b"(", b"]", b"}"):
        return f"{source.name} is a plain pickle and not what torch.save writes; memsize reads {formats}"
    if start.lstrip()[:1] == b"<":
        return f"{source.name} is a web page, perhaps in place of a download; memsize reads {formats}"
    if start.startswith(b"\x89HDF"):
        return f"{source.name} is an HDF5 file; memsize reads {formats}"
    shown = printable(start.decode("latin-1"))
    return f"{source.name} is not a checkpoint that memsize knows (it begins with {shown!r}); it reads {formats}"


# Several files


def _read_folder(folder: Path) -> Contents:
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    for ending in _INDEX:
        indexes = [name for name in names if name.endswith(ending)]
        if indexes:
            contents = replace(_read_index(folder / indexes[0]), path=_name_of(folder))
            others = [name for name in names if name.endswith(_INDEX[:2]) and name != indexes[0]]
            return _noted(contents, *(f"The folder also has {other}, which is not read here." for other in others[:1]))
    for suffix in CHECKPOINTS:
        candidates = [name for name in names if name.endswith(suffix) and name not in _ASIDE]
        if candidates:
            return _read_shards(folder, candidates)
    raise CheckpointError(f"{folder} holds no checkpoint: no file ends in {', '.join(CHECKPOINTS)}")


def _read_shards(folder: Path, names: Sequence[str]) -> Contents:
    if len(names) == 1:
        return replace(_read_file(folder / names[0]), path=f"{_name_of(folder)}/{printable(names[0])}")
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    stems = {(match["stem"], match["count"]) for match in matches}
    if len(matches) != len(names) or len(stems) != 1:
        shown = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
        raise CheckpointError(f"{folder} holds several checkpoints: name one of {shown}")
    count = int(matches[0]["count"])
    if len(names) != count:
        raise CheckpointError(f"{folder} holds {len(names)} of the {count} files of {matches[0]['stem']}")
    return _join(_name_of(folder), [_read_file(folder / name) for name in names])


def _read_index(path: Path) -> Contents:
    """Read the files of an index, whose ``weight_map`` has the file of each tensor."""
    try:
        index = files.parse_json(files.read(path, LONGEST_INDEX))
    except OSError as error:
        raise CheckpointError(f"cannot read {shortened(str(path), 200)}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON that can be read: {error}") from error
    wanted = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(wanted, dict) or not all(isinstance(name, str) for name in wanted.values()):
        raise CheckpointError(f"{path.name} is not an index of a checkpoint: it has no weight_map of names to files")
    names = sorted(set(wanted.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path.name} names a file in another folder, {printable(name, 80)!r}")
        if not os.path.isfile(path.parent / name):
            absent = sum(not os.path.isfile(path.parent / other) for other in names)
            raise CheckpointError(
                f"{path.name}: {absent} of its {len(names)} files are missing, such as {printable(name, 80)}"
            )
    contents = _join(printable(path.name), [_read_file(path.parent / name) for name in names])
    return _check_index(contents, index, wanted)


def _check_index(contents: Contents, index: dict[str, Any], wanted: dict[str, str]) -> Contents:
    names = {tensor.name for tensor in contents.tensors}
    missing = tuple(printable(name) for name in wanted if printable(name) not in names)
    extra = [name for name in names if name not in wanted]
    notes: list[str] = []
    if extra:
        notes.append(f"The index leaves out {len(extra):,} tensors that the files hold, such as {min(extra)}.")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = sum(storage.bytes for storage in contents.storages)
    if isinstance(total, int) and total != stored:
        notes.append(f"The index says that the tensors take {total:,} bytes; they take {stored:,}.")
    return _noted(replace(contents, missing=missing), *notes)


def _join(name: str, parts: Iterable[Contents]) -> Contents:
    contents = list(parts)
    storages: list[Storage] = []
    tensors: list[Tensor] = []
    for number, part in enumerate(contents):
        base = len(storages)
        # A new tuple of fields is made much faster than by `replace`.
        storages += [Storage(s.name, number, s.offset, s.bytes, s.file_bytes, s.unneeded) for s in part.storages]
        for t in part.tensors:
            sizes = None if t.storage is None else t.storage + base, t.bytes, t.unneeded
            tensors.append(Tensor(t.name, t.keys, t.spec, t.elements, *sizes, t.shared_with, t.wrapper, t.trainable))
    formats = tuple(dict.fromkeys(part.format for part in contents))
    values = dict(pair for part in reversed(contents) for pair in part.values)
    return Contents(
        path=name,
        format=" and ".join(formats),
        files=tuple(file for part in contents for file in part.files),
        storages=tuple(storages),
        tensors=tuple(tensors),
        values=tuple(values.items()),
        marks=tuple(mark for part in contents for mark in part.marks),
        classes=tuple(dict.fromkeys(name for part in contents for name in part.classes)),
        notes=tuple(note for part in contents for note in part.notes),
    )


def _name_of(folder: Path) -> str:
    """The name of a folder in messages; that of the working folder is resolved."""
    return printable(folder.resolve().name) or "/"
