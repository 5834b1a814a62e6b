"""Bars as text: what is drawn of hand-made ones, and that every line fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from memsize.documents.sections import Bar, Bars, Limit, Part
from memsize.render.bars import LEAST, lines
from memsize.render.screen import painted
from memsize.units import MiB
from tests.records import ROLES, Label

TWO = Bars(
    "held",
    (Part("parameter", "parameters", "parameter"), Part("kept", "kept for backward", "activation")),
    (Bar((Label("fp32"),), (30 * MiB, 10 * MiB)), Bar((Label("fp16"), Label("bf16")), (15 * MiB, 5 * MiB))),
)


def test_parts_add_up_in_each_row_and_in_its_bar() -> None:
    # 80 columns: 10 for names, 12 and 10 for figures, 5 for totals and four gaps of 2 leave 35 for 40 MiB.
    assert list(lines(TWO, "MiB", 80)) == [
        "                          ░ kept for",
        "held, MiB   █ parameters    backward",
        "fp32               30.00       10.00  ██████████████████████████░░░░░░░░░  40.00",
        "fp16, bf16         15.00        5.00  █████████████░░░░░                   20.00",
    ]


def test_a_limit_that_is_near_is_marked() -> None:
    *rows, last = lines(replace(TWO, limit=Limit("T4", 30 * MiB)), "MiB", 80)
    assert last == "┃ T4: 30.00 MiB"
    assert {row.index("┃") for row in rows[2:]} == {38 + 26}  # 35 characters are 40 MiB: 30 are 26.25
    # A limit that is far away would leave the bars no room: it is named alone.
    far = [*lines(replace(TWO, limit=Limit("A100", 81 * MiB)), "MiB", 80)]
    assert not any("┃" in row for row in far)
    assert far[-1] == "A100: 81.00 MiB, of which the longest bar is 49.4%"  # 40 of 81


def test_a_part_without_room_for_its_figures_shares_a_column() -> None:
    parts = tuple(Part(role, role, role) for role in ROLES)
    bars = Bars("peak", parts, (Bar((Label("fp32"),), tuple(n * MiB for n in range(1, len(parts) + 1))),))
    drawn = list(lines(bars, "MiB", 80))
    place = next(place for place, line in enumerate(drawn) if line.startswith("fp32"))
    title, row, key = drawn[place - 1], drawn[place], "  ".join(drawn[place + 1 :])
    assert "other" in title and row.split()[-1] == "120.00"  # 1 + 2 + … + 15
    figures = [float(word) for word in row.split()[1:-2]]
    assert sum(figures) == 120 and figures == sorted(figures[:-1]) + figures[-1:]
    # What shares the column keeps its mark, but for 1 and 2 of 120, which are below a fiftieth.
    named = set(re.findall(r"\S (\w[\w ]*?)(?=  |$)", key.removeprefix("other:")))
    assert named == {*ROLES[2 : 15 - len(figures[:-1])]}


def test_the_smallest_part_makes_room_for_the_others() -> None:
    names = ("parameters", "cast copies", "kept for backward", "inputs")
    parts = tuple(Part(role, title, role) for role, title in zip(ROLES, names, strict=False))
    amp = Bar((Label("amp-fp16"), Label("amp-bf16")), (35 * MiB, 18 * MiB, 12 * MiB, MiB // 20))
    *titles, row = lines(Bars("held when backward begins", parts, (amp,)), "MiB", 80)
    # 18 for names, 12, 8, 10 and 7 for figures, 5 for the total and six gaps of 2 leave 8 to 10 for the bar.
    assert row == "amp-fp16, amp-bf16         35.00   18.00       12.00     0.05  █████░░░▒▒  65.05"
    assert len(row) == 80 and titles[-1].split()[-4:] == ["copies", "backward", "·", "other"]


def test_without_room_for_figures_a_key_says_what_is_what() -> None:
    assert list(lines(TWO, "MiB", 34)) == [
        "held, MiB",
        "fp32        ███████████░░░░  40.00",
        "fp16, bf16  ██████░░         20.00",
        "█ parameters  ░ kept for backward",
    ]


def test_bars_of_one_part_each_need_no_figures() -> None:
    bars = Bars.of_whole("in the file", [(Part("a", "a", "parameter"), 3 * MiB), (Part("b", "b", "buffer"), MiB)])
    assert list(lines(replace(bars, kind="count"), "MiB", 40)) == [
        "in the file",
        f"a            {'█' * 16}  3,145,728",
        f"b            {'█' * 5}{' ' * 11}  1,048,576",
    ]


def test_many_names_are_counted() -> None:
    bar = replace(TWO.bars[0], labels=tuple(Label(f"scenario-{n}") for n in range(5)))
    *_, row = lines(replace(TWO, bars=(bar,)), "MiB", 80)
    assert row.startswith("scenario-0 +4")


def test_names_are_whole_where_nothing_else_needs_the_room() -> None:
    name = "bf16 on 1 x H100 80GB (fsdp=1)"
    plain = Bars("largest batch", (Part("batch", "batch", "parameter"),), (Bar((Label(name),), (418,)),), kind="count")
    # Two fifths of 75 columns are its 30 letters; with figures beside it a name has 22.
    assert next(line for line in lines(plain, "MiB", 75) if "█" in line).startswith(f"{name}  █")
    assert next(line for line in lines(plain, "MiB", 74) if "█" in line).startswith("bf16 on 1 x H100 80G…(fsdp=1)  █")
    parted = replace(TWO, bars=(replace(TWO.bars[0], labels=(Label(name),)), TWO.bars[1]))
    assert any(line.startswith("bf16 on 1 x H…(fsdp=1)  ") for line in lines(parted, "MiB", 100))


SIZES = st.lists(st.integers(0, 2**40), min_size=len(ROLES), max_size=len(ROLES))


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(60, 240), st.sampled_from(["MiB", "GiB"]))
def test_every_line_fits(rows: list[list[int]], width: int, unit: str) -> None:
    parts = [Part(role, role, role) for role in ROLES]
    sizes = [(Label(f"scenario {n}"), dict(zip(ROLES, row, strict=True))) for n, row in enumerate(rows)]
    bars = Bars.of("peak of a training step", parts, sizes)
    assert all(len(line) <= width for line in lines(bars, unit, width))


@pytest.mark.parametrize("width", [None, 200])
def test_with_room_every_part_has_its_figures(width: int | None) -> None:
    drawn = list(lines(TWO, "MiB", width))
    assert LEAST <= drawn[-2].count("█") + drawn[-2].count("░") <= 60
    assert "other" not in "".join(drawn)


@pytest.mark.parametrize("width", [40, 400])
def test_every_role_has_a_mark_of_its_own(width: int) -> None:
    parts = tuple(Part(role, role, role) for role in ROLES)
    drawn = "\n".join(lines(Bars("peak", parts, (Bar((Label("fp32"),), (MiB,) * len(ROLES)),)), "MiB", width))
    marks = [match[0] for role in ROLES for match in [re.search(rf"\S(?= {role.split()[0]}\b)", drawn)] if match]
    assert len(marks) == len(set(marks)) == len(ROLES)


def test_colours_are_those_of_roles() -> None:
    drawn = painted("\n".join(lines(TWO, "MiB", 80, colour=True)))
    blue, orange = (re.search(rf"(\x1b\[38;5;\d+m)█\x1b\[0m {title}", drawn) for title in ("param", "kept"))
    assert blue and orange and blue[1] != orange[1]
    bar = drawn.splitlines()[2]
    assert f"{blue[1]}{'█' * 26}\x1b[0m{orange[1]}{'█' * 9}\x1b[0m" in bar
    assert re.sub(r"\x1b\[[0-9;]*m", "", bar) == [*lines(TWO, "MiB", 80)][2].replace("░", "█")


def test_what_is_shown_cannot_colour_itself() -> None:
    odd = replace(TWO, bars=(Bar((Label("\x1b[31m\ue001red\ue0ff"),), (MiB, MiB)),))
    drawn = painted("\n".join(lines(odd, "MiB", 80, colour=True)))
    assert "\x1b[31m" not in drawn and "\\x1b[31m\\ue00…ed\\ue0ff" in drawn
