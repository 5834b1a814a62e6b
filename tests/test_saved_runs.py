"""A saved run is a target: every command that only reads a run shows it from its file, alike and without torch."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memsize
from memsize.cli import run
from memsize.records.answer import Renderable
from memsize.render import render
from tests import records
from tests.conftest import Python
from tests.records import NEWEST, read_data

SAVED = Path(__file__).parent / "saved"
NET = """from torch import nn


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
"""
TRAIN = """import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""
TARGET = ("net.py:net", "--input", "3,16,16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "train.py").write_text(TRAIN)
    torch.save({"weight": torch.zeros(4, 4)}, tmp_path / "last.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")


COMMAND_LINES = {
    "report": ("report", *TARGET, "--scenario", "fp32,fp16", "--train", "sgd", "--gpu", "t4"),
    "step": ("timeline", *TARGET, "--train", "adamw", "--scenario", "amp-fp16"),
    "fit": ("fit", *TARGET, "--gpu", "t4", "--scenario", "fp16", "--batch-size", "8", "--remedies"),
    "layout": ("layout", *TARGET),
    "checkpoint": ("checkpoint", "last.pt"),
    "program": ("run", "--gpu", "t4", "train.py"),
}


@pytest.mark.parametrize("kind", COMMAND_LINES)
def test_a_saved_run_is_shown_as_it_was(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In text and as data; that its page and its table are the same, too, test_answers_come_back_equal says.

    What a script takes of the host's memory is measured, and differs from run to run.
    """
    command, *rest = COMMAND_LINES[kind]
    data = shown(capsys, command, "--format", "json", "--save", "data.memsize", *rest)
    text = shown(capsys, command, "--save", "run.memsize", *rest)
    assert read_data(folder / "run.memsize")["kind"] == kind
    assert shown(capsys, command, "run.memsize") == text
    assert shown(capsys, command, "--format", "json", "data.memsize") == data
    # A run can be saved again, and is the same.
    shown(capsys, command, "--save", "again.memsize", "run.memsize")
    assert (folder / "again.memsize").read_bytes() == (folder / "run.memsize").read_bytes()


SCHEMA = json.loads((Path(memsize.__file__).parent / "schema.json").read_text(encoding="utf-8"))
DOCUMENTS = {name.split(".")[1].split("/")[0] for name in SCHEMA["properties"]["schema"]["enum"]}
SAVED_KINDS = sorted(DOCUMENTS - {"timeline"} | {"step"})
"""All kinds of answers; a timeline is saved as the step that it is drawn from."""
READERS = {
    "checkpoint": "checkpoint",
    "error": "explain",
    "explanation": "explain",
    "fit": "fit",
    "generation": "generate",
    "layout": "layout",
    "program": "run",
    "ranks": "run",
    "report": "report",
    "serving": "serve",
    "step": "timeline",
}
"""The command that shows each kind again."""


@pytest.mark.parametrize("kind", READERS)
def test_a_saved_run_is_shown_as_one_likes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SAVED / f"{kind}.1.memsize")
    plain = shown(capsys, READERS[kind], path)
    assert shown(capsys, READERS[kind], "--full", "--color", "never", "--debug", "--format", "text", path) == plain
    assert "\33[" in shown(capsys, READERS[kind], "--color", "always", path)
    assert shown(capsys, READERS[kind], "--units", "GB", path) != plain


def test_what_comes_after_a_saved_program_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SAVED / "program.1.memsize")
    told = refused(capsys, "run", path, "--full")
    assert told == f"{path} is a saved run, which takes no arguments: write --full before it"


def test_showing_a_saved_run_needs_no_torch(python: Python) -> None:
    command_lines = [[command, str(SAVED / f"{kind}.1.memsize")] for kind, command in READERS.items()]
    done = python(
        "-c",
        f"import sys, memsize.cli\nfor line in {command_lines}: print(memsize.cli.run(line), 'torch' in sys.modules)",
    )
    assert done.stderr == "" and done.stdout.splitlines().count("0 False") == len(READERS)


def test_a_snapshot_is_written_from_a_saved_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, *COMMAND_LINES["step"], "-o", "one.pickle", "--save", "run.memsize")
    shown(capsys, "timeline", "run.memsize", "-o", "two.pickle")
    one, two = (pickle.loads((folder / name).read_bytes()) for name in ("one.pickle", "two.pickle"))
    assert one == two


def test_a_saved_program_has_a_timeline_and_a_snapshot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "run", "--gpu", "t4", "--save", "run.memsize", "-o", "one.pickle", "train.py")
    shown(capsys, "timeline", "run.memsize", "-o", "two.pickle")
    one, two = (pickle.loads((folder / name).read_bytes()) for name in ("one.pickle", "two.pickle"))
    assert one == two
    data = json.loads(shown(capsys, "timeline", "run.memsize", "--format", "json"))
    assert data["peak"]["bytes"] == memsize.load("run.memsize").peak.requested
    assert refused(capsys, "run", "--gpu", "a100", "run.memsize").endswith("--gpu would need the model to be run again")


def test_programs_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of 64 × 64 + 64 + 64 × 8 + 8 float32 parameters: 18,720 B become 9,360."""
    for name, text in (("before", TRAIN), ("after", TRAIN.replace(".cuda()", ".cuda().half()"))):
        (folder / "train.py").write_text(text.replace('device="cuda")', 'device="cuda").to(model[0].weight.dtype)'))
        shown(capsys, "run", "--save", f"{name}.memsize", "train.py")
    found = memsize.diff("before.memsize", memsize.load("after.memsize"))
    assert "18,720 B" in found.findings[0].text("B") and "9,360 B" in found.findings[0].text("B")


def test_the_allocator_of_a_saved_step_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--allocator", "expandable_segments:True", "--format", "json")
    wanted = json.loads(shown(capsys, *COMMAND_LINES["step"], *settings))
    shown(capsys, *COMMAND_LINES["step"], "--save", "run.memsize")
    assert json.loads(shown(capsys, "timeline", "run.memsize", *settings)) == wanted


def test_a_timeline_of_a_saved_report(capsys: pytest.CaptureFixture[str]) -> None:
    allocator = ("--allocator", "expandable_segments:True")
    shown(capsys, *COMMAND_LINES["report"], *allocator, "--save", "run.memsize")
    step = ("timeline", *TARGET, "--train", "sgd", "--gpu", "t4", *allocator)
    for chosen in (("--scenario", "fp16"), ("--scenario", "as-given")):
        wanted = shown(capsys, *step, *chosen)
        assert shown(capsys, "timeline", "run.memsize", *chosen) == wanted
    assert shown(capsys, "timeline", "run.memsize") == wanted
    assert refused(capsys, "timeline", "run.memsize", "--scenario", "bf16").startswith("no scenario 'bf16'")


def test_a_verification_is_saved_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = memsize.load(SAVED / "verification.1.memsize")
    assert shown(capsys, "verify", str(SAVED / "verification.1.memsize")) == f"{found}\n"


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("report", ("--train", "sgd"), "--train"),
        ("report", ("-b", "4"), "--batch-size"),
        ("report", ("--input", "3,8,8"), "--input"),
        ("report", ("--scenario", "fp16"), "--scenario"),
        ("step", ("--gpu", "t4"), "--gpu"),
        ("fit", ("--vary", "image"), "--vary"),
        ("layout", ("--mode", "eval"), "--mode"),
        ("checkpoint", ("--against", "net.py:net"), "--against"),
    ],
)
def test_what_would_need_the_model_is_refused(
    kind: str, options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = SAVED / f"{kind}.1.memsize"
    message = refused(capsys, READERS[kind], str(path), *options)
    assert message == f"{path} is a saved run: {named} would need the model to be run again"


def test_view_options_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SAVED / "report.1.memsize")
    assert "KiB" in shown(capsys, "report", path, "--units", "KiB", "--depth", "0", "--columns", "layer,stored")


