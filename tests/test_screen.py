"""What a terminal gets of an answer: as much as its height has room for, colours where it takes them, wide names."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace

import pytest
from rich.cells import cell_len

from memsize import Finding, Report
from memsize.documents import document
from memsize.documents.sections import Findings, Table, Verdict, without_repeats
from memsize.render import render
from memsize.units import Bytes, unit_for
from tests import records
from tests.pages import GOLDEN, MARKS
from tests.process import Color, destination, output
from tests.records import Column, Label, Path, Signed, _table, draw_cell, shorten


def shown(report: Report, height: int, width: int = 80) -> list[str]:
    return render(report, "text", width=width, height=height).splitlines()


def test_the_opening_is_shown_however_low_the_screen_is() -> None:
    drawn = shown(records.toy_report(), 5)
    assert drawn[0].startswith("model.py:Test") and "fp16 halves what is stored, 35.19 MiB → 17.59 MiB." in drawn
    assert drawn[-1] == "More with --full: bars, layers, scenarios, 2 findings"


@pytest.mark.parametrize("height", range(18, 60, 3))
@pytest.mark.parametrize("width", [80, 120, 240])
def test_no_more_is_shown_than_the_screen_has_room_for(height: int, width: int) -> None:
    report = records.toy_report()
    drawn, whole = shown(report, height, width), render(report, "text", width=width).splitlines()
    assert len(drawn) <= height - 2
    assert drawn == whole or drawn[-1].startswith("More with --full: ")
    assert drawn == whole or len(whole) > height - 2


@pytest.mark.parametrize("height", range(20, 40))
def test_bars_are_shortened_before_they_are_left_out(height: int) -> None:
    drawn = shown(records.toy_report(), height)
    assert any(line.startswith("fp32 ") for line in drawn) and any(line.startswith("fp16 ") for line in drawn)
    assert ("bars," in drawn[-1]) != any(line.startswith("int8-weight  █") for line in drawn)


@pytest.mark.parametrize("width", range(20, 60))
def test_no_line_ends_between_a_number_and_its_unit(width: int) -> None:
    finding = Finding(
        "x", "It needs {a}, {b} more than the {c} of the GPU.", dict(zip("abc", map(Bytes, SIZES), strict=True))
    )
    report = replace(records.toy_report(), findings=(finding,))
    lines = render(report, "text", width=width, height=80).splitlines()
    assert not any(re.match(r"[KMG]iB\b", line.strip()) for line in lines[1:] if "needs" not in line)


SIZES = (50 << 30, 11 << 30, 39 << 30)


def test_a_deep_layer_table_is_shown_less_deep() -> None:
    report = records.deep_report()
    whole = render(report, "text", width=120).splitlines()
    drawn = shown(report, len(whole) + 1, 120)
    assert any(line.startswith("total") for line in drawn) and "layers" in drawn[-1]
    one, other = ([line.split() for line in lines if line.startswith("total")] for lines in (drawn, whole))
    assert one == other


@pytest.mark.parametrize("name", ["toy", "deep", "structures"])
def test_the_layers_that_matter_are_on_every_screen_with_their_total(name: str) -> None:
    report = getattr(records, f"{name}_report")()
    drawn = shown(report, 24)
    title = next(n for n, line in enumerate(drawn) if line.startswith("layer "))
    total = next(n for n, line in enumerate(drawn) if line.startswith("total "))
    assert total - title >= 4 and not drawn[0].startswith("  ")


def test_rows_that_are_left_out_of_the_layer_table_are_added_up() -> None:
    report = records.toy_report()
    table = document(report).sections()[3]
    assert isinstance(table, Table) and table.name == "layers"
    for short in (version for version in document(report).shorter(table) if isinstance(version, Table)):
        columns = zip(short.keys, short.total or (), *short.rows, strict=True)
        sums = {key: (total, sum(map(int, cells))) for key, total, *cells in columns if isinstance(total, int)}
        assert len(sums) == 5 and all(total == added for total, added in sums.values())
    assert [row[0] for row in short.rows] == [Path("conv"), Label("1 other")]  # it holds most


@pytest.mark.parametrize("height", range(12, 36))
def test_a_verdict_is_as_long_as_the_screen_has_room_for(height: int) -> None:
    report = records.toy_report()
    (verdict,) = (section for section in document(report).sections() if isinstance(section, Verdict))
    drawn = shown(report, height)
    assert len(drawn) <= height - 2
    sentences = [textwrap.wrap(finding.in_brief(), 80) for finding in verdict.findings]
    count = next(n for n, lines in enumerate([*sentences, ["…"]]) if lines[0] not in drawn)
    assert count == len(sentences) or len(drawn) + len(sentences[count]) > height - 2


def test_why_has_only_what_the_verdict_has_not() -> None:
    whole, longer, other = Finding("a", "A.", brief="A."), Finding("b", "B. C.", brief="B."), Finding("d", "D and E.")
    sections = (Verdict((whole, longer, replace(other, brief="D."))), Findings("Why", (whole, longer, other)))
    *_, why = without_repeats(sections)
    assert isinstance(why, Findings) and [finding.text() for finding in why.findings] == ["C.", "D and E."]
    assert without_repeats((Verdict((whole,)), Findings("Why", (whole,)))) == (Verdict((whole,)),)


def test_json_is_whole_on_any_screen() -> None:
    report = records.toy_report()
    assert json.loads(render(report, "json", height=5)) == json.loads(render(report, "json"))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NO_COLOR", "FORCE_COLOR", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "color", "wanted"),
    [
        ({}, "auto", True),
        ({"NO_COLOR": "1"}, "auto", False),
        ({"NO_COLOR": ""}, "auto", True),  # no-color.org: when it is not an empty string
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", False),
        ({"TERM": "dumb"}, "auto", False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, "auto", True),
        ({"NO_COLOR": "1"}, "always", True),
        ({}, "never", False),
    ],
)
def test_colours_where_they_are_wanted(
    terminal: pytest.MonkeyPatch, variables: dict[str, str], color: Color, wanted: bool
) -> None:
    for name, value in variables.items():
        terminal.setenv(name, value)
    assert destination(None, None, False, color=color).colour is wanted
    assert not destination(None, "json", False, color="always").colour


def test_a_pipe_gets_everything_and_no_colours(terminal: pytest.MonkeyPatch) -> None:
    terminal.setattr(output.sys.stdout, "isatty", lambda: False)
    piped = destination(None, None, False)
    assert not piped.colour and piped.height is None and piped.width is None
    terminal.setenv("FORCE_COLOR", "1")
    assert destination(None, None, False).colour


def test_full_and_what_is_chosen_need_no_room(terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("LINES", "10")
    terminal.setenv("COLUMNS", "80")
    report = records.toy_report()
    assert destination(None, None, False).height == 10
    assert destination(None, None, False, full=True).height is None
    low = replace(destination(None, None, False), colour=False)
    assert "--full" in "".join(low.drawn(report, depth=None))
    assert "--full" not in "".join(low.drawn(report, depth=1))


def test_coloured_text_says_the_same() -> None:
    for report in (records.toy_report(), records.failing_report()):
        plain = render(report, "text", width=100)
        coloured = render(report, "text", width=100, colour=True)
        assert "\x1b[1m" in coloured
        bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
        assert re.sub(MARKS, "#", bare) == re.sub(MARKS, "#", plain)


@pytest.mark.parametrize(("width", "short"), [(6, "層層層"), (5, "層層…"), (4, "層…")])
def test_wide_texts_are_cut_between_characters(width: int, short: str) -> None:
    assert shorten("層層層", width) == short and cell_len(short) <= width


def drawn_at(width: int, table: Table) -> str:
    return " ".join(" ".join(line.plain for line in _table(table, "MiB", width)).split())


def test_columns_stand_below_each_other_whatever_the_names() -> None:
    columns = (Column("layer", "layer", "name", 100), Column("stored", "stored", "bytes", 90))
    names = ("conv", "畳み込み層", "e\u0301tage", "\uff57")
    rows = tuple((Path(name), Bytes(2**20)) for name in names)
    drawn = [*_table(Table("t", "T", columns, rows), "MiB", 40)]
    assert {line.cell_len for line in drawn[-4:]} == {drawn[-5].cell_len} == {10 + 2 + 6}


def test_a_size_is_never_drawn_as_nothing() -> None:
    mib, exact = unit_for(2**20), unit_for(2**20, "MiB")
    drawn = [draw_cell(Bytes(size), mib) for size in (0, 4, 512, 5_242, 5_243)]  # 0.01 MiB is 10,485.76 B
    assert drawn == ["0", "4 B", "0.50 KiB", "5.12 KiB", "0.01"]
    assert draw_cell(Bytes(4), exact) == "0.00"


def test_a_difference_is_never_drawn_as_nothing() -> None:
    mib = unit_for(2**20)
    drawn = [draw_cell(Signed(size), mib) for size in (400, -400, 2**20, -(2**19), 0)]
    assert drawn == ["+0.39 KiB", "−0.39 KiB", "+1.00", "−0.50", "0"]
    # A unit that was chosen is kept.
    assert draw_cell(Signed(400), unit_for(2**20, "MiB")) == "+0.00"


def test_a_column_goes_with_the_one_that_it_belongs_to() -> None:
    columns = (
        Column("name", "name", "name", 100),
        Column("low", "device from", "bytes", 50),
        Column("high", "to", "bytes", 50, beside="low"),
        Column("in", "in", "text", 90),
    )
    row = (Path("a"), Bytes(2**30), Bytes(2**31), "backward")
    drawn = drawn_at(24, Table("t", "T", columns, (row,)))
    assert "Hidden at this width: device from … to." in drawn


def test_what_is_left_out_is_called_by_a_name_that_stands_alone() -> None:
    columns = (
        Column("name", "name", "name", 100),
        Column("peak", "peak", "bytes", 90),
        Column("phase", "in", "text", 60, alone="phase"),
        Column("stored", "stored", "bytes", 50),
        Column("share", "% of all", "share", 10),
    )
    row = (Path("a"), Bytes(2**30), "backward", Bytes(2**31), 0.5)
    narrow, wide = (drawn_at(width, Table("t", "T", columns, (row,))) for width in (16, 36))
    # A share of a figure that is left out goes without saying.
    assert "Hidden at this width: phase, stored." in narrow
    assert "Hidden at this width: percentages of stored." in wide


@pytest.mark.parametrize("name", ["checkpoint", "explain", "layout", "run", "sweep"])
def test_no_reason_begins_as_the_verdict_does(name: str) -> None:
    """A finding's full text begins with its brief form, so that what follows can stand alone below the verdict."""
    data = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    full = [(finding["code"], finding["text"]) for finding in data["findings"]]
    codes = {code for code, _ in full}
    briefs = [(brief["code"], brief["text"]) for brief in data["verdict"] if brief["code"] in codes]
    assert briefs and all(any((code, text[: len(brief)]) == (of, brief) for code, text in full) for of, brief in briefs)


def test_a_line_keeps_its_number() -> None:
    """Of a place in the code, the number matters most."""
    columns = (Column("line", "made at", "text", 99), Column("size", "size", "bytes", 100))
    rows = (("train_for_a_long_time.py:127", Bytes(2**20)),)
    assert "train_fo…:127" in str([*_table(Table("t", "T", columns, rows), "MiB", 19)][-1])
