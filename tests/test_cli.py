"""The command line: what reaches the API, where the output goes, and how each error ends."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from memsize import Gpu, InputSpec, ModelRequest, Report, Trace
from memsize.cli import main, memsize as cli, run
from memsize.errors import ForwardError, InputError
from memsize.records.trace import Failure, Layer
from tests.conftest import Python
from tests.fits import ReportRequest
from tests.gpus import CARDS, card
from tests.models import parse_arguments
from tests.process import Progress, remaining

ROOT = Path(__file__).resolve().parent.parent

FC = Layer("fc", "Linear", 1, True, 1, (), 15, 15, 60, 0, 0, 0, 0)
WHOLE = Layer("", "Net", 0, False, 1, (), 0, 0, 0, 0, 0, 0, 0)
STOPPED = Failure("fc", "Linear", "addmm", ("float32[1,4]",), "shapes do not fit")


def trace(failure: Failure | None = None) -> Trace:
    return Trace("model.py:Net", "as-given", True, 1, "2.13.0", (), (WHOLE, FC), (), failure=failure)


class Asked:
    """Stands where the API is: keeps what it was asked, answers or raises what it is told to."""

    def __init__(self) -> None:
        self.request: ReportRequest | None = None
        self.options: dict[str, Any] = {}
        self.answer: Report | BaseException = Report("model.py:Net", trace())

    def __call__(self, request: ReportRequest, **options: Any) -> Report:
        self.request, self.options = request, options
        print("what the user's model prints")
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working folder holds a model.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, folder: None) -> Asked:
    """The API's stand-in."""
    fake = Asked()
    monkeypatch.setattr("memsize.api.report", fake)
    return fake


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `memsize report` says on stderr when the arguments are at fault."""
    assert run(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


# What reaches the API


def test_the_plain_command(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "model.py:Net", "--input", "3,64,64"]) == 0
    assert asked.request == ReportRequest(
        model=ModelRequest("model.py:Net", (InputSpec(None, (3, 64, 64)),)), training=None, gpu=Gpu()
    )
    assert callable(asked.options.pop("progress")) and not asked.options
    out, err = capsys.readouterr()
    assert "fc" in out
    assert "what the user's model prints" not in out
    assert err == "what the user's model prints\n"


def test_every_option_of_the_run(asked: Asked) -> None:
    command = "report model.py:Net -i 3x8:half -i ids=5:int64 -b 4 --arg width=64 --arg kind=wide --mode eval"
    assert run([*command.split(), "--scenario", "fp16,amp-bf16"]) == 0
    specs = (InputSpec(None, (3, 8), "float16"), InputSpec("ids", (5,), "int64"))
    built_with = {"width": 64, "kind": "wide"}
    assert asked.request is not None
    assert asked.request.model == ModelRequest("model.py:Net", specs, batch_size=4, arguments=built_with, mode="eval")
    assert asked.request.scenarios == "fp16,amp-bf16"


def test_a_list_may_be_given_in_parts(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report model.py:Net -s fp16 --scenario amp-bf16,fp32".split()) == 0
    assert asked.request.scenarios == "fp16,amp-bf16,fp32"
    assert run("report model.py:Net".split()) == 0
    assert asked.request.scenarios is None
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-1e-3", -0.001),
        ("True", True),
        ("None", None),
        ("(3, 4)", (3, 4)),
        ("{'a': [1]}", {"a": [1]}),
        ("wide", "wide"),
        ("'64'", "64"),
        ("a=b", "a=b"),
        ("", ""),
        ("torch.float16", "torch.float16"),
        ("__import__('os')", "__import__('os')"),
        ("(" * 500, "(" * 500),
    ],
)
def test_constructor_arguments(text: str, value: object) -> None:
    assert parse_arguments([f"name={text}"]) == {"name": value}


@pytest.mark.parametrize("texts", [["width"], ["=3"], ["my width=3"], ["a=1", "a=2"]])
def test_constructor_arguments_that_cannot_be_read(texts: list[str]) -> None:
    with pytest.raises(InputError):
        parse_arguments(texts)


# Where the output goes


def test_formats_on_stdout(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "model.py:Net", "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][1]["path"] == "fc"


@pytest.mark.parametrize(
    ("name", "start"), [("a.json", "{"), ("a.csv", "path,"), ("a.html", "<!"), ("a.md", "#"), ("a.txt", "model.py:Net")]
)
def test_a_file_by_its_suffix(asked: Asked, capsys: pytest.CaptureFixture[str], name: str, start: str) -> None:
    assert run(["report", "model.py:Net", "-o", name]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(f"Wrote {name}\n")
    assert Path(name).read_text(encoding="utf-8").lower().startswith(start.lower())


def test_a_file_is_not_overwritten_unless_forced(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.json").write_text("mine")
    err = failing(capsys, "model.py:Net", "-o", "a.json")
    assert err == "error: a.json exists already: --force overwrites it\n"
    assert asked.request is None  # it was refused before any work
    assert Path("a.json").read_text() == "mine"
    assert run(["report", "model.py:Net", "-o", "a.json", "--force"]) == 0
    assert json.loads(Path("a.json").read_text())


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    asked: Asked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object, **__: object) -> Report:
        Path("a.json").write_text("mine")
        return Report("model.py:Net", trace())

    monkeypatch.setattr("memsize.api.report", answer)
    assert "exists already" in failing(capsys, "model.py:Net", "-o", "a.json")
    assert Path("a.json").read_text() == "mine"


def test_a_format_is_stronger_than_a_suffix(asked: Asked) -> None:
    assert run(["report", "model.py:Net", "-o", "report.out", "-f", "json"]) == 0
    assert json.loads(Path("report.out").read_text())


def test_units_in_any_case(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "model.py:Net", "--units", "kib"]) == 0
    assert "KiB" in capsys.readouterr().out


def test_depth_and_columns(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "model.py:Net", "--depth", "0", "--columns", "layer, parameters"]) == 0
    out = capsys.readouterr().out
    assert "fc" not in out
    assert "stored" not in out.partition("Why")[0].partition("total")[0].partition("layer")[2]


def test_characters_that_the_terminal_lacks_do_not_stop_it(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    asked.answer = Report("größe.py:Net", trace(), notes=("35.19 → 17.59 … 2 ×",))
    assert run(["report", "model.py:Net"]) == 0
    assert b"gr??e.py:Net" in raw.getvalue() and b"35.19 > 17.59 ~ 2 x" in raw.getvalue()


# How errors end


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothere.py:Net"], "no such file: nothere.py"),
        (["model.py:Net", "-i", "3,0,64"], "a size of 0"),
        (["model.py:Net", "-i", "nan"], "'nan' is not a size"),
        (["model.py:Net", "-i", "3:flaot16"], "did you mean float16"),
        (["model.py:Net", "-i", "x=3", "-i", "x=3"], "'x' is given twice"),
        (["model.py:Net", "--arg", "width"], "write it like width=64"),
        (["model.py:Net", "-s", "fp17"], "no scenario 'fp17': did you mean fp16"),
        (["model.py:Net", "-s", ","], "no scenario given"),
        (["model.py:Net", "-s", ""], "no scenario given"),
        (["model.py:Net", "-f", "jsn"], "no format 'jsn': did you mean json?"),
        (["model.py:Net", "-o", "report.jsn"], "no format has the suffix '.jsn' (report.jsn): did you mean .json"),
        (["model.py:Net", "-o", "report"], "cannot tell a format"),
        (["model.py:Net", "-o", "."], "is a folder"),
        (["model.py:Net", "-o", "nowhere/a.json"], "there is no folder nowhere"),
        (["model.py:Net", "--gpu", ""], "gpu is '': name one, such as t4"),
        (["model.py:Net", "-o", "a.html", "--save", "a.html"], "cannot hold both the output and the saved run"),
        (["model.py:Net", "--units", "MiBs"], "no unit 'MiBs': did you mean MiB"),
        (["model.py:Net", "--columns", "layer,paramters"], "no column 'paramters': did you mean parameters"),
        (["model.py:Net", "--columns", ","], "no column given"),
    ],
)
def test_what_is_wrong_with_a_command(
    folder: None, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    err = failing(capsys, *arguments)
    assert err.startswith("error: ")
    assert part in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "missing argument 'TARGET'"),
        (["model.py:Net", "--inputt", "3"], "no such option"),
        (["model.py:Net", "-b", "0"], "0 is not in the range"),
        (["model.py:Net", "--depth", "-1"], "-1 is not in the range"),
        (["model.py:Net", "--mode", "test"], "'test' is not one of"),
    ],
)
def test_usage_errors(asked: Asked, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    assert part in failing(capsys, *arguments)


def test_a_failed_forward_still_shows_what_ran(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in (
        ForwardError("the forward failed in fc", trace(STOPPED)),
        Report("model.py:Net", trace(STOPPED), failure=STOPPED),
    ):
        asked.answer = answer
        assert run(["report", "model.py:Net"]) == 2
        out, err = capsys.readouterr()
        assert "The forward stopped in fc (Linear)" in out
        assert "shapes do not fit" in out
        assert err.endswith("error: the forward failed in fc (Linear): the report says why\n")


@pytest.mark.parametrize("where", [("-o", "a.html"), ("--format", "json")])
@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (STOPPED, "fc (Linear), given float32[1,4]: shapes do not fit"),
        (
            Failure("", "Net", None, (), "AttributeError: no attribute 'fc2'"),
            "Net: AttributeError: no attribute 'fc2'",
        ),
    ],
)
def test_a_failed_forward_says_why_where_no_text_does(
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[str, str],
    failure: Failure,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked.answer = Report("model.py:Net", trace(failure), failure=failure)
    assert run(["report", "model.py:Net", *where]) == 2
    assert f"error: the forward failed in {says}\n" in capsys.readouterr().err


def test_a_failed_forward_without_a_trace_is_an_error(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.answer = ForwardError("nothing ran")
    assert failing(capsys, "model.py:Net").endswith("error: nothing ran\n")


def test_a_bug_says_that_it_is_one(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.answer = ZeroDivisionError("oh")
    assert run(["report", "model.py:Net"]) == 1
    err = capsys.readouterr().err
    assert err.endswith("error: this is a bug in memsize: ZeroDivisionError: oh; --debug shows where\n")
    assert run(["report", "model.py:Net", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: this is a bug in memsize: ZeroDivisionError: oh\n")


def test_a_terminal_gets_errors_wrapped_at_words(folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert run(["report", "nothere.py:Net", "--scenario", "fp17"]) == 2
    assert terminal.getvalue() == "error: no scenario 'fp17': did\nyou mean fp16, fp4, fp32?\n"


def test_the_command_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ("reprot model.py:Net", "no such command 'reprot': did you mean report, checkpoint? (memsize --help)"),
        ("zzz", "no such command 'zzz' (memsize --help)"),
        (
            "report a.py:A --optimizer sgd",
            "no such option '--optimizer': did you mean --train? (memsize report --help)",
        ),
        (
            "checkpoint a.pt --model a.py:A",
            "no such option '--model': did you mean --against? (memsize checkpoint --help)",
        ),
        ("sweep --hel", "no such option '--hel': did you mean --help, --scheduler? (memsize sweep --help)"),
        (
            "generate diffusers:a/b --height 512",
            "no such option '--height': did you mean --arg height=1024? (memsize generate --help)",
        ),
        ("sweep a.toml --lora r=8", "no such option '--lora': write lora = … in the file (memsize sweep --help)"),
        ("sweep a.toml --compile", "no such option '--compile': write compile = … in the file (memsize sweep --help)"),
        (
            "check --compile",
            "no such option '--compile': write scenario = \"fp32+compile\" in the file (memsize check --help)",
        ),
        (
            "serve m.py:Net --compile",
            "no such option '--compile': vLLM compiles models itself, which serve counts; --enforce-eager leaves it "
            "out (memsize serve --help)",
        ),
        (
            "serve m.py:Net --lora r=8",
            "no such option '--lora': memsize report, timeline, fit and generate have it (memsize serve --help)",
        ),
        ("serve m.py:Net --base nf4", "no such option '--base': did you mean --scenario? (memsize serve --help)"),
        (
            "fit m.py:Net --load-in-4bit",
            "no such option '--load-in-4bit': did you mean --base nf4? (memsize fit --help)",
        ),
        ("sweep a.toml --zzz", "no such option '--zzz' (memsize sweep --help)"),
        (
            "fit-script a.py --vary-argument bs --gpu t4",
            "--vary-argument is missing (the argument of the script to vary: batch-size for --batch-size 8 or "
            "batch_size=8); give options before the script: memsize fit-script --vary-argument … a.py …",
        ),
        ("report a.py:A --train --gpu t4", "--train has no value: --gpu follows it (memsize report --help)"),
        (
            "fit a.py:A --budget",
            "--budget has no value. Memory of the device, instead of the GPU's: 15109MiB, 24GB (memsize fit --help)",
        ),
        ("run --stesp 3 train.py", "no such script: --stesp (did you mean --steps?)"),
        ("run --beside serve:0.3 train.py", "no such script: --beside (an option that memsize run does not have)"),
        ("run --gpu t4 python3 train.py", "no such script: python3 (give the script itself, without python)"),
    ):
        assert run(arguments.split()) == 2
        assert capsys.readouterr().err == f"error: {said}\n"
    assert run(["report", "model.py:Net", "-b", "four"]) == 2
    assert "'four' is not a valid whole number" in capsys.readouterr().err


def test_debug_shows_the_traceback_of_a_users_error(folder: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "nothere.py:Net", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: no such file" in err


def test_interrupted(asked: Asked) -> None:
    asked.answer = KeyboardInterrupt()
    assert run(["report", "model.py:Net"]) == 130


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    alone = capsys.readouterr().out
    assert run(["--help"]) == 0
    assert capsys.readouterr().out == alone
    assert "report" in alone
    assert run(["report", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert all(option in words for option in ("--input", "--scenario", "amp-bf16", "--columns", "MiB", "-o, --output"))
    with pytest.raises(SystemExit) as caught:
        main(["repotr"])
    assert caught.value.code == 2


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("talking")
def test_progress_shows_only_what_takes_long_and_wipes_itself() -> None:
    terminal = Terminal()
    with Progress(terminal, patience=0.0) as progress:
        for number in range(100):
            progress(f"scenario {number}")
            time.sleep(0.001)
    assert "scenario 99 …" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSIZE_PROGRESS")


@pytest.mark.usefixtures("talking")
@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress_is_silent_in_a_quick_run(stream: io.StringIO) -> None:
    with Progress(stream) as progress:
        progress("scenario")
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("talking")
def test_a_file_gets_a_line_now_and_then() -> None:
    """Lines that end, without a terminal's codes, and nothing to wipe."""
    file = io.StringIO()
    with Progress(file, patience=0.0, tick=0.01) as progress:
        progress("fp16, 1 of 3")
        while file.getvalue().count("\n") < 2:
            time.sleep(0.001)
    assert set(file.getvalue().splitlines()) == {"memsize: fp16, 1 of 3 … 0 s"}
    assert "\x1b" not in file.getvalue() and file.getvalue().endswith("\n")