@pytest.mark.parametrize(("command", "kind"), [("fit", "report"), ("report", "fit"), ("layout", "step")])
def test_a_run_of_another_kind_is_refused(command: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = SAVED / f"{kind}.1.memsize"
    by = READERS[kind]
    assert refused(capsys, command, str(path)) == f"{path} holds a {kind}: memsize {by} shows it"


def test_nothing_is_run_where_saving_would_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.memsize").write_text("precious")
    (folder / "net.py").write_text("raise SystemError('imported')")
    assert "exists already" in refused(capsys, "report", *TARGET, "--save", "x.memsize")
    assert "it is not overwritten" in refused(capsys, "report", *TARGET, "--save", "x.memsize", "--force")
    assert (folder / "x.memsize").read_text() == "precious"


def test_a_failed_forward_is_saved_as_far_as_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("report", "net.py:net", "--input", "5,16,16", "--save", "run.memsize")) == 2
    first = capsys.readouterr()
    assert run(("report", "run.memsize")) == 2
    again = capsys.readouterr()
    assert again.out == first.out and again.err == first.err.replace("Wrote run.memsize\n", "")


# -- what was changed so that it cannot be shown -----------------------------------------------------------------------

DAMAGES: dict[str, tuple[str, tuple[str | int, ...], object, str]] = {
    "a storage that is not there": (
        "step",
        ("trace", "events", 0, 0),
        171,
        "171 refers to none of the 171 storages",
    ),
    "a layer before the first": (
        "step",
        ("trace", "storages", 0, 2),
        -2,
        "-2 refers to none of the 6 layers",
    ),
    "a phase after the last": ("step", ("trace", "events", 0, 2), 19, "events: 19 refers to none of the 19 phases"),
    "a root": ("step", ("trace", "layers", 1, "root"), 1, "layers: 1 refers to none of the 1 roots"),
    "a negative size": ("step", ("trace", "storages", 0, 0), -1, "expected 0 or more, found -1"),
    "a size beyond int64": ("step", ("trace", "events", 0, 1), 2**63, "expected an integer of 64 bits"),
    "no finite number": ("sweep", ("sweep_rows", 0, "seconds"), float("nan"), "expected a finite number, found nan"),
    "a sentence without its value": ("report", ("findings", 0, "values"), {}, "a sentence has no value for"),
    "a value of a wide format": ("report", ("findings", 0, "template"), "{bytes:>99999999}", "no value for 'bytes'"),
    "an attribute of a value": ("report", ("findings", 0, "template"), "{bytes.real}", "no value for 'bytes.real'"),
    "an unknown category": ("explanation", ("alive", 0, 0), "cake", "found 'cake'"),
    "a GPU that has no budget": ("fit", ("fit_rows", 0, "gpu"), "cake", "'cake' refers to none of the 1 budgets"),
    "no target": ("sweep", ("sweep_rows", 0, "settings"), {"gpu": "T4"}, "the settings of a cell lack 'target'"),
    "no arguments": ("serving", ("asked",), {}, "expected the keys of ServingArguments"),
    "no ranks": ("ranks", ("groups",), [], "expected one entry or more, found none"),
    "ranks that no machine has": ("ranks", ("nodes",), 0, "cannot be spread evenly over 0 nodes"),
    "a file that is not there": ("checkpoint", ("contents", "storages", 0, "file"), 1, "refers to none of the 1 files"),
    "settings of no allocator": ("step", ("config", "roundup_divisions"), [1], "sizes that no allocator has"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_could_not_be_shown_is_refused(
    damage: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, (*path, last), value, says = DAMAGES[damage]
    data = read_data(SAVED / f"{kind}.1.memsize")
    part = data["answer"]
    for step in path:
        part = part[step]
    part[last] = value
    (folder / "run.memsize").write_bytes(gzip.compress(json.dumps(data).encode()))
    message = refused(capsys, READERS.get(kind, kind), "run.memsize")
    assert message.startswith("run.memsize is damaged: ") and says in message


def test_settings_of_the_allocator_that_are_no_json_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = read_data(SAVED / "report.1.memsize")
    data["answer"]["allocator"] = "["
    (folder / "run.memsize").write_bytes(gzip.compress(json.dumps(data).encode()))
    assert refused(capsys, "timeline", "run.memsize") == "damaged settings of the allocator: ["


# -- in Python ---------------------------------------------------------------------------------------------------------


def test_answers_come_back_equal(folder: Path) -> None:
    model = torch.nn.Linear(8, 4)
    answers = (
        memsize.report(model, (8,), scenarios="fp16", train="sgd"),
        memsize.trace(model, (8,), optimizer="sgd"),
        memsize.fit(model, (8,), scenarios="fp32", gpu="t4", batch_size=2),
        memsize.layout(model, (8,)),
        memsize.checkpoint("last.pt"),
        memsize.diff(model, torch.nn.Linear(8, 4).half()),
        memsize.run("train.py", gpu="t4"),
    )
    for number, answer in enumerate(answers):
        answer.save(folder / f"{number}.memsize")
        again = memsize.load(folder / f"{number}.memsize")
        assert again == answer
        if isinstance(answer, Renderable):
            for form in ("html", "csv"):
                assert render(again, form) == render(answer, form)


def test_saved_runs_are_compared(folder: Path) -> None:
    for name, width in (("before", 4), ("after", 8)):
        memsize.report(torch.nn.Linear(8, width), (8,), scenarios="fp32").save(folder / f"{name}.memsize")
    assert "288 B" in memsize.diff("before.memsize", "after.memsize").findings[0].text("B")  # (8 × 8 + 8) × 4


def test_the_step_of_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = records.toy_report()
    report.save(folder / "run.memsize")
    memsize.StepTrace(report.trace).save(folder / "step.memsize")
    of_report, of_step = (shown(capsys, "timeline", f"{name}.memsize", "--format", "json") for name in ("run", "step"))
    assert of_report == of_step
    assert "no scenario 'nf4'" in refused(capsys, "timeline", "run.memsize", "--scenario", "nf4")
    memsize.fit(torch.nn.Linear(8, 4), (8,), scenarios="fp32", gpu="t4", batch_size=2).save(folder / "fit.memsize")
    assert "holds a fit" in refused(capsys, "timeline", "fit.memsize")


# -- files of every version of the schema keep loading -----------------------------------------------------------------


def test_there_is_a_file_of_every_kind_and_version() -> None:
    expected = {f"{kind}.{version}.memsize" for kind in SAVED_KINDS for version in range(1, NEWEST + 1)}
    assert {path.name for path in SAVED.glob("*.memsize")} == expected


@pytest.mark.parametrize("kind", SAVED_KINDS)
@pytest.mark.parametrize("version", range(1, NEWEST + 1))
def test_files_of_older_versions_are_read(kind: str, version: int) -> None:
    path = SAVED / f"{kind}.{version}.memsize"
    assert read_data(path)["schema"] == f"memsize.run/{version}"
    golden, text = SAVED / f"{kind}.{version}.txt", f"{memsize.load(path)}\n"
    if os.environ.get("MEMSIZE_GOLDEN") == "write":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [("report",), ("checkpoint",), ("verify", *TARGET, "--against")])
def test_what_has_no_end_is_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    (folder / "endless.memsize").symlink_to("/dev/zero")
    assert refused(capsys, *arguments, "endless.memsize") == "cannot read endless.memsize: it is not a file"


@pytest.mark.parametrize("kind", [kind for kind in SAVED_KINDS if kind != "step"])
def test_any_answer_in_brief_has_its_findings_and_no_table(kind: str) -> None:
    saved = memsize.load(SAVED / f"{kind}.1.memsize")
    brief, whole = render(saved, "agent").splitlines(), render(saved, "text").splitlines()
    assert 1 < len(brief) <= 40 and brief[0] == whole[0]
    assert not any("---" in line for line in brief)
    assert set(brief) <= set(whole)


def test_a_long_answer_in_brief_says_how_much_it_leaves_out() -> None:
    report = memsize.load(SAVED / "report.1.memsize")
    brief = render(replace(report, findings=report.findings * 20), "agent").splitlines()
    assert len(brief) == 40 and brief[-1].endswith("more lines, and all tables: -f json, or without -f")


def test_the_command_prints_an_answer_in_brief(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "fit", str(SAVED / "fit.1.memsize"), "--format", "agent")
    assert out == render(memsize.load(SAVED / "fit.1.memsize"), "agent")
