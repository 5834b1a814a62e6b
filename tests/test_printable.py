"""Nothing that a terminal, a spreadsheet or a browser would obey gets from a name or a message to a reader."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, strategies as st

import memsize
from memsize import CheckpointReport, Finding, cli
from memsize.cli import run
from memsize.documents import Document
from memsize.errors import CheckpointError, ForwardError, MemsizeError, UnknownInputError
from memsize.printable import LONGEST, printable, printable_lines
from memsize.records.answer import FindingList, Renderable
from memsize.render import FORMATS, render
from tests import records
from tests.checkpoints import read, text, write_zip
from tests.gpus import timeline
from tests.pages import content
from tests.process import Progress
from tests.records import FlatTable, draw_csv

# ESC starts a sequence (here a window's title), CSI and OSC do so in one character, BEL ends one; NUL, backspace,
# carriage return and tab; what turns the direction of text; a line separator; and a half of a character.
HOSTILE = "\x1b]0;x\x07\x9b31m\x9d\x00\b\r\t\u202e\u2066\u200f\u2028\ufeff\ud800\n<blink>|`"


def obeyed(shown: str) -> set[str]:
    """The characters that a reader's program would act upon; ends of lines are the layout's own, a tab is a space."""
    bad = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return bad - {"\n", "\t"}


SAVED = Path(__file__).parent / "saved"
FREE = ("path", "type", "model", "name", "reason", "op", "layer", "notes", "inputs", "text", "assumptions", "template")
"""Fields of records with names and messages in them; others hold words of ours."""


def spoilt(value: Any, field: str = "") -> Any:
    """A record with `HOSTILE` at the end of every text that may come from elsewhere."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: spoilt(getattr(value, f.name), f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **parts)
    if isinstance(value, str):
        return type(value)(value + HOSTILE) if field in FREE else value
    if type(value) is tuple:
        return tuple(spoilt(item, field) for item in value)
    if isinstance(value, tuple):  # a named one
        return type(value)(*(spoilt(item, name) for item, name in zip(value, value._fields, strict=True)))
    return value


