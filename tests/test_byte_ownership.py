"""The bytes that tensors own of a storage: each byte once, whatever the order, and symmetrically."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tests.models import stored_tensors
from tests.records import Extent, Ownership, own_bytes, strided_extent

TOTAL = 60


@st.composite
def extents(draw: st.DrawFn, gaps: bool = False) -> Extent:
    start = draw(st.integers(0, TOTAL))
    end = draw(st.integers(start, TOTAL))
    needed = draw(st.integers(min(1, end - start), end - start)) if gaps else end - start
    return Extent(draw(st.sampled_from("ab")), start, end, TOTAL, needed)


def union(drawn: list[Extent], storage: object) -> set[int]:
    """The bytes of a storage that some extent spans, counted one by one."""
    return {byte for extent in drawn if extent.storage == storage for byte in range(extent.start, extent.end)}


@given(st.lists(extents(), max_size=8))
def test_owned_bytes_add_up_to_the_union(drawn: list[Extent]) -> None:
    shares = own_bytes(drawn)
    for storage in {extent.storage for extent in drawn}:
        parts = [share for extent, share in zip(drawn, shares, strict=True) if extent.storage == storage]
        assert sum(part.owned for part in parts) == len(union(drawn, storage))
        assert sum(part.owned + part.uncovered for part in parts) == TOTAL
        assert not any(part.uncovered for part in parts[1:])


@given(st.lists(extents(), max_size=4))
def test_the_order_changes_who_owns_a_byte_and_not_how_many_are_owned(drawn: list[Extent]) -> None:
    sums = {sum(share.owned for share in own_bytes(list(order))) for order in permutations(drawn)}
    assert len(sums) == 1


@given(extents(), extents())
def test_sharing_is_symmetric(one: Extent, other: Extent) -> None:
    (_, second), (_, first) = own_bytes([one, other]), own_bytes([other, one])
    assert (
        other.needed - second.owned
        == one.needed - first.owned
        == len(union([one], one.storage) & union([other], one.storage))
    )


@given(st.lists(extents(gaps=True), max_size=8))
def test_elements_with_gaps_are_never_more_than_their_spans(drawn: list[Extent]) -> None:
    shares = own_bytes(drawn)
    for storage in {extent.storage for extent in drawn}:
        owned = sum(s.owned for extent, s in zip(drawn, shares, strict=True) if extent.storage == storage)
        most = max(extent.needed for extent in drawn if extent.storage == storage)
        assert most <= owned <= len(union(drawn, storage))


@given(st.lists(extents(gaps=True), max_size=8))
def test_an_extent_without_bytes_of_its_own_names_an_earlier_owner(drawn: list[Extent]) -> None:
    for index, (extent, share) in enumerate(zip(drawn, own_bytes(drawn), strict=True)):
        assert (share.shared_with is not None) == (extent.needed > 0 and share.owned == 0)
        if share.shared_with is not None:
            assert share.shared_with < index
            assert drawn[share.shared_with].storage == extent.storage


def test_columns_of_a_matrix_lie_in_each_others_gaps() -> None:
    # float32[4,2]: each column spans 7 of 8 elements and needs 4
    span, needed = strided_extent((4,), (2,), 32)
    assert (span, needed) == (28, 16)
    columns = [Extent("s", start, start + span, 32, needed, (4,)) for start in (0, 4)]
    assert own_bytes(columns) == [Ownership(16), Ownership(16)]


def test_work_is_bounded_by_the_caller() -> None:
    class OutOfBudgetError(Exception):
        pass

    def spend(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            raise OutOfBudgetError

    left = 10
    views = [Extent("s", 2 * index, 2 * index + 1, TOTAL, 1) for index in range(8)]
    own_bytes(views, spend)
    with pytest.raises(OutOfBudgetError):
        own_bytes([*views, *(Extent("s", 0, TOTAL, TOTAL, TOTAL) for _ in range(3))], spend)


def test_a_view_is_tied_to_the_tensor_that_has_its_bytes() -> None:
    flat = torch.zeros(30)
    model = nn.Module()
    model.query, model.key, model.alias = (nn.Parameter(flat[at : at + 10]) for at in (0, 10, 10))
    assert [(row.name, row.bytes, row.tied_to) for row in stored_tensors(model)] == [
        ("query", 80, None),  # and the 10 elements that no parameter covers
        ("key", 40, None),
        ("alias", 0, "key"),
    ]
