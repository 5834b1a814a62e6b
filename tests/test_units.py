"""Bytes in text: two decimals of a unit that says something of them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memsize.units import DECIMAL, UNITS, amount_in, format_bytes, parse_bytes, signed_share


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (0, "MiB", "0.00 MiB"),
        (36_895_604, "MiB", "35.19 MiB"),
        (36_895_604, "GiB", "35.19 MiB"),  # 0.034 GiB
        (2_410 * 4, "MiB", "9.41 KiB"),  # 9,640 / 1,024
        (105 * 1024, "MiB", "0.10 MiB"),
        (102, "MiB", "102 B"),
        (103, "MiB", "0.10 KiB"),
        (9_640, "MB", "9.64 kB"),
        (9_640, "kB", "9.64 kB"),
        (99, "KB", "99 B"),
        (3, "B", "3 B"),
    ],
)
def test_bytes_in_prose(count: int, unit: str, text: str) -> None:
    assert format_bytes(count, unit) == text


@given(st.integers(0, 2**50), st.sampled_from(sorted(UNITS | DECIMAL)))
def test_what_is_told_is_close(count: int, unit: str) -> None:
    """Rounding to two decimals of at least a tenth of the unit is off by a twentieth at most."""
    assert abs(parse_bytes(format_bytes(count, unit).replace(",", "")) - count) <= count / 20


def test_a_column_has_one_unit() -> None:
    assert [amount_in(count, "MiB") for count in (0, 1, 5_243, 2**20)] == ["0.00", "<0.01", "0.01", "1.00"]
    assert amount_in(1_234, "B") == "1,234"


def test_a_change_is_a_share_of_what_was() -> None:
    changes = ((200, 100), (200, 300), (200, 200), (200, 372), (0, 5))
    shares = ["−50.0%", "+50.0%", "+0.0%", "+86.0%", "from nothing"]
    assert [signed_share(before, after) for before, after in changes] == shares