def spoilt_checkpoint(folder: Path) -> CheckpointReport:
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(h\x00K\x00K\x02\x85K\x01\x85\x89NtR"
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x02tQq\x00"
    bad = HOSTILE.replace("\ud800", "")
    body = text(f"w{bad}") + tensor + text(f"epoch{bad}") + text(bad)
    path = folder / "\x1b]0;x\x07.pt"
    write_zip(path, b"\x80\x02" + storage + b"0}(" + body + b"u.", _0=bytes(8))
    return CheckpointReport(read(path))


ANSWERS: dict[str, Callable[[], Renderable]] = {
    "toy": records.toy_report,
    "structures": records.structures_report,
    "failing": records.failing_report,
    "timeline": lambda: timeline(records.toy()),
    **{
        kind: lambda kind=kind: memsize.load(SAVED / f"{kind}.1.memsize")
        for kind in ("layout", "verification", "checkpoint")
    },
}


@pytest.mark.parametrize("format", [*FORMATS, "notebook"])
@pytest.mark.parametrize("name", ANSWERS)
def test_no_format_lets_through_what_a_program_obeys(name: str, format: str) -> None:
    answer = spoilt(ANSWERS[name]())
    shown = render(answer, format)
    assert not obeyed(shown)
    assert shown.encode().decode() == shown
    assert "<blink>" not in shown or format not in ("html", "notebook")
    if format == "text":
        assert not obeyed(render(answer, format, width=80))


@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_made_to_deceive(format: str, tmp_path: Path) -> None:
    shown = render(spoilt_checkpoint(tmp_path), format)
    assert not obeyed(shown)


def test_json_says_the_same_in_escapes() -> None:
    report = dataclasses.replace(records.toy_report(), model=f"a\x7f\x9b\u202e{HOSTILE}")
    assert json.loads(render(report, "json"))["model"] == f"a\x7f\x9b\u202e{HOSTILE}"


def test_a_name_stays_in_its_row() -> None:
    report = spoilt(records.toy_report())
    plain = records.toy_report()
    for format in ("text", "markdown"):
        assert render(report, format).count("\n") == render(plain, format).count("\n")
    assert len(list(csv.reader(io.StringIO(render(report, "csv"))))) == render(plain, "csv").count("\n")


def test_what_prints_itself() -> None:
    finding = Finding("a", "{name}", {"name": HOSTILE})
    for shown in (repr(FindingList((finding,))), str(spoilt(memsize.load(SAVED / "step.1.memsize")))):
        assert not obeyed(shown)
    compared = memsize.load(SAVED / "comparison.1.memsize")
    assert not obeyed(str(dataclasses.replace(compared, findings=(finding,))))


# -- spreadsheets ------------------------------------------------------------------------------------------------------


class Cells(Document[Any]):
    def figures(self, unit: str) -> dict[str, Any]:
        raise NotImplementedError

    def sections(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def tables(self) -> dict[str, FlatTable]:
        return {"cells": FlatTable(("cell",), [(cell,) for cell in self.answer])}


def cells(*values: object) -> list[str]:
    return [row[0] for row in csv.reader(io.StringIO("".join(draw_csv(Cells(values), "MiB"))))][1:]


def test_a_cell_that_begins_like_a_formula_is_none() -> None:
    assert cells("=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", "\t=1", "\r=1", ("=a", "b")) == [
        "'=1+1", "'@SUM(A1)", "'+cmd|' /C calc'!A0", "'-2+3", r"\t=1", r"\r=1", "'=a; b",
    ]  # fmt: skip
    assert cells(-1, 1.5, None, "-1", "+2.5", "conv.0", ("a", "b")) == ["-1", "1.5", "", "-1", "+2.5", "conv.0", "a; b"]


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy", "timeline"])
def test_a_page_may_run_its_own_script_and_fetch_nothing(name: str) -> None:
    page = content(render(ANSWERS[name](), "html"))
    policy = page[page.index("Content-Security-Policy") :].split('"')[2]
    assert policy == (
        "default-src 'none'; script-src 'sha256-…'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    # It governs what comes after it.
    assert page.index("Content-Security-Policy") < min(page.index("<title>"), page.index("<style>"))


# -- messages ----------------------------------------------------------------------------------------------------------


def test_errors_say_what_they_quote_in_escapes() -> None:
    for error in (MemsizeError(HOSTILE), ForwardError(HOSTILE), UnknownInputError("dtype", HOSTILE, ["int8"])):
        assert not obeyed(str(error))
    assert str(MemsizeError("two\nlines")) == "two\nlines"
    assert len(str(CheckpointError("x" * 10**6))) == LONGEST


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["checkpoint", "\x1b]0;x\x07.pt"], 2),
        (["report", "\x1b[2Jnet.py:Net", "-i", "3"], 2),
        (["report", "net.py:Net", "--input", "\x1b[2J"], 2),
        (["report", "--\x1b[2J"], 2),
        (["\x1b[2J"], 2),
        (["report", "net.py:Net", "-b", "\u202e3"], 2),
        (["report", "net.py:Net", "-o", "\x1b[2J/a.html"], 2),
    ],
)
def test_arguments_are_quoted_in_escapes(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == status
    out, err = capsys.readouterr()
    assert out == "" and err and not obeyed(err)


@pytest.mark.parametrize("kind", [RuntimeError, MemsizeError, click.UsageError])
@pytest.mark.parametrize("debug", [False, True])
def test_what_goes_wrong_is_short_and_harmless(
    kind: type[Exception], debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, obj: Any, **__: object) -> None:
        obj.debug = debug
        raise kind(HOSTILE + "x" * 10**6)

    monkeypatch.setattr(cli.memsize, "main", fail)
    assert run([]) == (1 if kind is RuntimeError else 2)
    err = capsys.readouterr().err
    assert not obeyed(err)
    assert debug or len(err) < LONGEST + 200


def test_what_is_being_done_is_said_in_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSIZE_PROGRESS")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    with Progress(stream, patience=0) as progress:
        progress(f"reading {HOSTILE}")
    assert obeyed(stream.getvalue()) == {"\r", "\x1b"}  # its own, which wipe the line
    assert stream.getvalue().count("\x1b") == stream.getvalue().count("\x1b[2K")


@given(st.text(), st.integers(1, 20))
def test_laws(any_text: str, longest: int) -> None:
    assert not obeyed(printable(any_text)) and "\n" not in printable(any_text)
    assert not obeyed(printable_lines(any_text))
    assert printable_lines(any_text).count("\n") == any_text.count("\n")
    long = "x\n" * 40_000
    assert printable_lines(long + any_text + long) == long + printable_lines(any_text) + long
    if any_text.isprintable():
        assert printable(any_text) == printable_lines(any_text) == any_text
        assert len(printable(any_text, longest)) <= longest
