"""Ctrl-C: status 130 at whatever moment it comes, with what was found until then and not a word more."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsize
from memsize.cli import run
from tests.conftest import ROOT, Write
from tests.process import changes, ctrl_c, interrupt, interrupts_raised, isolated, process_state, side_by_side
from tests.workloads import _Parts

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


@pytest.mark.thorough
@pytest.mark.parametrize("moment", MOMENTS)
def test_silence_and_130(write: Write, moment: str) -> None:
    folder = write("model.py", MOMENTS[moment]).parent
    process = started(command("timeline", "model.py:Net", "--input", "4", "--train", "sgd"), folder)
    assert process.communicate(timeout=120) == (b"", b"")
    assert process.returncode == 130
    if (folder / "child").exists():
        with pytest.raises(ProcessLookupError):
            gone((folder / "child").read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_script_that_is_interrupted_reports_what_ran(write: Write, on_gpu: bool) -> None:
    text = f"""
import os, signal, time, torch
weight = torch.ones(1000, 1000, device="{"cuda" if on_gpu else "cpu"}")
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
    script = write("train.py", text)
    process = started(command("run", "--format", "json", "train.py"), script.parent)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in err and b"KeyboardInterrupt" not in err
    if not on_gpu:
        assert out == b""
        return
    told = json.loads(out)
    assert "KeyboardInterrupt" in told["failure"]
    assert b"4000000" in out  # 1000 * 1000 * 4 bytes


INTERRUPTING = """
import os, signal, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1000, 1000)
    def forward(self, x):
        if {when}:
            os.kill(os.getpid(), signal.SIGINT)
        return self.body(x)
"""
IN_BF16 = INTERRUPTING.format(when="self.body.weight.dtype == torch.bfloat16")
BEYOND_BATCH_13 = INTERRUPTING.format(when="len(x) > 13")


