"""Ctrl-C: status 130 and not a word, at whatever moment it comes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memsize import interrupt
from memsize.cli import run
from tests.conftest import ROOT, Write

MOMENTS = {
    "import": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
    "a callback of C++": """
import os, signal, torch
from torch import nn

class Signalled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
    def forward(self, x):
        return Signalled.apply(self.body(x))
""",
    "beside a child": """
import multiprocessing, os, signal, time
from torch import nn
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
open("child", "w").write(str(child.pid))
os.kill(os.getpid(), signal.SIGINT)
""",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "memsize", *arguments]


def started(arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("moment", MOMENTS)
def test_silence_and_130(write: Write, moment: str) -> None:
    folder = write("model.py", MOMENTS[moment]).parent
    process = started(command("timeline", "model.py:Net", "--input", "4", "--train", "sgd"), folder)
    assert process.communicate(timeout=120) == (b"", b"")
    assert process.returncode == 130
    if (folder / "child").exists():
        with pytest.raises(ProcessLookupError):
            gone((folder / "child").read_text())


def gone(pid: str) -> None:
    """Wait for the end of a process, which raises ProcessLookupError."""
    for _ in range(1000):
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # it has ended, and whoever adopted it has not looked yet
        os.kill(int(pid), 0)
        time.sleep(0.01)


def test_ctrl_c_that_was_ignored_stays_ignored(write: Write) -> None:
    write("model.py", MOMENTS["a callback of C++"])
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from memsize.__main__ import main; main()"
    arguments = [sys.executable, "-c", code, "timeline", "model.py:Net", "--input", "4", "--train", "sgd"]
    process = started(arguments, write("empty", "").parent)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert b"Net" in out


def test_a_file_that_is_being_written_can_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupt.ends_the_process()
        ending = signal.getsignal(signal.SIGINT)
        assert ending is not before
        with pytest.raises(KeyboardInterrupt), interrupt.raised():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is ending
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_calls_the_command_keeps_its_ctrl_c(write: Write) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run(["report", f"{write('model.py', '')}:Net"]) == 2
    with interrupt.raised():
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_at_a_hundred_random_moments(toy_target: str, tmp_path: Path) -> None:
    """A process that is younger than Python's own handler is ended by the signal itself, which shells call 130 too."""
    arguments = command("report", toy_target, "--input", "3,64,64", "--train", "adamw", "-o", "report.html", "--force")
    begun = time.monotonic()
    assert started(arguments, tmp_path).wait(300) == 0
    lasts, chosen = time.monotonic() - begun, random.Random(0)
    endings = []
    for _ in range(100):
        process = started(arguments, tmp_path)
        time.sleep(chosen.random() * lasts)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        endings.append((process.returncode, out + err))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]
    allowed = {(130, b""), (-signal.SIGINT, b""), (0, b"Wrote report.html\n")}
    assert set(endings) <= allowed
    assert sum(status == 130 for status, _ in endings) > 50
