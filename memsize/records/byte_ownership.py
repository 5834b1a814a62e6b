"""Ownership of the bytes of storages by tensors, so that ties and views are counted once.

A byte belongs to the first tensor that covers it. A later tensor owns the rest of its extent, and bytes that no tensor
covers are reported with the first tensor of the storage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """The bytes ``[start, end)`` that a tensor spans of a storage of `total` bytes.

    Its elements take `needed` of them: fewer than the span where the strides leave gaps, as in a column of a matrix.
    Extents with gaps are taken for the same elements where all else, `shape` included, is equal.
    """

    storage: Hashable
    start: int
    end: int
    total: int
    needed: int
    shape: tuple[int | None, ...] = ()


class Ownership(NamedTuple):
    """The bytes of a storage that one extent owns.

    `owned` bytes belong to no earlier extent. `uncovered` are the bytes of the storage that no extent covers, counted
    with its first extent. `shared_with` is the index of the earliest extent that has bytes of this one, where this one
    owns none; None otherwise.
    """

    owned: int
    uncovered: int = 0
    shared_with: int | None = None


def strided_extent(shape: Sequence[int], stride: Sequence[int], bits: int) -> tuple[int, int]:
    """The bytes that a strided tensor of `bits` per element spans, and those of its distinct elements.

    Expanded dimensions (stride 0) count once.
    """
    if 0 in shape:
        return 0, 0
    last, distinct = 0, 1
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
        distinct *= size if step else 1
    span = (last + 1) * bits + 7 >> 3
    return span, min(span, distinct * bits + 7 >> 3)


def own_bytes(extents: Sequence[Extent], spend: Callable[[int], object] | None = None) -> list[Ownership]:
    """Assign the bytes of every storage to `extents`, in their order.

    Without gaps, the bytes owned add up to the union of the extents. Extents with gaps are counted by their elements:
    the sum is exact where they lie in each other's gaps; where they overlap, it is between the union of their elements
    and the bytes that they span together. `spend` is called with the number of ranges compared, before each extent
    of a shared storage; it may raise to bound the work, which is quadratic for views that all overlap.
    """
    by_storage: dict[Hashable, list[int]] = {}
    for index, extent in enumerate(extents):
        by_storage.setdefault(extent.storage, []).append(index)
    ownership = [Ownership(extent.needed, extent.total - extent.needed) for extent in extents]
    for indices in by_storage.values():
        if len(indices) > 1:
            for index, share in zip(indices, _share(extents, indices, spend), strict=True):
                ownership[index] = share
    return ownership


def _share(extents: Sequence[Extent], indices: Sequence[int], spend: Callable[[int], object] | None) -> list[Ownership]:
    """Assign the bytes of one storage to the extents at `indices`."""
    cover = _Cover(spend)
    covered = [cover.add(extents[index].start, extents[index].end, index) for index in indices]
    gapless = all(extents[index].needed == extents[index].end - extents[index].start for index in indices)
    room = sum(fresh for fresh, _ in covered)
    seen: set[Extent] = set()
    shares: list[Ownership] = []
    for index, (fresh, owner) in zip(indices, covered, strict=True):
        extent = extents[index]
        owned = fresh
        if not gapless:
            owned = 0 if extent in seen else min(extent.needed, room)
            seen.add(extent)
            room -= owned
        shared = extent.needed > 0 and owned == 0
        shares.append(Ownership(owned, 0, (indices[0] if owner is None else owner) if shared else None))
    uncovered = max(0, extents[indices[0]].total - sum(share.owned for share in shares))
    return [shares[0]._replace(uncovered=uncovered), *shares[1:]]


class _Cover:
    """The covered bytes of a storage: disjoint ranges in order, each with the extent that covered it first."""

    def __init__(self, spend: Callable[[int], object] | None) -> None:
        self._spend = spend
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[int] = []

    def add(self, start: int, end: int, owner: int) -> tuple[int, int | None]:
        """Cover ``[start, end)``; return how many of its bytes are new, and the earliest owner of the others."""
        if end <= start:
            return 0, None
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if self._spend is not None:
            self._spend(high - low)
        earliest = min(self._owners[low:high], default=None)
        gaps = list(zip([start, *self._ends[low:high]], [*self._starts[low:high], end], strict=True))
        fresh = 0
        for position, (gap, gap_end) in reversed(list(enumerate(gaps, low))):
            if gap_end > gap:
                fresh += gap_end - gap
                self._starts.insert(position, gap)
                self._ends.insert(position, gap_end)
                self._owners.insert(position, owner)
        return fresh, earliest
