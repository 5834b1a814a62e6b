"""The frozen record of what a checkpoint file holds: its bytes, its storages, its tensors. Only readers make it.

Sizes are exact integers in bytes. Nothing here needs torch. Every text that comes out of a file is made printable
before it gets in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsize.records.trace import TensorSpec

Use = Literal["tensors", "padding", "metadata", "pickle", "headers", "other", "unclaimed"]
"""What a byte of a file is for: tensor data; alignment; metadata such as a tokenizer; pickled objects; what describes
the rest (headers, zip records); other records (the code of a scripted model); nothing that the format knows of."""

USES: tuple[Use, ...] = ("tensors", "padding", "metadata", "pickle", "headers", "other", "unclaimed")

PartKind = Literal["model", "EMA", "optimizer", "scheduler", "other"]
"""What a part of a training checkpoint is."""


MOST_TENSORS = 500_000
"""No checkpoint file with more tensors is read: what describes them has to fit into memory."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint. `uses` has the bytes of each of `USES`, in that order: they add up to `size`."""

    name: str
    format: str
    size: int
    uses: tuple[int, ...]
    tensors: int

    def bytes_for(self, use: Use) -> int:
        """The bytes of the file that are for `use`."""
        return self.uses[USES.index(use)]


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of tensor data. `bytes` is what it takes in memory, `file_bytes` in the file (less when compressed).

    `file` indexes `Contents.files`. `offset` is where its data starts in it, None where that is not one place.
    `unneeded` are bytes of it that no tensor covers: they are saved because a tensor is a view of a larger one.
    """

    name: str
    file: int
    offset: int | None
    bytes: int
    file_bytes: int
    unneeded: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, or one piece of a tensor that is kept in several (`wrapper` says of what).

    `bytes` is what it needs and no tensor before it does: 0 when `shared_with` names the one that has it all.
    `unneeded` is the rest of its storage, which no tensor covers, counted with the first tensor that keeps it.
    `storage` indexes `Contents.storages`, None when it keeps no data (a meta tensor). `keys` are the steps of the
    dictionaries and lists down to it, so that `name` is these joined by dots.
    """

    name: str
    keys: tuple[str, ...]
    spec: TensorSpec
    elements: int
    storage: int | None
    bytes: int
    unneeded: int = 0
    shared_with: str | None = None
    wrapper: str | None = None
    trainable: bool | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A container that shows what it is by what it holds: an optimizer's ``state`` and ``param_groups``, say."""

    keys: tuple[str, ...]
    kind: PartKind


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that one checkpoint holds, whether it is one file or several.

    `values` are the plain values beside the tensors (an epoch, a file's own metadata) as texts. `classes` are the
    names of the classes and functions that a pickle mentions beyond what ``weights_only`` allows. `module` is the class
    of a model that was pickled whole. `missing` names the
    tensors that an index promises and no file has.
    """

    path: str
    format: str
    files: tuple[FileRecord, ...]
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    values: tuple[tuple[str, str], ...] = ()
    marks: tuple[Mark, ...] = ()
    classes: tuple[str, ...] = ()
    module: str | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def compressed(self) -> int:
        """By how many bytes compression makes the data smaller in the files than in memory."""
        return sum(storage.bytes - storage.file_bytes for storage in self.storages)
