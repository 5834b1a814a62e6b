"""Who needs which bytes of a storage: ties and views are given out once, and what no tensor covers is laid open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memsize.checkpoint.record import Storage, Tensor
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


def strided_extent(shape: Sequence[int], stride: Sequence[int], bits: int) -> tuple[int, int]:
    """The bytes that a strided tensor spans, and those of its distinct elements (expanded dimensions count once)."""
    if 0 in shape:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    distinct = math.prod(size for size, step in zip(shape, stride, strict=True) if step)
    span = (last + 1) * bits + 7 >> 3
    return span, min(span, distinct * bits + 7 >> 3)


def given_out(pieces: Sequence[Piece], storages: Sequence[Storage]) -> tuple[tuple[Tensor, ...], tuple[Storage, ...]]:
    """The tensors with the bytes that each has of its own, and the storages with what no tensor covers.

    Of a storage's tensors the first gets what it covers, a later one what is left for it. Views with gaps are counted
    by their elements; where they lie in each other's gaps the sum is exact, where they overlap it is never too small
    and never more than what they span together.
    """
    holders: dict[int, list[int]] = {}
    for place, piece in enumerate(pieces):
        if piece.storage is not None:
            holders.setdefault(piece.storage, []).append(place)
    owned = [0] * len(pieces)
    first: list[int | None] = [None] * len(pieces)
    unneeded = [storage.bytes for storage in storages]
    rest = [0] * len(pieces)
    for index, places in holders.items():
        _share([pieces[place] for place in places], places, owned, first)
        unneeded[index] = max(0, storages[index].bytes - sum(owned[place] for place in places))
        rest[places[0]] = unneeded[index]
    tensors = tuple(
        _tensor(piece, owned[place], rest[place], None if (held := first[place]) is None else _name(pieces[held]))
        for place, piece in enumerate(pieces)
    )
    return tensors, tuple(replace(s, unneeded=left) if left else s for s, left in zip(storages, unneeded, strict=True))


def _share(pieces: list[Piece], places: list[int], owned: list[int], first: list[int | None]) -> None:
    """Give the bytes of one storage to its `pieces`, which stand at `places` of `owned` and `first`."""
    if len(pieces) == 1:
        owned[places[0]] = pieces[0].needed
        return
    gapless = all(piece.needed == piece.span for piece in pieces)
    covered = _Cover()
    room = covered.total_of(pieces)
    seen: dict[object, int] = {}
    for piece, place in zip(pieces, places, strict=True):
        if gapless:
            owned[place] = covered.add(piece.start, piece.start + piece.span)
        else:
            same = (piece.start, piece.span, piece.spec.shape, piece.needed)
            owned[place] = 0 if same in seen else min(piece.needed, room)
            seen.setdefault(same, place)
            room -= owned[place]
        if piece.needed and not owned[place]:
            first[place] = _holder(piece, pieces, places, place)


def _holder(piece: Piece, pieces: list[Piece], places: list[int], place: int) -> int:
    """The first tensor whose bytes meet those of `piece`."""
    start, end = piece.start, piece.start + piece.span
    for other, other_place in zip(pieces, places, strict=True):
        if other_place == place:
            break
        if other.start < end and start < other.start + other.span:
            return other_place
    return places[0]


class _Cover:
    """Which bytes of a storage are given out already: disjoint intervals in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> int:
        """Cover ``[start, end)`` too; returns how many of its bytes were not covered before."""
        from bisect import bisect_left, bisect_right

        if end <= start:
            return 0
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        old = sum(self._ends[i] - self._starts[i] for i in range(low, high))
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        return end - start - old

    @staticmethod
    def total_of(pieces: Sequence[Piece]) -> int:
        """The bytes that `pieces` span together."""
        cover = _Cover()
        return sum(cover.add(piece.start, piece.start + piece.span) for piece in pieces)


def _name(piece: Piece) -> str:
    return ".".join(piece.keys)


def _tensor(piece: Piece, owned: int, rest: int, shared_with: str | None) -> Tensor:
    return Tensor(
        name=_name(piece),
        keys=piece.keys,
        spec=piece.spec,
        elements=piece.elements,
        storage=piece.storage,
        bytes=owned,
        unneeded=rest,
        shared_with=shared_with,
        wrapper=piece.wrapper,
        trainable=piece.trainable,
    )
