"""The storages of one file, and the record of the file: its tensors with the bytes that each owns of a storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memsize.checkpoints.contents import BITS, Contents, FileRecord, Storage, Tensor
from memsize.checkpoints.pickle_values import Blob, StorageValue
from memsize.checkpoints.source import Claims, Source
from memsize.records.byte_ownership import Extent, Ownership, own_bytes
from memsize.records.trace import TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor as a file describes it: `span` bytes from `start` of a storage, of which its elements need `needed`.

    They differ for a tensor with gaps: a column of a matrix spans nearly all of it.
    """

    keys: tuple[str, ...]
    spec: TensorSpec
    elements: int
    storage: int | None
    start: int
    span: int
    needed: int
    wrapper: str | None = None
    trainable: bool | None = None


@dataclass(slots=True)
class StorageIndex:
    """The storages of one PyTorch file while it is read, found by the keys that its pickles have for them.

    `storages` are in the order in which they were added. Among them are arrays that stand within a pickle.
    """

    source: Source
    storages: list[Storage] = field(default_factory=list)
    _by_key: dict[str, int] = field(default_factory=dict)
    _arrays: dict[Blob, int] = field(default_factory=dict)

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

    def find_array(self, blob: Blob, in_file: bool) -> int:
        """The index of the array with the data `blob`, which is part of the file unless its pickle is compressed."""
        if blob not in self._arrays:
            self._arrays[blob] = len(self.storages)
            self.storages.append(Storage("in the pickle", 0, blob.start if in_file else None, 0, 0))
        return self._arrays[blob]

    def measure_arrays(self, pieces: Sequence[Piece], claims: Claims) -> None:
        """Set the sizes of arrays within a pickle from their tensors: a text that encodes an array is longer."""
        needs = dict.fromkeys(self._arrays.values(), 0)
        for piece in pieces if needs else ():
            if piece.storage in needs:
                needs[piece.storage] = max(needs[piece.storage], piece.start + piece.span)
        for index, size in needs.items():
            old = self.storages[index]
            self.storages[index] = replace(old, bytes=size, file_bytes=0 if old.offset is None else size)
            claims.claim(old.offset or 0, 0 if old.offset is None else size, "tensors")

    @property
    def holes(self) -> list[tuple[int, int]]:
        """The starts and lengths of arrays within a pickle."""
        storages = (self.storages[index] for index in self._arrays.values())
        return [(storage.offset, storage.file_bytes) for storage in storages if storage.offset is not None]


def check_apart(source: Source, storages: Sequence[Storage]) -> None:
    """Raise `CheckpointError` when a storage reaches beyond the file, or shares bytes of it with another."""
    position, before = 0, ""
    spans = sorted((s.offset or 0, (s.offset or 0) + s.bytes, s.name) for s in storages if s.bytes)
    for start, end, name in spans:
        if end > source.size:
            raise source.cut_off(f"the tensor {name!r}", max(end for _, end, _ in spans))
        if start < position:
            raise source.damaged(f"the data of {name!r} overlaps that of {before!r}")
        position, before = end, name


def file_contents(
    source: Source, format: str, claims: Claims, pieces: Sequence[Piece], storages: Sequence[Storage], **facts: Any
) -> Contents:
    """The record of one file. Raises `CheckpointError` when a tensor reaches beyond its storage."""
    for piece in pieces:
        if piece.storage is not None and piece.start + piece.span > storages[piece.storage].bytes:
            name = ".".join(piece.keys)
            raise source.damaged(f"the tensor {name!r}, {str(piece.spec)[:60]}, reaches beyond its storage")
    tensors, covered = share_out(pieces, storages, source.budget.spend_overlaps)
    record = FileRecord(source.name, format, source.size, claims.sums(), len(tensors))
    return Contents(source.name, format, (record,), covered, tensors, **facts)


def share_out(
    pieces: Sequence[Piece], storages: Sequence[Storage], spend: Callable[[int], object] | None = None
) -> tuple[tuple[Tensor, ...], tuple[Storage, ...]]:
    """The tensors with the bytes that each owns, and the storages with the bytes that no tensor covers.

    `spend` bounds the work, as in `own_bytes`.
    """
    stored = [index for index, piece in enumerate(pieces) if piece.storage is not None]
    extents = [
        Extent(index, piece.start, piece.start + piece.span, storages[index].bytes, piece.needed, piece.spec.shape)
        for piece in pieces
        if (index := piece.storage) is not None
    ]
    ownership = dict(zip(stored, own_bytes(extents, spend), strict=True))
    names = [".".join(piece.keys) for piece in pieces]
    tensors = tuple(
        Tensor(
            name,
            piece.keys,
            piece.spec,
            piece.elements,
            piece.storage,
            share.owned,
            share.uncovered,
            None if share.shared_with is None else names[stored[share.shared_with]],
            piece.wrapper,
            piece.trainable,
        )
        for index, (name, piece) in enumerate(zip(names, pieces, strict=True))
        for share in (ownership.get(index, _NO_BYTES),)
    )
    uncovered = {index: storage.bytes for index, storage in enumerate(storages)}
    for tensor in tensors:
        if tensor.storage is not None:
            uncovered[tensor.storage] -= tensor.bytes
    covered = (replace(s, unneeded=uncovered[index]) if uncovered[index] > 0 else s for index, s in enumerate(storages))
    return tensors, tuple(covered)


_NO_BYTES = Ownership(0)
