"""`memsize diff`: revisions in a scratch repository, saved runs, checkpoints, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memsize
from memsize.cli import run
from memsize.errors import TargetError

BEFORE = """
from torch import nn

from parts import block


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(3, 8), block(8, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))
"""
AFTER = BEFORE.replace("block(8, 16)", "block(8, 16), block(16, 16)").replace("self.fc", "self.head")
PARTS = "from torch import nn\n\n\ndef block(a, b):\n    return nn.Conv2d(a, b, 3)\n"

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """A repository of two commits, which is the working folder."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own files beside the modules it imports

    def command(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), check=True, capture_output=True, text=True).stdout

    command("init", "-q", "-b", "main")
    for text in (BEFORE, AFTER):
        (tmp_path / "net.py").write_text(text)
        (tmp_path / "parts.py").write_text(PARTS)
        command("add", "-A")
        command("commit", "-q", "-m", "x")
    return command


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(("diff", *arguments, "--format", "json")) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(("diff", *arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")


CHANGES = [(None, "features.2", "added"), ("fc", "head", "renamed")]
ADDED = 16 * 16 * 3 * 3 + 16


def changes(found: dict[str, object]) -> list[tuple[object, ...]]:
    return [(row["before"], row["after"], row["how"]) for row in found["layers"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("before", ["HEAD~1:net.py:Net", pytest.param("HEAD~1:net:Net", marks=pytest.mark.slow)])
def test_a_revision_beside_what_is_there_now(before: str, git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    status, head = git("status", "--porcelain", "--ignored"), git("rev-parse", "HEAD")
    found = data(capsys, before, "net.py:Net", "--input", "3,16,16", "--train", "sgd", "--gpu", "t4")
    assert changes(found) == CHANGES
    sizes = {row["figure"]: row["after"] - row["before"] for row in found["figures"] if row["of"] == "run"}  # type: ignore[attr-defined]
    assert sizes["parameter_bytes"] == ADDED * 4
    assert {row["of"] for row in found["figures"]} == {"run", "inference peak", "training peak"}  # type: ignore[attr-defined]
    assert any(row["layer"] == "features.2" and row["role"] == "gradient" for row in found["living"])  # type: ignore[attr-defined]
    # Their repository is as it was, and so is the index.
    assert (git("status", "--porcelain", "--ignored"), git("rev-parse", "HEAD")) == (status, head)
    assert git("worktree", "list").count("\n") == 1


@pytest.mark.slow
def test_two_revisions_and_a_tree_that_is_not_committed(git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    Path("net.py").write_text("raise SystemExit('a draft')\n")
    found = data(capsys, "HEAD~1:net.py:Net", "HEAD:net.py:Net")
    assert changes(found) == CHANGES
    assert all(row["of"] == "run" for row in found["figures"])  # type: ignore[attr-defined]
    assert git("status", "--porcelain") == " M net.py\n"


@pytest.mark.slow
def test_the_sibling_of_a_revision_is_its_own(git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    """What a target imports is that of its revision, also where this process has imported the other one."""
    Path("parts.py").write_text(PARTS.replace("3)", "3, bias=False)"))
    memsize.report("net.py:Net")
    sys.modules.pop("parts", None)
    found = data(capsys, "HEAD:net.py:Net", "net.py:Net", "--input", "3,16,16")
    assert [row["how"] for row in found["layers"]] == ["resized"] * 3  # type: ignore[attr-defined]


@pytest.mark.slow
def test_below_a_folder(git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nets").mkdir()
    for name in ("net.py", "parts.py"):
        git("mv", name, f"nets/{name}")
    git("commit", "-q", "-m", "moved")
    monkeypatch.chdir("nets")
    # As in git: below the working folder, else below the repository's own.
    assert memsize.diff("HEAD:net.py:Net", "net.py:Net").is_same
    assert changes_of("HEAD~2:net.py:Net", "net.py:Net") == ["added", "renamed"]
    assert memsize.diff(f"HEAD:{Path('net.py').absolute()}:Net", "net.py:Net").is_same


def changes_of(before: str, after: str) -> list[str]:
    return [how for change in memsize.diff(before, after).layer_changes for how in change.how]


@pytest.mark.slow
def test_a_path_of_python_in_the_repository_is_that_of_the_revision(git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed to be edited is found through ``sys.path``; the old target imports the old one."""
    package = Path("src") / "lib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("width = 4\n")
    Path("train.py").write_text("from torch import nn\nfrom lib import width\nnet = nn.Linear(width, 4)\n")
    git("add", "-A")
    git("commit", "-q", "-m", "lib")
    (package / "__init__.py").write_text("width = 8\n")
    monkeypatch.syspath_prepend(str(Path("src").absolute()))
    found = memsize.diff("HEAD:train.py:net", "train.py:net")
    assert [each.parameters for each in found.totals] == [4 * 4 + 4, 8 * 4 + 4]


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("HEAD~7:net.py:Net", "no revision 'HEAD~7' in this repository"),
        ("HEAD~1:net.py:Nut", "at HEAD~1: net.py has no 'Nut': did you mean Net"),
        pytest.param("HEAD~1:gone.py:Net", "at HEAD~1: no such file: gone.py", marks=pytest.mark.slow),
        pytest.param("HEAD~1:last.pt", "at HEAD~1: ", marks=pytest.mark.slow),
        ("nothing.py:Net", "no such file: nothing.py"),
    ],
)
def test_what_is_no_revision(before: str, says: str, git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, before, "net.py:Net").startswith(says)


@pytest.mark.slow
def test_a_revision_whose_model_fails(git: Git, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "HEAD~1:net.py:Net", "net.py:Net", "--input", "4,16,16").startswith("at HEAD~1: ")


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(TargetError, match="a revision needs a git repository"):
        memsize.diff("HEAD:net.py", "net.py")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(TargetError, match="git is not installed"):
        memsize.diff("HEAD:net.py", "net.py")


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("HEAD~1:model.py:Net", "HEAD~1"),
        ("v1.0:model.py", "v1.0"),
        ("origin/main:nets.text:build", "origin/main"),
        ("main:last.ckpt", "main"),
        ("model.py:Net", None),
        ("package.module:Net", None),
        ("package.module:Outer.Inner", None),
        ("timm:resnet18", None),
        ("hf:config.json", None),
        ("model.py", None),
        (":model.py:Net", None),
    ],
)
def test_what_reads_as_a_revision(empty: Path, text: str, revision: str | None) -> None:
    assert missing_revision(text) == revision


def test_a_file_with_a_colon_in_its_name_is_a_file(empty: Path) -> None:
    Path("a:b.py").write_text("")
    assert missing_revision("a:b.py") is None and missing_revision("a:b.py:Net") is None


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder is a repository without a commit."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(("git", "init", "-q", "-b", "trunk"), check=True)
    return tmp_path


def missing_revision(before: str) -> str | None:
    """The revision that a comparison looks for; None where it looks for none."""
    with pytest.raises(TargetError) as error:
        memsize.diff(before, "gone.py:Net")
    match = re.match("no revision '(.+)' in this repository", str(error.value))
    return match and match[1]


# -- files -------------------------------------------------------------------------------------------------------------


def test_checkpoints_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"a.weight": torch.zeros(4, 4), "b.weight": torch.zeros(10, 4)}
    torch.save({"model": weights, "optimizer": {"state": {0: {"m": torch.zeros(4, 4)}}, "param_groups": []}}, "a.pt")
    weights = {"a.weight": torch.zeros(4, 4).half(), "c.weight": torch.zeros(10, 4), "d.weight": torch.zeros(6)}
    torch.save({"model": weights}, "b.pt")
    found = data(capsys, "a.pt", "b.pt")
    assert changes(found) == [
        ("model.a", "model.a", "stored differently"),
        ("model.b", "model.c", "renamed"),
        ("optimizer", None, "removed"),
        (None, "model.d", "added"),
    ]
    figures = {row["figure"]: (row["before"], row["after"]) for row in found["figures"]}  # type: ignore[attr-defined]
    assert figures["model"] == ((16 + 40) * 4, 16 * 2 + 40 * 4 + 6 * 4)
    assert figures["optimizer"] == (16 * 4, 0)
    assert figures["size"] == (Path("a.pt").stat().st_size, Path("b.pt").stat().st_size)
    assert refused(capsys, "a.pt", "b.pt", "--input", "3").startswith("a.pt and b.pt are files: --input would need")


def test_a_checkpoint_beside_the_model_that_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    torch.save(model.state_dict(), "last.pt")
    found = memsize.diff("last.pt", model)
    assert [pair.before is not None and pair.after is not None for pair in found.pairs] == [True] * 4
    assert not found.layer_changes


def test_saved_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, width in (("before", 4), ("after", 6)):
        model = torch.nn.Sequential(torch.nn.Linear(8, width))
        memsize.report(model, (8,), scenarios="fp32,fp16", train="sgd", gpu="t4").save(f"{name}.memsize")
    found = data(capsys, "before.memsize", "after.memsize")
    assert changes(found) == [("0", "0", "resized")]
    parameters = [(8 * 4 + 4) * 4, (8 * 6 + 6) * 4]
    assert {
        "scenario": "fp32",
        "of": "run",
        "figure": "parameter_bytes",
        "before": parameters[0],
        "after": parameters[1],
    } in found["figures"]  # type: ignore[operator]
    assert (found["peak"], found["gpu"], found["optimizer"]) == ("training peak of fp32", "Tesla T4", "sgd")
    # A comparison is an answer like any other: it is saved and loaded.
    memsize.diff("before.memsize", "after.memsize").save("diff.memsize")
    assert memsize.load("diff.memsize") == memsize.diff("before.memsize", "after.memsize")
    refused(capsys, "before.memsize", "diff.memsize")


@pytest.mark.parametrize("format", ["text", "markdown", "html", "csv"])
def test_every_format(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("old.py", BEFORE), ("new.py", AFTER), ("parts.py", PARTS)):
        Path(name).write_text(text)
    assert run(("diff", "old.py:Net", "new.py:Net", "--format", format)) == 0
    shown = capsys.readouterr().out
    assert "features.2" in shown and "head" in shown
