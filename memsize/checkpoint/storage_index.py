"""The storages of one file, and who needs which bytes of them.

Ties and views are counted once: of the tensors of a storage the first gets what it covers, a later one what is left for
it, and what no tensor covers is laid open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memsize.checkpoint.contents import Contents, FileRecord, Storage, Tensor
from memsize.checkpoint.dtypes import BITS
from memsize.checkpoint.pickle_values import Blob, StorageValue
from memsize.checkpoint.source import Claims, Source
from memsize.records.trace import TensorSpec

MOST_OVERLAPS = 5_000_000
"""Parts of storages that are compared with each other: views of one storage that all overlap take time squared."""


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


def strided_extent(shape: Sequence[int], stride: Sequence[int], bits: int) -> tuple[int, int]:
    """The bytes that a strided tensor spans, and those of its distinct elements (expanded dimensions count once)."""
    if 0 in shape:
        return 0, 0
    last, distinct = 0, 1
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
        distinct *= size if step else 1
    span = (last + 1) * bits + 7 >> 3
    return span, min(span, distinct * bits + 7 >> 3)


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
        """Where the storage is that a pickle means, whose keys all stand behind `prefix` here."""
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
        """Where the array is whose data are `blob`: part of the file itself unless its pickle is compressed."""
        if blob not in self._arrays:
            self._arrays[blob] = len(self.storages)
            self.storages.append(Storage("in the pickle", 0, blob.start if in_file else None, 0, 0))
        return self._arrays[blob]

    def measure_arrays(self, pieces: Sequence[Piece], claims: Claims) -> None:
        """Give arrays within a pickle the size that they need: a text that encodes them is longer."""
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
        """Where arrays stand within a pickle."""
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
    try:
        tensors, kept = share_out(pieces, storages)
    except _TooManyOverlapsError:
        raise source.damaged("its tensors overlap each other in more ways than memsize follows") from None
    record = FileRecord(source.name, format, source.size, claims.sums(), len(tensors))
    return Contents(source.name, format, (record,), kept, tensors, **facts)


def share_out(pieces: Sequence[Piece], storages: Sequence[Storage]) -> tuple[tuple[Tensor, ...], tuple[Storage, ...]]:
    """The tensors with the bytes that each has of its own, and the storages with what no tensor covers.

    Views with gaps are counted by their elements; where they lie in each other's gaps the sum is exact, where they
    overlap it is never too small and never more than what they span together.
    """
    holders: dict[int, list[int]] = {}
    for place, piece in enumerate(pieces):
        if piece.storage is not None:
            holders.setdefault(piece.storage, []).append(place)
    owned = [0] * len(pieces)
    first: dict[int, int] = {}
    unneeded = [storage.bytes for storage in storages]
    rest = [0] * len(pieces)
    cover = _Cover()
    for index, places in holders.items():
        if len(places) == 1:
            owned[places[0]] = pieces[places[0]].needed
        else:
            cover.clear()
            _share(pieces, places, cover, owned, first)
        unneeded[index] = max(0, storages[index].bytes - sum(owned[place] for place in places))
        rest[places[0]] = unneeded[index]
    names = [".".join(piece.keys) for piece in pieces]
    tensors = tuple(
        Tensor(
            names[place],
            piece.keys,
            piece.spec,
            piece.elements,
            piece.storage,
            owned[place],
            rest[place],
            names[first[place]] if place in first else None,
            piece.wrapper,
            piece.trainable,
        )
        for place, piece in enumerate(pieces)
    )
    return tensors, tuple(replace(s, unneeded=left) if left else s for s, left in zip(storages, unneeded, strict=True))


def _share(pieces: Sequence[Piece], places: list[int], cover: _Cover, owned: list[int], first: dict[int, int]) -> None:
    """Give out the bytes of one storage to the `pieces` at `places`; `first` says whose they are already."""
    met = [cover.add(pieces[place].start, pieces[place].start + pieces[place].span, place) for place in places]
    gapless = all(pieces[place].needed == pieces[place].span for place in places)
    room = sum(fresh for fresh, _ in met)
    seen = set()
    for place, (fresh, holder) in zip(places, met, strict=True):
        piece = pieces[place]
        if gapless:
            owned[place] = fresh
        else:
            same = (piece.start, piece.span, piece.spec.shape, piece.needed)
            owned[place] = 0 if same in seen else min(piece.needed, room)
            seen.add(same)
            room -= owned[place]
        if piece.needed and not owned[place]:
            first[place] = places[0] if holder is None else holder


class _TooManyOverlapsError(Exception):
    """Views that overlap so much that to tell whose each byte is would take too long."""


class _Cover:
    """Which bytes of a storage are given out already: disjoint intervals in order, each with who covered it first."""

    def __init__(self) -> None:
        self._left = MOST_OVERLAPS
        self.clear()

    def clear(self) -> None:
        """Begin with another storage."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[int] = []

    def add(self, start: int, end: int, owner: int) -> tuple[int, int | None]:
        """Cover ``[start, end)`` too: how many of its bytes were not covered before, and the first of those who covered
        any of the others.
        """
        if end <= start:
            return 0, None
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        self._left -= high - low
        if self._left < 0:
            raise _TooManyOverlapsError
        holder = min(self._owners[low:high], default=None)
        gaps = list(zip([start, *self._ends[low:high]], [*self._starts[low:high], end], strict=True))
        fresh = 0
        for place, (gap, gap_end) in reversed(list(enumerate(gaps, low))):
            if gap_end > gap:
                fresh += gap_end - gap
                self._starts.insert(place, gap)
                self._ends.insert(place, gap_end)
                self._owners.insert(place, owner)
        return fresh, holder