def test_progress_can_be_switched_off() -> None:
    terminal = Terminal()
    with Progress(terminal, patience=0.0) as progress:
        progress("scenario")
    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("talking")
def test_parts_of_the_answer_are_shown_once_the_rest_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress(stream := io.StringIO()) as progress:
        progress.found("batch 3 on 8 GPUs")
        progress.found("batch 5 on 16 GPUs")
        assert stream.getvalue() == ""
        monkeypatch.setattr("memsize.cli.working._LONG", 0.0)
        progress.found("batch 6 on 32 GPUs")
    assert stream.getvalue() == "batch 3 on 8 GPUs\nbatch 5 on 16 GPUs\nbatch 6 on 32 GPUs\n"


def screen(written: str, columns: int) -> list[str]:
    """The lines of a terminal after it was sent `written`."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[\d*[A-Z]|[^\x1b]", written):
        if piece == "\x1b[2K":
            lines[row] = ""
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + 1 :]
            column += 1
            assert column <= columns
    return [line for line in lines if line]


@pytest.mark.usefixtures("talking")
def test_a_terminal_shows_parts_above_the_progress_until_the_answer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.cli.working._LONG", 0.0)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(terminal, patience=0.0) as progress:
        progress("fp16, 1 of 3, a line that is too long for it")
        progress.found("batch 3 fits and 4 doesn't")
        progress.found("\x1b[31mbatch 5")
        assert screen(terminal.getvalue(), 20) == [
            "batch 3 fits and 4 ", "doesn't", "\\x1b[31mbatch 5", "fp16, 1 of 3, a lin…"
        ]  # fmt: skip
    assert screen(terminal.getvalue(), 20) == []


@pytest.mark.usefixtures("talking")
def test_parts_that_were_found_early_are_shown_as_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.cli.working._LONG", 0.05)
    with Progress(stream := io.StringIO(), patience=0.0, tick=0.01) as progress:
        progress.found("batch 3 on 8 GPUs")
        while not stream.getvalue():
            time.sleep(0.001)
    assert stream.getvalue() == "batch 3 on 8 GPUs\n"


@pytest.mark.usefixtures("talking")
def test_progress_beside_a_program_leaves_its_open_lines_alone() -> None:
    shared = Terminal()
    with Progress(shared, patience=0.0, tick=0.001, beside=(shared, shared)) as progress:
        print("loading", end="", file=shared)
        progress("train.py: step 1")
        time.sleep(0.05)
        assert shared.getvalue() == "loading"
        print(" done", file=shared)
        while "step 1 … 0 s" not in shared.getvalue():
            time.sleep(0.001)
        shared.write("\r50%")
    assert screen(shared.getvalue(), 80) == ["loading done", "50%"]
    assert "write" not in vars(shared)


def test_what_remains_is_estimated_from_a_count() -> None:
    assert remaining("fp16, 3 of 7", 10) == "10 s, about 25 s left"  # two took 10 s, five remain
    assert remaining("fp16, 1 of 7", 10) == remaining("fp16", 10) == "10 s"
    assert remaining("2 of 3: net: fp16, 1 of 4", 100) == "1 min 40 s, about 3 min 20 s left"


def test_what_remains_never_grows_between_two_counts() -> None:
    """Two took 10 s, so five take 25 s: 5 s after that 20 s are left, and nothing is said once they are over."""
    assert [remaining("fp16, 3 of 7", elapsed, 10) for elapsed in (10, 15, 34)] == [
        "10 s, about 25 s left",
        "15 s, about 20 s left",
        "34 s, about 1 s left",
    ]
    assert remaining("fp16, 3 of 7", 40, 10) == "40 s"


@pytest.mark.usefixtures("talking")
def test_the_line_makes_room_for_what_others_write() -> None:
    """A library's log line begins where the progress line began, and a line that it has not ended is left alone."""
    terminal = Terminal()
    with Progress(terminal, patience=0.0, tick=0.001) as progress:
        progress("scenario 1")
        terminal.write("a warning\n")
        progress("scenario 2")
        terminal.write("half a line")
        progress("scenario 3")
    shown = terminal.getvalue()
    assert shown.startswith("scenario 1 … 0 s\r\x1b[2Ka warning\n")
    assert "scenario 2 … 0 s\r\x1b[2Khalf a line" in shown and "scenario 3" not in shown
    assert "write" not in vars(terminal)


