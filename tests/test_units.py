"""Bytes in text: in the unit that suits them, or in the one that the reader chose."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize.documents.sections import Strip
from memsize.units import (
    AUTO,
    DECIMAL,
    UNITS,
    GiB,
    MiB,
    format_bytes,
    format_span,
    format_together,
    parse_bytes,
    signed_share,
    unit_for,
)
from tests.records import Interval, draw_strip


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (0, "MiB", "0 MiB"),
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
        (2**30 - 1, AUTO, "1,024.00 MiB"),
        (2**30, AUTO, "1.00 GiB"),
        (10_725_883_904, AUTO, "9.99 GiB"),  # 9.98926
        (10_737_418_239, AUTO, "10.0 GiB"),
        (80_358 * 2**20, AUTO, "78.5 GiB"),  # 78.475
        (99_949 * GiB // 1000, AUTO, "99.9 GiB"),
        (99_951 * GiB // 1000, AUTO, "100 GiB"),
        (1_463 * GiB, AUTO, "1,463 GiB"),
        (80_358 * 2**20, "GiB", "78.47 GiB"),
        (9_640, AUTO, "9.41 KiB"),
    ],
)
def test_bytes_in_prose(count: int, unit: str, text: str) -> None:
    assert format_bytes(count, unit) == text


@given(st.integers(0, 2**50), st.sampled_from([AUTO, *sorted(UNITS | DECIMAL)]))
def test_what_is_told_is_close(count: int, unit: str) -> None:
    """Rounding to two decimals of at least a tenth of the unit is off by a twentieth at most."""
    assert abs(parse_bytes(format_bytes(count, unit).replace(",", "")) - count) <= count / 20


def test_a_column_has_one_unit() -> None:
    assert [unit_for(9, "MiB").amount(count) for count in (0, 1, 5_243, 2**20)] == ["0", "0.00", "0.01", "1.00"]
    assert unit_for(9, "B").amount(1_234) == "1,234"
    column = (50 * MiB, GiB // 2, 48 * GiB, 640 * GiB)
    assert unit_for(max(column)).name == "GiB"
    assert [unit_for(max(column)).amount(count) for count in column] == ["0.05", "0.50", "48.0", "640"]
    assert [unit_for(size).name for size in (0, 102, 2**10, 2**20 // 10 + 1, GiB - 1)] == "MiB B KiB MiB MiB".split()


def test_a_change_is_a_share_of_what_was() -> None:
    changes = ((200, 100), (200, 300), (200, 200), (200, 372), (0, 5))
    shares = ["−50.0%", "+50.0%", "+0.0%", "+86.0%", "from nothing"]
    assert [signed_share(before, after) for before, after in changes] == shares


def test_sizes_of_one_sentence_compare() -> None:
    """A tenth of a GiB is 107,374,182.4 bytes. 14,596.00 MiB and 14,596.44 MiB are both 14.25 GiB."""
    texts = format_together([340 * MiB, 14_909 * MiB, 107_374_182, 9_640])
    assert [*texts.values()] == ["0.33 GiB", "14.6 GiB", "102.40 MiB", "9.41 KiB"]
    assert [*format_together([14_546 * MiB, 14_596 * MiB, 14_630 * MiB]).values()] == [
        "14.21 GiB",
        "14.25 GiB",
        "14.29 GiB",
    ]
    assert format_together([3 * MiB, 5]) == {3 * MiB: "3.00 MiB", 5: "5 B"}
    assert format_together([14_546 * MiB], "MiB") == {14_546 * MiB: "14,546.00 MiB"}
    assert format_together([]) == {}


def test_the_ends_of_an_interval_share_a_unit() -> None:
    assert format_span(98 * MiB, 249 * MiB) == "98.00 to 249.00 MiB"
    assert format_span(98 * MiB, 249 * MiB, beside=14_909 * MiB) == "0.10 to 0.24 GiB"
    assert format_span(14_931 * MiB, 14_976 * MiB) == "14.58 to 14.62 GiB"  # 14.6 both, with three digits
    assert format_span(GiB, GiB) == "1.00 GiB"
    assert format_span(98 * MiB, 2 * GiB, "MB") == "102.76 to 2,147.48 MB"


def test_the_ways_to_count_a_peak_share_a_unit_which_the_gpu_need_not() -> None:
    """Weights of 96 MiB and a cuBLAS workspace of 8.1, up to PyTorch 2.11 one of cuBLASLt too: the allocator's segments
    are MiB too, and the T4 has GiB, in which nvidia-smi's figures are as well.
    """
    report = memsize.report(nn.Linear(1024, 24 * 1024), input_size=(1024,), gpu="t4", scenarios=["fp32"])
    peak = r"tensors 10[45]\.\d+ → allocated 10[45]\.\d+ → reserved \d+\.00 MiB → nvidia-smi 0\.\d+–0\.\d+ of 14\.6 GiB"
    assert re.search(peak, str(report).replace("\n", " "))


def test_a_strip_never_falls() -> None:
    """Where the workspaces of convolutions are estimates, a GPU may show less than what is reserved with them: 1.73 to
    3.82 GiB beside 2.42 reserved. A strip that read "reserved 2.42 → nvidia-smi 1.73" would look wrong.
    """

    def strip(low: float) -> str:
        peak = Strip.of_peak(GiB, GiB, int(2.42 * GiB), Interval(int(low * GiB), int(3.82 * GiB)), 14 * GiB)
        return draw_strip(peak, "auto")

    assert strip(1.73) == "tensors 1.00 → allocated 1.00 → reserved 2.42 → nvidia-smi up to 3.82 of 14.0 GiB"
    assert strip(2.52) == "tensors 1.00 → allocated 1.00 → reserved 2.42 → nvidia-smi 2.52–3.82 of 14.0 GiB"


def test_a_strip_beyond_the_gpu_still_names_all_of_it() -> None:
    strip = Strip.of_peak(3 * GiB, 3 * GiB, 4 * GiB, Interval(5 * GiB, 6 * GiB), 2 * GiB)
    assert (
        draw_strip(strip, "auto") == "tensors 3.00 → allocated 3.00 → reserved 4.00 → nvidia-smi 5.00–6.00 of 2.00 GiB"
    )
