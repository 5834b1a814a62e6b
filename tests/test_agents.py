"""What agents read is up to date: SKILL.md and llms.txt are made from the commands."""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from memsize.cli import run
from tests.agents import LLMS, SKILL, llms, skill
from tests.conftest import ROOT


def test_they_are_up_to_date() -> None:
    assert SKILL.read_text("utf-8") == skill(), "python -m tests.agents writes it"
    assert LLMS.read_text("utf-8") == llms(), "python -m tests.agents writes it"


def test_a_skill_has_a_name_and_says_when_to_use_it() -> None:
    # https://agentskills.io/specification: a name of lower-case letters, a description of at most 1024 characters.
    head = yaml.safe_load(skill().split("---")[1])
    assert head["name"] == "memsize" and len(head["description"]) <= 1024


def test_the_server_needs_the_sdk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)  # as if it were not installed
    assert run(["mcp"]) == 2
    assert capsys.readouterr().err == "error: memsize mcp needs the package mcp: pip install 'memsize[mcp]'\n"


def test_pages_exist() -> None:
    links = re.findall(r"\]\((\S+)\)", llms())
    assert len(links) > 20 and all((ROOT / link).is_file() for link in links)
