"""What every test may use: steady Hypothesis runs, the toy model's file, and the command line as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.zoo.operators import declare

Python = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[[str, str], Path]

ROOT = Path(__file__).resolve().parent.parent

# A shared machine stalls now and then: no deadline. The same examples every time: a red run can be repeated.
settings.register_profile(
    "memsize", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("memsize")

# Before anything imports torchvision: what it registers on the way to failing cannot be taken back.
declare()


@pytest.fixture(scope="session")
def toy_target() -> str:
    """The target of the demo: the toy CNN's file and class."""
    return f"{ROOT / 'notebooks' / 'model.py'}:Test"


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Runs the test's Python with the given arguments in `tmp_path`, and returns what came out."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False
        )

    return run


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a text file below `tmp_path`, with its folders."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file
