"""Bars as text: what is drawn of hand-made ones, and that every line fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from rich.text import Text

from memsize.documents.sections import Bar, Bars, Limit, Part
from memsize.render import painted
from memsize.units import AUTO, GiB, MiB
from tests.pages import bars as drawing
from tests.records import ROLES, Label

TWO = Bars(
    "held",
    (Part("parameter", "parameters", "parameter"), Part("kept", "kept for backward", "activation")),
    (Bar((Label("fp32"),), (30 * MiB, 10 * MiB)), Bar((Label("fp16"), Label("bf16")), (15 * MiB, 5 * MiB))),
)


def lines(bars: Bars, unit: str, width: int | None = None) -> Iterator[str]:
    return (line.plain for line in drawing.lines(bars, unit, width))


def test_bars_have_all_the_room_there_is() -> None:
    # 40 columns: 10 for names, 5 for totals and two gaps of 2 leave 21 for 40 MiB.
    assert list(lines(TWO, "MiB", 40)) == [
        "held, MiB",
        f"fp32        {'█' * 16}{'▒' * 5}  40.00",
        f"fp16, bf16  {'█' * 8}{'▒' * 2}{' ' * 11}  20.00",
        "█ parameters  ▒ kept for backward",
    ]
    assert list(lines(TWO, "MiB", 200))[1].count("█") == 136  # three quarters of 200 - 10 - 5 - 4


def test_a_single_bar_has_its_figures_in_the_key() -> None:
    one = replace(TWO, bars=TWO.bars[:1])
    assert [*lines(one, "MiB", 60)][-1] == "█ parameters 30.00  ▒ kept for backward 10.00"
    assert [*lines(one, "MiB", 30)][-2:] == ["█ parameters 30.00", "▒ kept for backward 10.00"]


def test_a_limit_that_is_near_is_marked() -> None:
    title, *rows, _ = lines(replace(TWO, limit=Limit("T4", 30 * MiB)), "MiB", 80)
    assert title == "held, MiB, and in % of T4 (30.00 MiB)"
    # 80 columns: 10 for names, 11 for totals and two gaps leave 55 for 40 MiB: 30 are 41.25
    assert {row.index("┃") for row in rows} == {12 + 41}
    assert [row.split()[-2:] for row in rows] == [["40.00", "133%"], ["20.00", "67%"]]
    # A limit that is far away would leave the bars no room: only shares are of it.
    title, *rows, _ = lines(replace(TWO, limit=Limit("A100", 80 * GiB)), AUTO, 80)
    assert not any("┃" in row for row in rows) and title.endswith("A100 (80.0 GiB)")
    assert rows[0].split()[-2:] == ["40.00", "0.0%"]


def test_bars_of_one_part_each_need_no_key() -> None:
    bars = Bars.of_whole("in the file", [(Part("a", "a", "parameter"), 3 * MiB), (Part("b", "b", "buffer"), MiB)])
    assert list(lines(replace(bars, kind="count"), "MiB", 40)) == [
        "in the file",
        f"a  {'█' * 26}  3,145,728",
        f"b  {'█' * 9}{' ' * 17}  1,048,576",
    ]


def test_a_part_too_small_for_a_mark_has_none() -> None:
    sizes = (40 * MiB, 1)
    *_, key = lines(replace(TWO, bars=(Bar((Label("fp32"),), sizes),) * 2), "MiB", 80)
    assert key == "█ parameters"
    # But no bar that stands for anything is empty.
    tiny = lines(replace(TWO, bars=(Bar((Label("a"),), (0, 1)), Bar((Label("b"),), (2**40, 0)))), "MiB", 80)
    assert [line.count("█") for line in tiny] == [0, 1, 63]  # 80 less a name, a size and two gaps


def test_many_names_are_counted() -> None:
    bar = replace(TWO.bars[0], labels=tuple(Label(f"scenario-{n}") for n in range(5)))
    assert [*lines(replace(TWO, bars=(bar,)), "MiB", 75)][1].startswith("scenario-0, scenario-1 +3  █")
    # A third of 60 columns has no room for two of them.
    assert [*lines(replace(TWO, bars=(bar,)), "MiB", 60)][1].startswith("scenario-0 +4  █")


def test_a_long_name_keeps_its_end() -> None:
    name = "bf16 on 1 x H100 80GB (fsdp=1)"
    plain = Bars("largest batch", (Part("batch", "batch", "parameter"),), (Bar((Label(name),), (418,)),), kind="count")
    assert [*lines(plain, "MiB", 90)][1].startswith(f"{name}  █")
    assert [*lines(plain, "MiB", 66)][1].startswith("bf16 on 1 x H…(fsdp=1)  █")


SIZES = st.lists(st.integers(0, 2**40), min_size=len(ROLES), max_size=len(ROLES))


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(60, 240), st.sampled_from(["MiB", "GiB"]))
def test_every_line_fits(rows: list[list[int]], width: int, unit: str) -> None:
    parts = [Part(role, role, role) for role in ROLES]
    sizes = [(Label(f"scenario {n}"), dict(zip(ROLES, row, strict=True))) for n, row in enumerate(rows)]
    bars = Bars.of("peak of a training step", parts, sizes)
    assert all(len(line) <= width for line in lines(bars, unit, width))


@pytest.mark.parametrize("width", [40, 400])
def test_every_role_has_a_mark_of_its_own(width: int) -> None:
    parts = tuple(Part(role, role, role) for role in ROLES)
    drawn = "\n".join(lines(Bars("peak", parts, (Bar((Label("fp32"),), (MiB,) * len(ROLES)),)), "MiB", width))
    marks = [match[0] for role in ROLES for match in [re.search(rf"\S(?= {role.split()[0]}\b)", drawn)] if match]
    assert len(marks) == len(set(marks)) == len(ROLES)


def test_colours_are_those_of_roles() -> None:
    drawn = painted(Text("\n").join(drawing.lines(TWO, "MiB", 40, colour=True)))
    blue, orange = (re.search(rf"\x1b\[(38;5;\d+)m█\x1b\[0m {title}", drawn) for title in ("param", "kept"))
    assert blue and orange and blue[1] != orange[1]
    bar = drawn.splitlines()[1]
    assert f"\x1b[{blue[1]}m{'█' * 16}\x1b[0m\x1b[{orange[1]}m{'█' * 5}\x1b[0m" in bar
    assert re.sub(r"\x1b\[[0-9;]*m", "", bar) == [*lines(TWO, "MiB", 40)][1].replace("▒", "█")


def test_what_is_shown_cannot_colour_itself() -> None:
    odd = replace(TWO, bars=(Bar((Label("\x1b[31mred[bold]"),), (MiB, MiB)),))
    drawn = painted(Text("\n").join(drawing.lines(odd, "MiB", 80, colour=True)))
    assert "\x1b[31m" not in drawn and "\\x1b[31mred[bold]" in drawn


def test_a_small_part_keeps_its_name_beside_an_empty_one_and_nothing_is_drawn_as_0() -> None:
    roles = ("baseline", "buffer"), ("now", "parameter"), ("over the limit", "gradient")
    parts = tuple(Part(name, name, role) for name, role in roles)
    bars = Bars("sizes", parts, (Bar((Label("a"),), (0, 99 * MiB, MiB)), Bar((Label("b"),), (0, 0, 0))))
    _, first, second, key = lines(bars, "MiB", 130)
    assert key == "█ now  ▓ over the limit" and first.endswith("100.00") and second.split() == ["b", "0"]


def test_a_legend_names_what_the_bars_do_not() -> None:
    """A part that nothing is drawn of, the only part, and parts that bars are named after need no explanation."""
    parts = (Part("a", "before", "input"), Part("b", "now", "parameter"), Part("c", "over", "gradient"))
    assert (
        drawing.legend(Bars("sizes", parts, (Bar((Label("x"),), (0, 3, 0)), Bar((Label("y"),), (0, 0, 4)))))
        == parts[1:]
    )
    assert drawing.legend(Bars("sizes", parts, (Bar((Label("x"),), (0, 3, 0)),))) == ()
    assert drawing.legend(Bars.of_whole("alive", [(part, 5) for part in parts])) == ()