# A forward that fails


@pytest.mark.parametrize(
    ("layer", "size", "options"),
    [
        ("Conv2d(3, 8, 3)", "64,3,32,32", "-i 3,32,32 -b 64"),  # the batch in the size
        ("Conv2d(3, 8, 3)", "3,32", "-i 3,32,32"),
        ("Conv2d(3, 8, 3)", "28,28", "-i 3,28,28"),
        ("Conv2d(3, 8, 3)", "32,32,3", "-i 3,32,32"),
        ("Conv2d(3, 8, 3)", "1,32,32", "-i 3,32,32"),
        ("Conv1d(4, 8, 3)", "100", "-i 4,100"),
        ("Linear(784, 10)", "1,28,28", "-i 784"),
        ("Linear(16, 10)", "5,8", "-i 5,16"),
        ("Conv2d(3, 8, 64)", "3,32,32", ""),  # too small, which no other layer says
    ],
)
def test_a_failed_forward_names_options_that_may_be_right(
    layer: str, size: str, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(f"from torch.nn import *\nnet = Sequential({layer})\n")
    assert run(["report", f"{tmp_path / 'net.py'}:net", "-i", size]) == 2
    hint = f"; perhaps it takes {options}\n" if options else ": the report says why\n"
    assert capsys.readouterr().err.endswith(f"the forward failed in 0 ({layer.partition('(')[0]}){hint}")


# As a process


def test_nothing_heavy_is_imported_before_it_is_needed(python: Python) -> None:
    heavy = "{'torch', 'pandas', 'tabulate', 'jinja2', 'numpy', 'tqdm', 'torchinfo'}"
    for arguments in ([], ["--help"], ["report", "nothere.py:Net"], ["report", "-s", "fp17", "x.y:Net"]):
        code = f"import sys\nfrom memsize.cli import run\nrun({arguments!r})\nprint(sorted({heavy} & set(sys.modules)))"
        assert python("-c", code).stdout.endswith("[]\n")


def test_the_toy_model_end_to_end(python: Python, toy_target: str) -> None:
    done = python("-m", "memsize", "report", toy_target, "--input", "3,64,64")
    assert (done.returncode, done.stderr) == (0, "")
    assert "9,223,901" in done.stdout
    assert "35.19" in done.stdout


@pytest.mark.thorough
def test_a_wrong_size_end_to_end(warm_python: Python, toy_target: str) -> None:
    done = warm_python("-m", "memsize", "report", toy_target, "--input", "3,32,32")
    assert done.returncode == 2
    assert "conv.2" in done.stdout
    # 1000 channels × 26 × 26 reach a layer made for 1000 × 58 × 58
    assert "676000" in done.stdout
    assert "3364000" in done.stdout
    assert done.stderr == "error: the forward failed in fc (Linear): the report says why\n"


def test_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memsize", "report", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""
    code = "from memsize.cli.output import Destination; Destination('text', None).write('x' * 10)"
    reader, writer = os.pipe()
    os.close(reader)
    text = f"import sys\ntry:\n    exec({code!r})\nexcept BrokenPipeError:\n    sys.exit(7)"
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    program = tmp_path / "memsize"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m memsize "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(_MEMSIZE_COMPLETE=bash_source memsize)"\n'
        'compopt() { COMPREPLY=("$@"); }\n'  # bash knows it only while it completes: "-o default" are files
        'for words in "memsize rep" "memsize report --grad" "memsize report mod" "memsize fit --gpu t4,h100-" \\\n'
        '"memsize report -s amp-"; do\n'
        "COMP_WORDS=($words) COMPREPLY=()\nCOMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        '_memsize_completion memsize; echo "${COMPREPLY[@]}"\ndone'
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (
        ["report", "--gradient-accumulation-steps", "-o default", "t4,h100-80gb t4,h100-nvl", "amp-fp16 amp-bf16"],
        "",
    )


def test_every_gpu_that_is_completed_is_known() -> None:
    command = cli.get_command(click.Context(cli), "fit")
    assert command is not None
    (option,) = (param for param in command.params if "--gpu" in param.opts)
    completed = [item.value for item in option.shell_complete(click.Context(command), "")]
    assert [card(name) for name in completed] == [*CARDS.values()]