def test_an_interrupted_report_shows_what_it_has(write: Write, warm: list[str]) -> None:
    folder = write("model.py", IN_BF16).parent
    asked = ["--scenario", "fp32,fp16,bf16,int8-weight", "-j", "1", "-o", "report.html"]
    process = started([*warm, "-m", "memsize", "report", "model.py:Net", "--input", "1000", *asked], folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b"report.html was not written\n" and not (folder / "report.html").exists()
    verdict, table = out.decode().partition("\n\n")[2].partition("\n\n")[::2]
    assert verdict.startswith("Interrupted: bf16 and int8-weight are missing.\n")
    assert "fp16" in table  # 1,001,000 parameters of 2 bytes
    assert "1.91" in table


def test_an_interrupted_report_as_json(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{write('model.py', IN_BF16)}:Net"
    asked = ["report", model, "--input", "1000", "--scenario", "fp32,fp16,bf16", "-j", "1", "--format"]
    assert run([*asked, "json"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["missing"] == ["bf16"]
    assert [(each["name"], each["parameter_bytes"]) for each in told["scenarios"]] == [
        ("fp32", 4 * 1_001_000),
        ("fp16", 2 * 1_001_000),
    ]
    assert told["findings"][0]["code"] == told["verdict"][0]["code"] == "interrupted"
    assert run([*asked, "csv"]) == 130
    assert capsys.readouterr() == ("", "Interrupted: bf16 is missing.\n")


def test_nothing_is_shown_before_anything_is_known(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{write('model.py', INTERRUPTING.format(when='True'))}:Net"
    assert run(["report", model, "--input", "1000", "-j", "1"]) == 130
    assert run(["fit", model, "--input", "1000", "-j", "1"]) == 130
    assert capsys.readouterr() == ("", "")


class Stopping(nn.Module):
    """Interrupts the process that was there first, once the file `known` says that something is known."""

    def __init__(self, known: Path) -> None:
        super().__init__()
        self.body = nn.Linear(10, 10)
        self.known, self.first = known, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if self.body.weight.dtype == torch.bfloat16:
            while not self.known.exists():
                time.sleep(0.01)
            os.kill(self.first, signal.SIGINT)
            time.sleep(60)
        return self.body(x)


@pytest.mark.parametrize("jobs", [1, 2])
def test_python_gets_it_in_the_exception(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, add = tmp_path / "known", _Parts.add

    def noted(parts: _Parts, part: Any) -> None:
        add(parts, part)
        if {"fp32", "fp16"} <= parts.results.keys():
            known.touch()

    monkeypatch.setattr(_Parts, "add", noted)
    with side_by_side(jobs), pytest.raises(memsize.Interrupted) as ended:
        memsize.report(Stopping(known), (10,), scenarios="fp32,fp16,bf16")
    assert ended.value.answer.missing == ("bf16",)
    assert [result.name for result in ended.value.answer.scenario_results] == ["fp32", "fp16"]


def test_an_interrupted_search_says_how_far_it_came(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The size 13 is tried first."""
    model = f"{write('model.py', BEYOND_BATCH_13)}:Net"
    asked = ["fit", model, "--input", "1000", "--scenario", "fp32,fp16", "--gpu", "t4,a100", "-j", "1"]
    assert run([*asked, "--format", "json"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["missing"] == [
        "the rest of fp32 on Tesla T4",
        "fp32 on A100 40GB",
        "fp16 on Tesla T4",
        "fp16 on A100 40GB",
    ]
    assert [(row["scenario"], row["gpu"], row["status"], row["size"]) for row in told["rows"]] == [
        ("fp32", "Tesla T4", "open", 13)
    ]
    assert run(asked) == 130
    assert "Interrupted: the rest of fp32 on Tesla T4" in capsys.readouterr().out


@pytest.mark.parametrize("forks", [True, False])
def test_an_interrupted_search_of_a_script_too(
    forks: bool, write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the script runs in this process, as on platforms that do not fork."""
    if not forks:
        monkeypatch.setattr("memsize.analysis.fit.script_search.can_fork", lambda: False)
    text = f"""
import os, signal, sys, torch
batch = int(sys.argv[2])
torch.ones(batch, 2**20, device="cuda")
if batch > 16:
    os.kill({os.getpid()}, signal.SIGINT)
"""
    asked = ["fit-script", "--gpu", "t4", "--vary-argument", "batch", "--format", "json", str(write("train.py", text))]
    assert run([*asked, "--batch", "8"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["missing"] == ["the rest of Tesla T4"]
    assert [(row["status"], row["size"]) for row in told["rows"]] == [("open", 16)]


def test_an_interrupted_sweep_shows_its_cells(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("first.py", INTERRUPTING.format(when="False"))
    write("second.py", INTERRUPTING.format(when="True"))
    grid = write("sweep.toml", 'target = ["first.py:Net", "second.py:Net"]\ninput = "1000"\n')
    assert run(["sweep", str(grid), "-j", "1", "--format", "json"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert (told["missing"], [cell["target"] for cell in told["cells"]]) == (["second.py:Net"], ["first.py:Net"])
    assert told["findings"][0]["text"] == (
        "Interrupted: 1 of 2 cells is missing: second.py:Net. The same command continues with the missing cells."
    )


def test_a_sweep_that_is_interrupted_before_its_first_cell_says_so(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("model.py", INTERRUPTING.format(when="True"))
    grid = write("sweep.toml", 'target = "model.py:Net"\ninput = "1000"\nbatch_size = [1, 2]\ngpu = ["t4", "l4"]\n')
    said = "Interrupted before any of 4 cells was done. The same command starts over."
    for format, out, err in (("text", f"sweep.toml   0 cells\n\n{said}\n", ""), ("csv", "", f"{said}\n")):
        assert run(["sweep", str(grid), "-j", "1", "--format", format]) == 130
        assert capsys.readouterr() == (out, err)


def gone(pid: str) -> None:
    """Wait for the end of a process, which raises ProcessLookupError."""
    for _ in range(1000):
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # it has ended, and whoever adopted it has not looked yet
        os.kill(int(pid), 0)
        time.sleep(0.01)


def test_ctrl_c_that_was_ignored_stays_ignored(write: Write, warm: list[str]) -> None:
    write("model.py", MOMENTS["a callback of C++"])
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from memsize.__main__ import main; main()"
    arguments = [*warm, "-c", code, "timeline", "model.py:Net", "--input", "4", "--train", "sgd"]
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
        with pytest.raises(KeyboardInterrupt), interrupts_raised():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is ending
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_calls_the_command_keeps_its_ctrl_c(write: Write) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run(["report", f"{write('model.py', '')}:Net"]) == 2
    with interrupts_raised():
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


NET = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())


def interrupted(seconds: float, ask: Callable[[], object]) -> bool:
    """Whether Ctrl-C after so long a time stopped `ask`."""

    def interrupt_after() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_after)
    done = False
    with suppress(KeyboardInterrupt):
        thread.start()
        ask()
        done = True
        thread.join(60)  # it comes here at the latest
    thread.join()
    return not done


def test_in_python_it_leaves_nothing_half_done() -> None:
    """In a notebook the process goes on: PyTorch must not stay patched, whenever it comes."""

    def ask() -> object:
        return memsize.trace(NET, (8,), optimizer="adamw").trace

    usual, chosen = ask(), random.Random(0)
    begun = time.monotonic()
    ask()
    lasts = time.monotonic() - begun
    gc.collect()  # files that earlier tests left open are closed before they are counted
    before = process_state()
    stopped = sum(interrupted(chosen.random() * lasts, ask) for _ in range(30))
    assert stopped
    assert not changes(before, process_state())
    assert ask() == usual


class Waiting(nn.Module):
    """Waits without calling any op, and ends after a minute."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6000):
            time.sleep(0.01)
        return x


class Computing(nn.Module):
    """Calls op after op, nearly all the time in PyTorch's or memsize's own code."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1_000_000):
            x = x + 1
        return x


@pytest.mark.parametrize("model", [Waiting(), Computing()])
def test_a_forward_is_stopped_at_once(model: nn.Module) -> None:
    assert interrupted(0.5, lambda: memsize.trace(model, (8,), optimizer=None))


def test_a_second_one_does_not_wait() -> None:
    def in_memsize() -> None:
        ctrl_c._interrupted(signal.SIGINT, None)  # as the handler is called where no frame is the user's

    with ctrl_c.deferred():
        in_memsize()
        with pytest.raises(KeyboardInterrupt):
            in_memsize()
    with pytest.raises(KeyboardInterrupt), ctrl_c.deferred():
        in_memsize()
    with ctrl_c.deferred():
        ctrl_c.raise_waiting()


def test_waiting_for_another_thread_is_stopped_too() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with isolated():
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(60)
        assert interrupted(0.2, lambda: memsize.trace(NET, (8,), optimizer=None))
    finally:
        go_on.set()
        thread.join()


PYTHON_STARTS = (b"Fatal Python error: init_import_site", b"Could not import runpy module")
"""What Python itself says before it runs anything of ours."""


def lasting(arguments: list[str], folder: Path) -> float:
    """How many seconds a command takes when nothing interrupts it."""
    begun = time.monotonic()
    started(arguments, folder).communicate(timeout=300)
    return time.monotonic() - begun


def is_part(status: int, said: bytes) -> bool:
    """Whether a part of the report was shown, and said to be one."""
    unwritten = said.endswith(b"report.html was not written\n")
    return status == 130 and b"\nInterrupted: " in said and unwritten


@pytest.mark.slow
def test_at_a_hundred_random_moments(toy_target: str, tmp_path: Path) -> None:
    """Before Python has a handler of its own, and when it has put that away, the signal itself ends the process: shells
    call that 130 too.
    """
    arguments = command("report", toy_target, "--input", "3,64,64", "--train", "adamw", "-o", "report.html", "--force")
    lasts, chosen = min(lasting(arguments, tmp_path) for _ in range(3)), random.Random(0)
    endings = []
    for _ in range(100):
        process = started(arguments, tmp_path)
        time.sleep(chosen.random() * lasts)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        endings.append((process.returncode, out + err))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]
    wrote = b"Wrote report.html\n"
    allowed = {(0, wrote), *((status, said) for status in (130, -signal.SIGINT) for said in (b"", wrote))}
    rest = [each for each in endings if each not in allowed and not each[1].startswith(PYTHON_STARTS)]
    assert [each for each in rest if not is_part(*each)] == []
    assert sum(status == 130 for status, _ in endings) > 50
