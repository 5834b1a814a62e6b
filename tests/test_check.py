"""`memsize check`: limits, baselines, findings and formats, on a scratch project whose model grows over commits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import memsize
from memsize import Check, Finding
from memsize.cli import run
from memsize.documents import document
from memsize.documents.sections import Limit
from memsize.errors import InputError, MemsizeError, OutputError
from memsize.render import render
from memsize.units import Bytes
from tests.models import LIMITS, Bound, Growth, find_project, parse_limits, parse_section, read_project
from tests.records import Baseline, CheckedModel, Figure, LayerFigures, Problem, read_baselines, write_baselines
from tests.test_render import check as golden

MODEL = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))
"""
PROJECT = """# keep this
[project]
name = "x"

[[tool.memsize.target]]
target = "net.py:Net"
input = "64"
train = "sgd"
limits = { parameters = "16 KiB", stored = "16 KiB", fits_batch = 4 }
baseline = "memsize-baseline.json"
max_growth = "1%"
"""
PARAMETERS = (64 * 32 + 32) + (32 * 10 + 10)
"""2,410 elements, 9,640 bytes."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wider(width: int) -> None:
    Path("net.py").write_text(MODEL.replace("64, 32", f"64, {width}").replace("32, 10", f"{width}, 10"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert run(("check", *arguments)) == status
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "check") -> str:
    assert run((command, *arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")


# -- over commits ------------------------------------------------------------------------------------------------------


def commit(width: int) -> None:
    wider(width)
    who = {f"GIT_{kind}_{what}": "a@b" for kind in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", f"{width} wide")):
        subprocess.run(("git", *command), check=True, env=os.environ | who)


@pytest.mark.slow
def test_a_model_that_grows_over_commits(capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are written down, it grows within its limits, then beyond them; each time the baseline follows."""
    assert "memsize-baseline.json has no baseline of it: memsize check --update" in shown(capsys, status=2)
    shown(capsys, "--update")
    commit(32)
    golden("check.holds.txt", shown(capsys))
    commit(48)
    golden("check.grew.txt", shown(capsys, status=1))
    shown(capsys, "--update")
    commit(48)
    golden("check.accepted.txt", shown(capsys))
    commit(96)
    golden("check.broken.txt", shown(capsys, status=1))
    golden("check.broken.md", shown(capsys, "--format", "markdown", status=1))
    golden("check.broken.github.txt", shown(capsys, "--format", "github", status=1))
    # What the limit broke on is in the diff of that commit.
    assert run(("diff", "HEAD~1:net.py:Net", "net.py:Net", "--format", "json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["after"] for row in found["layers"]] == ["body", "head"]


def test_a_limit_and_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are held exactly: a limit of what is stored is kept, one of a byte less is broken."""
    memsize.check(update=True)
    text = PROJECT.replace('stored = "16 KiB"', f'stored = "{PARAMETERS * 4}"').replace('"1%"', '"0%"')
    Path("pyproject.toml").write_text(text)
    assert memsize.check().status() == 0
    Path("pyproject.toml").write_text(text.replace(str(PARAMETERS * 4), str(PARAMETERS * 4 - 1)))
    found = memsize.check()
    assert found.status() == 1
    (problem,) = (problem for model in found.models for problem in model.problems)
    assert (problem.severity, problem.finding.code, problem.case) == ("error", "over-limit", "stored")
    assert problem.finding.layers == ("body", "head")
    # body: 64 · 32 + 32 = 2,080 elements of 4 bytes; head: 32 · 10 + 10 = 330
    assert problem.finding.text("B") == (
        "stored: 9,640 B, 1 B over the limit of 9,639 B, mostly in body (8,320 B) and head (1,320 B)."
    )
    assert memsize.check(ignore=["over-limit"]).status() == 0
    assert found.status("never") == 0


def test_growth_names_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    memsize.check(update=True)
    Path("net.py").write_text(MODEL.replace("32, 10", "32, 12"))
    text = shown(capsys, "--units", "B", status=1)
    # 12 instead of 10 outputs: 2 · 32 + 2 = 66 elements more of 2,410, where 24 are allowed
    says = "parameters grew from 2,410 to 2,476 (+2.7%), 42 more than allowed, mostly in head (+264 B)."
    assert says in [problem.finding.text("B") for model in memsize.check().models for problem in model.problems]
    # What is read is one error for all the figures that the layer made grow.
    assert text.startswith("1 error in 1 target") and "error grew: parameters +2.7%, stored +2.7%, " in text
    assert text.count("error") == 2 and ", mostly in head (+264 B).\n" in text
    Path("net.py").write_text(MODEL.replace("32, 10", "32, 4"))
    text = shown(capsys, "--units", "B")
    assert "note shrank: stored shrank from 9,640 B to 8,848 B (−8.2%), mostly in head (−792 B)." in text


def test_what_is_no_limit_of_a_run_needs_no_input(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text('[[tool.memsize.target]]\ntarget = "net.py"\nlimits = { parameters = 2_410 }\n')
    assert "2,410" in shown(capsys)
    Path("pyproject.toml").write_text(
        '[[tool.memsize.target]]\ntarget = "net.py"\nlimits = { inference_peak = "1 GiB" }\n'
    )
    assert 'its peaks need an input: name one, such as input = "3,64,64"' in shown(capsys, status=2)


@pytest.mark.parametrize(("name", "value"), [("gpu", "t4"), ("stack", "torch=2.6"), ("batch_size", 3)])
def test_options_of_a_run_without_an_input_are_refused(
    capsys: pytest.CaptureFixture[str], name: str, value: str | int
) -> None:
    section = f'[[tool.memsize.target]]\ntarget = "net.py"\nlimits = {{ parameters = 2_410 }}\n{name} = {value!r}\n'
    Path("pyproject.toml").write_text(section)
    assert f"{name} is about a run of the model, which needs an input" in shown(capsys, status=2)


def test_peaks_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    section = '[[tool.memsize.target]]\ntarget = "net.py:Net"\ninput = "64"\ntrain = "adamw"\ngpu = "t4"\n'
    limits = 'limits = { training_peak = "1 KiB", reserved = "1 KiB", device = "15 GiB", fits_batch = 100_000_000 }\n'
    Path("pyproject.toml").write_text(section + limits)
    found = memsize.check()
    assert [(figure.name, figure.holds) for figure in found.models[0].figures] == [
        ("training_peak", False),
        ("reserved", False),
        ("device", True),
        ("fits_batch", False),
    ]
    peak = memsize.report("net.py:Net", (64,), scenarios="as-given", train="adamw", gpu="t4").scenario_results[0]
    assert peak.training is not None and peak.inference is not None
    assert [figure.value for figure in found.models[0].figures] == [
        peak.training.allocated,
        peak.training.reserved,
        peak.training.device.high,
        None,
    ]
    (batch,) = (finding for finding in found.findings if finding.code == "does-not-fit")
    assert "Batch 100,000,000 does not fit on Tesla T4: it needs " in batch.text()


def test_what_runs_out_of_memory_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """10^8 samples of 64 float32 are 25.6 GB."""
    target = '[[tool.memsize.target]]\ntarget = "net.py:Net"\ninput = "64"\ntrain = "adamw"\ngpu = "t4"\n'
    Path("pyproject.toml").write_text(f"{target}batch_size = 100_000_000\n")
    assert "error out-of-memory: " in shown(capsys, status=1)


def test_findings(capsys: pytest.CaptureFixture[str]) -> None:
    unused = MODEL.replace("self.head = ", "self.idle = nn.Linear(2, 2)\n        self.head = ")
    Path("net.py").write_text(unused)
    plain = PROJECT.partition("limits")[0]
    Path("pyproject.toml").write_text(plain)
    assert "warning unused-parameters: The forward never reads idle.weight" in shown(capsys)
    shown(capsys, "--fail-on", "warning", status=1)
    shown(capsys, "--select", "unused-parameters", status=1)
    assert "unused" not in shown(capsys, "--ignore", "unused-parameters")
    assert "error training-peak" in shown(capsys, "--select", "training-peak", status=1)
    for setting, status in (
        ('[tool.memsize]\nselect = ["unused-parameters"]', 1),
        ('[tool.memsize]\nselect = ["unused-parameters"]\nignore = ["unused-parameters"]', 0),
        ('[tool.memsize.severity]\nunused-parameters = "error"', 1),
        ('[tool.memsize.severity]\nunused-parameters = "note"', 0),
    ):
        Path("pyproject.toml").write_text(f"{plain}\n{setting}\n")
        shown(capsys, status=status)
    assert refused(capsys, "--select", "unused").startswith("no finding 'unused': did you mean unused-parameters")


def test_one_target_that_fails_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text(
        '[[tool.memsize.target]]\ntarget = "gone.py:Net"\n\n'
        '[[tool.memsize.target]]\ntarget = "net.py:Net"\nlimits = { parameters = 1 }\n'
    )
    text = shown(capsys, status=2)
    assert "1 error; 1 of 2 targets could not be checked" in text
    assert "error: no such file: gone.py" in text and "over-limit" in text


def test_projects_below_and_above(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "pyproject.toml").write_text("[project]\nname = 'no section of ours'\n")
    assert find_project(folder / "deep" / "er") == folder / "pyproject.toml"
    memsize.check(update=True)
    os.chdir(folder / "deep")
    found = json.loads(shown(capsys, "--format", "json"))
    assert (found["project"], found["targets"][0]["file"]) == ("../pyproject.toml", "../net.py")
    assert Path.cwd() == folder / "deep"


# -- baselines ---------------------------------------------------------------------------------------------------------

BASELINE = Baseline({"target": "a"}, {"stored": 3}, {"": LayerFigures(1, 2), "é": LayerFigures(0, 4)})


def test_baselines_come_back_and_others_stay(folder: Path) -> None:
    file = folder / "b.json"
    assert write_baselines(file, {"b": BASELINE})
    assert write_baselines(file, {"a": BASELINE})
    assert not write_baselines(file, {"a": BASELINE})
    assert read_baselines(file) == {"a": BASELINE, "b": BASELINE}
    assert list(json.loads(file.read_text(encoding="utf-8"))["targets"]) == ["a", "b"]
    golden("baseline.json.txt", file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema": "memsize.baseline/2", "targets": {}}', "was written by a newer memsize"),
        ('{"schema": "memsize.report/1"}', "is not a baseline of memsize"),
        ("<<<<<<< HEAD", "is damaged"),
        ('{"schema": "memsize.baseline/1", "targets": {"net.py:Net": {"figures": {}}}}', "is damaged"),
        (
            '{"schema": "memsize.baseline/1", "targets": {"a": {"settings": {}, "figures": {"x": "1"}, "layers": {}}}}',
            "",
        ),
    ],
)
def test_what_is_no_baseline_is_refused_and_never_overwritten(
    content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path("memsize-baseline.json")
    file.write_text(content)
    assert says in shown(capsys, status=2)
    assert says in refused(capsys, "--update") and file.read_text() == content


def test_a_baseline_of_another_setting(capsys: pytest.CaptureFixture[str]) -> None:
    memsize.check(update=True)
    Path("pyproject.toml").write_text(PROJECT.replace('input = "64"', 'input = "2,64"'))
    assert "its baseline is for another setting (input 64): memsize check --update" in shown(capsys, status=2)


def test_nothing_to_update(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text('[[tool.memsize.target]]\ntarget = "net.py:Net"\n')
    assert "names no baseline" in refused(capsys, "--update")


# -- formats -----------------------------------------------------------------------------------------------------------


def checked() -> Check:
    """A check with something of everything."""
    limit = Figure("stored", "bytes", 2 * 2**20, 2**20, holds=False)
    grown = Figure("stored", "bytes", 2 * 2**20, None, 2**20, 2**20, holds=False)
    over = Finding("over-limit", "{name}: 100% over\u202e.", {"name": "stored"}, bytes=2**20, layers=("a, b",))
    grew = Finding("grew", "stored grew by {by}.", {"by": Bytes(2**20)}, bytes=2**20, layers=("fc",))
    unused = Finding("unused-parameters", "x is <never> read & kept.", bytes=4, layers=("x",))
    problems = (Problem("error", over, limit.case), Problem("error", grew, grown.case), Problem("warning", unused))
    holding = (
        Figure("parameters", "elements", 12, 13),
        limit,
        grown,
        Figure("fits_batch", "samples", None, 8, holds=False),
    )
    return Check(
        "pyproject.toml",
        (
            CheckedModel("nets/net.py:Net", "nets/a net.py", 5, holding, problems),
            CheckedModel("gone.py:Net", "pyproject.toml", 9, error="no such file: gone.py"),
            CheckedModel("fine", "pyproject.toml", 12, (Figure("stored", "bytes", 1, 2),)),
        ),
        ("memsize-baseline.json",),
    )


@pytest.mark.parametrize(
    ("name", "format"),
    [("txt", "text"), ("md", "markdown"), ("html", "html"), ("json", "json"), ("csv", "csv"), ("github.txt", "github"),
     ("junit.xml", "junit")],
)  # fmt: skip
def test_golden(name: str, format: str) -> None:
    golden(f"check.{name}", render(checked(), format))


def test_bars_are_in_per_cent_of_limits() -> None:
    # Of growth, the limit is what the baseline allows. Batches that fit, and what has no limit, have no bar.
    figures = (
        Figure("parameters", "bytes", 301, 300, holds=False),  # 100.3 %, which is more than it may be
        Figure("parameters", "elements", 100, None, 80, 80, holds=False),
        Figure("stored", "bytes", 500, None, 500, 510),  # 98.04 %
        Figure("activations", "bytes", 70, None),
        Figure("fits_batch", "samples", 4, 4),
    )
    bars = document(Check("", (CheckedModel("net", "net.py", 1, figures),))).bars()
    assert bars is not None and bars.kind == "percent" and bars.limit == Limit("limit", 100)
    assert [(bar.labels[0].text, bar.sizes) for bar in bars.bars] == [
        ("parameters, growth", (100, 25)),
        ("parameters", (100, 1)),
        ("stored, growth", (99, 0)),
    ]
    several = (CheckedModel("a", "a.py", 1, figures[:1]), CheckedModel("b", "b.py", 1, figures[:1]))
    shared = document(Check("", several)).bars()
    assert shared is not None
    assert [bar.labels[0].text for bar in shared.bars] == ["parameters of a", "parameters of b"]


@pytest.mark.parametrize("height", range(12, 30))
def test_errors_come_before_pictures_on_every_screen(height: int) -> None:
    drawn = render(checked(), "text", width=60, height=height).splitlines()
    errors = [n for n, line in enumerate(drawn) if " error " in line or "- error: " in line]
    pictures = [n for n, line in enumerate(drawn) if "in % of" in line or line.startswith("target ")]
    assert len(errors) >= 2 and all(max(errors) < n for n in pictures)


def test_statuses() -> None:
    found = checked()
    assert found.status() == 2  # a target could not be checked, whatever the others say
    wrong = Check("", found.models[:1])
    assert [wrong.status(level) for level in ("error", "warning", "note", "never")] == [1, 1, 1, 0]  # type: ignore[arg-type]
    warned = Check("", (CheckedModel("a", "b", 1, (), found.models[0].problems[2:]),))
    assert [warned.status(level) for level in ("error", "warning", "note")] == [0, 1, 1]  # type: ignore[arg-type]
    assert Check("", found.models[2:]).status("note") == 0


def test_junit_is_read_as_tests() -> None:
    root = ElementTree.fromstring(render(checked(), "junit").encode())
    assert root.attrib == {"name": "memsize", "tests": "7", "failures": "2", "errors": "1"}
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["nets/net.py:Net", "gone.py:Net", "fine"]
    cases = {case.get("name"): [child.tag for child in case] for case in suites["nets/net.py:Net"]}
    assert cases == {
        "parameters": [],
        "stored": ["failure"],
        "stored, growth": ["failure"],
        "fits_batch": [],
        "unused-parameters": ["system-out"],
    }
    for suite in root:
        assert int(suite.get("tests", "")) == len(suite)


def test_annotations_are_escaped() -> None:
    first, *_ = render(checked(), "github").splitlines()
    assert first == (
        "::error file=nets/a net.py,line=5,title=memsize%3A over-limit::nets/net.py:Net: stored: 100%25 over\\u202e."
    )


def test_files_of_other_formats(capsys: pytest.CaptureFixture[str]) -> None:
    memsize.check(update=True)
    for name, begins in (("a.xml", "<?xml"), ("a.md", "##"), ("a.txt", "All limits hold")):
        assert run(("check", "-o", name)) == 0
        assert Path(name).read_text(encoding="utf-8").startswith(begins)
    assert shown(capsys, "--format", "github") == "\n"
    assert shown(capsys, "--format", "terminal") == shown(capsys)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, 'needs a target, such as target = "model.py:Net"'),
        ({"target": "a.py", "limit": {}}, "has no key 'limit': did you mean limits"),
        ({"target": "a.py", "limits": {"train_peak": "1 GiB"}}, "no limit 'train_peak': did you mean training_peak"),
        ({"target": "a.py", "limits": {"stored": "1 GoB"}}, "the limit stored: cannot read '1 GoB' as a size"),
        ({"target": "a.py", "limits": {"stored": 1.5}}, "the limit stored is '1.5': write it like '40 MiB'"),
        ({"target": "a.py", "limits": {"fits_batch": "1 GiB"}}, "the limit fits_batch is '1 GiB': write it like 16"),
        ({"target": "a.py", "limits": {"fits_batch": 0}}, "the limit fits_batch is '0'"),
        ({"target": "a.py", "limits": {"training_peak": "1 GiB"}}, "needs training steps: name an optimizer"),
        ({"target": "a.py", "loss": "mse"}, "loss is for training steps"),
        ({"target": "a.py", "batch_size": True}, "batch_size is 'True': it should be a whole number"),
        ({"target": "a.py", "input": "3,x", "train": "adamw"}, "input '3,x'"),
        ({"target": "a.py", "input": [3]}, "input is a text"),
        ({"target": "a.py", "input": "3", "inputs": "a.py:f"}, "give the inputs as input or as inputs"),
        ({"target": "a.py", "train": "adamm"}, "no optimizer 'adamm'"),
        ({"target": "a.py", "max_growth": "1%"}, "max_growth compares with a baseline"),
        ({"target": "a.py", "max_growth": "lots", "baseline": "b"}, "max_growth is 'lots': write it like '1%'"),
        ({"target": "a.py", "scenario": "fp61"}, "no scenario 'fp61'"),
    ],
)
def test_sections_that_cannot_be_meant(section: dict[str, Any], says: str) -> None:
    with pytest.raises(MemsizeError) as caught:
        parse_section(section)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.memsize.target]\ntarget = 'a'\n", "write targets as [[tool.memsize.target]], with two brackets"),
        ("[tool.memsize]\nselekt = []\n", "has no key 'selekt': did you mean select"),
        ("[[tool.memsize.target]]\ntarget = 'a'\n[[tool.memsize.target]]\ntarget = 'a'\n", "two targets are 'a'"),
        (
            "[tool.memsize.severity]\ngrew = 'bad'\n[[tool.memsize.target]]\ntarget = 'a'\n",
            "severity is a table such as",
        ),
        ("\n\n[[tool.memsize.target]]\ntarget = 'a'\nbatch_size = 'x'\n", "pyproject.toml:3: batch_size is 'x'"),
        ("[tool.memsize]\nselect = []\n", "has no [[tool.memsize.target]]"),
        ("[tool", "is not TOML"),
    ],
)
def test_files_that_cannot_be_meant(text: str, says: str) -> None:
    Path("pyproject.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_project(Path("pyproject.toml"))
    assert says in str(caught.value)


def test_limits_and_growth() -> None:
    given = {"parameters": "40 MiB", "trainable": 10_000, "stored": 5, "fits_batch": "16"}
    assert parse_limits(given) == (
        Bound("parameters", 40 * 2**20, "bytes"),
        Bound("trainable", 10_000, "elements"),
        Bound("stored", 5, "bytes"),
        Bound("fits_batch", 16, "samples"),
    )
    assert parse_limits({"parameters": 40}) == (Bound("parameters", 40, "elements"),)
    assert (Growth.parse("1%").most(1000), Growth.parse("1 KiB").most(1000), Growth.parse(7).most(0)) == (1010, 2024, 7)
    assert Growth().most(5) == 5 and "training_peak" in LIMITS


# -- a first section ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "# mine\n[project]\nname = 'x'  # keep", "[project]\r\nname = 'x'\r\n"])
def test_a_first_section(text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("pyproject.toml")
    file.unlink() if text is None else file.write_bytes(text.encode())
    assert run(("init", "net.py:Net", "--input", "64", "--train", "adamw", "--arg", "a=1")) == 2
    capsys.readouterr()
    assert (file.read_bytes().decode() if file.exists() else None) == text
    options = ("--input", "64", "--train", "adamw", "--gpu", "t4")
    assert run(("init", "net.py:Net", *options)) == 0
    assert capsys.readouterr().err.startswith("Added to ")
    after = file.read_bytes().decode()
    assert after.startswith(text or "") and ("\r\n" in after) == ("\r\n" in (text or ""))
    # 2,410 · 4 · 1.1 = 10,604 bytes = 10.36 KiB, rounded up
    assert 'limits = { parameters = "11 KiB", inference_peak = ' in after and 'gpu = "t4"' in after
    (target,) = read_project(file).targets
    assert target.run.training is not None and [bound.name for bound in target.limits][-1] == "training_peak"
    assert "ok" in shown(capsys)
    assert run(("init", "net.py:Net", *options)) == run(("init", "net.py:Net", *options, "--scenario", "fp16")) == 0
    assert [target.name for target in read_project(file).targets] == ["net.py:Net", "net.py:Net 2", "net.py:Net 3"]


def test_a_first_section_says_all_that_was_asked_for() -> None:
    options = (
        "--input",
        "64",
        "--batch-size",
        "3",
        "--freeze",
        "head",
        "--imbalance",
        "2",
        "--whole",
        "--train",
        "sgd",
    )
    Path("pyproject.toml").unlink()
    assert run(("init", "net.py:Net", *options, "--ema", "--loss", "sum")) == 0
    (target,) = read_project(Path("pyproject.toml")).targets
    model, training = target.run.model, target.run.training
    assert (model.batch_size, model.freeze, model.imbalance, model.whole) == (3, "head", 2, True)
    assert training is not None and (training.optimizer, training.ema, training.loss) == ("sgd", True, "sum")


def test_settings_of_a_baseline_are_the_options_that_differ_from_their_defaults() -> None:
    plain = {"batch_size": "1", "mode": "train", "scenario": "as-given", "target": "a.py:A"}
    assert parse_section({"target": "a.py:A"}).settings == plain
    section = {"target": "a.py:A", "input": ["3", "x=4:int64"], "arguments": {"b": "c", "a": 1}, "lora": "r=4"}
    assert parse_section({**section, "train": "sgd", "stack": "torch=2.6", "batch_size": 2}).settings == plain | {
        "input": "3 x=4:int64",
        "arguments": "a=1, b='c'",
        "lora": "r=4",
        "train": "sgd",
        "stack": "torch=2.6",
        "batch_size": "2",
    }


def test_what_no_first_section_can_be_written_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("check", "--input", "64")) == 2
    assert "no such option" in capsys.readouterr().err
    assert "no such file" in refused(capsys, "gone.py:Net", command="init")
    Path("pyproject.toml").write_text("[tool]\nmemsize = { target = [] }\n")
    assert "cannot take a [[tool.memsize.target]]" in refused(capsys, "net.py:Net", command="init")
    assert Path("pyproject.toml").read_text() == "[tool]\nmemsize = { target = [] }\n"


def test_in_python() -> None:
    Path("pyproject.toml").write_text('[[tool.memsize.target]]\ntarget = "net.py:Net"\n')
    with pytest.raises(OutputError, match="names no baseline"):
        memsize.check(update=True)
    Path("pyproject.toml").unlink()
    with pytest.raises(InputError, match="memsize init TARGET writes one"):
        memsize.check()
