"""The pre-commit hook and the GitHub Action: what they name exists, and the action's own shell lines run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from memsize import cli
from tests.conftest import ROOT

yaml = pytest.importorskip("yaml")
PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_hook_is_a_command() -> None:
    (hook,) = read(".pre-commit-hooks.yaml")
    program, name = hook["entry"].split()
    assert program == "memsize" and name in cli.memsize.list_commands(click.Context(cli.memsize))
    assert hook["pass_filenames"] is False and hook["id"] in PAGE


def test_every_input_of_the_action_is_documented() -> None:
    action = read("action.yml")
    inputs = {name: (value["default"] or "") for name, value in action["inputs"].items()}
    table = PAGE.partition("| input | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (?:`([^`]*)`)? ?\|", table, re.MULTILINE)
    assert dict(rows) == inputs
    assert list(action["outputs"]) == ["exit-code"] and "`exit-code`" in PAGE
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == set(inputs)


def test_examples_can_be_read() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3 and all(isinstance(yaml.safe_load(block), dict) for block in blocks)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the action's steps are for bash")
@pytest.mark.parametrize(
    ("limit", "paths", "output", "fail_on", "status"),
    [
        (12, ".", "", "error", 0),
        (11, ". \n  other/pyproject.toml", "", "error", 1),
        (11, "other", "", "never", 0),
        (11, ".", "out file.xml", "error", 1),
        (12, "gone", "", "error", 2),
    ],
)
def test_the_steps_of_the_action(
    limit: int, paths: str, output: str, fail_on: str, status: int, tmp_path: Path
) -> None:
    section = f'[[tool.memsize.target]]\ntarget = "net.py:net"\nlimits = {{ parameters = {limit} }}\n'
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "net.py").write_text("from torch import nn\n\nnet = nn.Linear(3, 3)\n")  # 3 · 3 + 3 = 12 parameters
        (folder / "pyproject.toml").write_text(section)
    program = tmp_path / "bin" / "memsize"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memsize "$@"\n')
    program.chmod(0o755)
    python = program.with_name("python")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    told, summary = tmp_path / "told", tmp_path / "summary.md"
    given = {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_OUTPUT": str(told),
        "GITHUB_STEP_SUMMARY": str(summary),
        "RUNNER_TEMP": str(tmp_path),
        **{"PATHS": paths, "FORMAT": "junit" if output else "github", "OUTPUT": output, "FAIL_ON": fail_on},
    }
    script = next(step["run"] for step in read("action.yml")["runs"]["steps"] if step.get("id") == "check")
    command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | given, capture_output=True, text=True, check=False)
    assert (done.returncode, told.read_text()) == (status, f"exit-code={status}\n"), done.stderr
    if status < 2:
        assert summary.read_text(encoding="utf-8").startswith("## ")
    if output:
        assert '"over-limit"' in (tmp_path / output).read_text(encoding="utf-8")
    elif status < 2:
        wrong = done.stdout.count("::error file=")
        assert wrong == (0 if limit == 12 else len(paths.split()))


def test_a_release_is_what_make_builds_and_needs_no_password() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    assert {"run": "make release"} in jobs["build"]["steps"]
    (_, publish) = jobs["publish"]["steps"]
    assert publish == {"uses": "pypa/gh-action-pypi-publish@release/v1"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
