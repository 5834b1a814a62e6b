"""The storages of one PyTorch file while it is read, found by the keys that its pickles have for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memsize.checkpoint.accounting import Claims
from memsize.checkpoint.dtypes import BITS
from memsize.checkpoint.holdings import Holdings
from memsize.checkpoint.ownership import given_out
from memsize.checkpoint.policy import is_allowed
from memsize.checkpoint.record import Contents, FileRecord, Storage
from memsize.checkpoint.source import Source
from memsize.checkpoint.values import Blob, StorageValue


@dataclass(slots=True)
class Shelf:
    """`storages` in the order in which they were put here; `blobs` are those that stand within a pickle."""

    source: Source
    storages: list[Storage] = field(default_factory=list)
    blobs: dict[Blob, int] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)

    def put(self, key: str, storage: Storage) -> None:
        """Keep `storage` under `key`."""
        self._places[key] = len(self.storages)
        self.storages.append(storage)

    def locator(self, prefix: str = "", in_file: bool = True) -> Callable[[StorageValue | Blob], int]:
        """What finds the storages of one pickle. `prefix` stands before its keys; `in_file` says whether its own bytes
        stand in the file as they are, and not compressed.
        """

        def locate(value: StorageValue | Blob) -> int:
            return self._blob(value, in_file) if isinstance(value, Blob) else self._found(prefix + value.key, value)

        return locate

    def _found(self, key: str, value: StorageValue) -> int:
        place = self._places.get(key)
        if place is None:
            raise self.source.damaged(f"the storage {key!r} that its pickle names is missing")
        if value.elements * BITS[value.dtype] + 7 >> 3 > self.storages[place].bytes:
            raise self.source.damaged(
                f"the storage {key!r} should hold {value.elements:,} elements of {value.dtype} and has "
                f"{self.storages[place].bytes:,} bytes"
            )
        return place

    def _blob(self, blob: Blob, in_file: bool) -> int:
        if blob not in self.blobs:
            self.blobs[blob] = len(self.storages)
            offset = blob.start if in_file else None
            self.storages.append(Storage("in the pickle", 0, offset, 0, 0))
        return self.blobs[blob]

    def fit_blobs(self, found: Holdings, claims: Claims) -> None:
        """Give arrays within a pickle the size that they need: a text that encodes them is longer."""
        needs: dict[int, int] = {}
        places = set(self.blobs.values())
        for piece in found.pieces:
            if piece.storage in places:
                needs[piece.storage] = max(needs.get(piece.storage, 0), piece.start + piece.span)
        for place, size in needs.items():
            old = self.storages[place]
            self.storages[place] = Storage(old.name, 0, old.offset, size, 0 if old.offset is None else size)
            if old.offset is not None:
                claims.claim(old.offset, size, "tensors")

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Where arrays stand within a pickle."""
        storages = (self.storages[place] for place in self.blobs.values())
        return [(storage.offset, storage.file_bytes) for storage in storages if storage.offset is not None]


def assembled(
    source: Source, format: str, claims: Claims, shelf: Shelf, found: Holdings, mentioned: list[str]
) -> Contents:
    """The record of one PyTorch file. Raises `CheckpointError` when a tensor reaches beyond its storage."""
    for piece in found.pieces:
        if piece.storage is not None and piece.start + piece.span > shelf.storages[piece.storage].bytes:
            name = ".".join(piece.keys)
            raise source.damaged(f"the tensor {name!r}, {str(piece.spec)[:60]}, reaches beyond its storage")
    tensors, storages = given_out(found.pieces, shelf.storages)
    record = FileRecord(source.name, format, source.size, claims.sums(), len(tensors))
    return Contents(
        path=source.name,
        format=format,
        files=(record,),
        storages=storages,
        tensors=tensors,
        values=tuple(found.values),
        marks=tuple(found.marks),
        classes=tuple(name for name in mentioned if not is_allowed(name)),
        module=found.module,
    )
