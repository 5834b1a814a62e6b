"""stdout holds the answer and nothing else, whatever a model writes, and however it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Write
from tests.process import stdout_to_stderr

TARGET = """
import atexit, ctypes, os, subprocess, sys, threading, time
from torch import nn

def say(where):
    print("print in", where)
    if sys.__stdout__:
        sys.__stdout__.write(f"stream in {where}\\n")
    os.write(1, f"descriptor in {where}\\n".encode())
    os.system(f"echo shell in {where}")
    subprocess.run(["echo", "process in", where])
    ctypes.CDLL(None).printf(f"library in {where}\\n".encode())

say("import")
atexit.register(say, "exit")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        say("constructor")
        self.body = nn.Linear(4, 4)
    def forward(self, x):
        say("forward")
        return self.body(x)
"""
WAYS = ("print", "stream", "descriptor", "shell", "process", "library")


@pytest.fixture
def command(write: Write) -> list[str]:
    target = write("model.py", TARGET)
    return [sys.executable, "-m", "memsize", "report", f"{target}:Net", "--input", "4", "-s", "fp32", "-f", "json"]


def ended(command: list[str], **streams: int) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, timeout=120, check=False, **streams)  # type: ignore[call-overload]


def test_what_a_model_writes_goes_to_stderr(command: list[str], warm: list[str]) -> None:
    done = ended([*warm, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0
    assert json.loads(done.stdout)["model"] == "model.py:Net"
    said = done.stderr.decode()
    for where in ("import", "constructor", "forward", "exit"):
        assert [way for way in WAYS if f"{way} in {where}" not in said] == []


def test_closed_streams(command: list[str], tmp_path: Path) -> None:
    """The answer goes to a file; what the model writes to a closed stream is lost."""
    line = " ".join([*command, "-o", str(tmp_path / "answer.json"), ">&- 2>&-"])
    done = subprocess.run(["sh", "-c", line], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "answer.json").read_text())["model"] == "model.py:Net"


def opened() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors cannot be counted here")
def test_no_descriptor_is_left_open(capfd: pytest.CaptureFixture[str]) -> None:
    before = opened()
    for error in (None, ValueError("oh")):
        for _ in range(3):
            try:
                with stdout_to_stderr():
                    os.write(1, b"elsewhere\n")
                    if error:
                        raise error
            except ValueError:
                pass
    assert opened() == before
    print("here")
    out, err = capfd.readouterr()
    assert (out, err) == ("here\n", "elsewhere\n" * 6)


@pytest.mark.parametrize("make", [lambda: None, lambda: object()])
def test_a_stream_that_is_no_file(monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    with stdout_to_stderr():
        assert sys.stdout is sys.stderr
    assert sys.stdout is stream
