"""Work in forked processes: its answers and its errors are those of one process, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memsize.cli import run
from tests.process import Workers, can_fork, side_by_side

pytestmark = pytest.mark.skipif(not can_fork(), reason="this platform does not fork")


class Subject:
    """Answers with the process that it runs in, among others."""

    def __init__(self) -> None:
        self.home = os.getpid()
        self.say: Callable[[str], None] = lambda _: None

    def double(self, number: int) -> tuple[int, bool]:
        return 2 * number, os.getpid() == self.home

    def process(self, _: int) -> int:
        time.sleep(0.05)
        return os.getpid()

    def refuse(self, number: int) -> int:
        if number == 1:
            raise ValueError(f"no {number} in {os.getpid()}")
        return number

    def unpicklable(self, number: int) -> Any:
        return lambda: number

    def unreadable(self, number: int) -> Exception:
        return PickyError(number, "twice")

    def vanish(self, number: int) -> int:
        if os.getpid() != self.home and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def warn(self, number: int) -> int:
        warnings.warn("the same for each", FutureWarning, stacklevel=1)
        return number

    def announce(self, number: int) -> int:
        self.say(f"number {number}")
        return number


class PickyError(Exception):
    """Its constructor wants more than it keeps, so that it cannot be read from a pickle."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number} {text}")


def asked(method: str, count: int = 4, jobs: int = 2, subject: Subject | None = None) -> list[Any]:
    with side_by_side(jobs), Workers(subject or Subject(), lambda _: None) as pool:
        return pool.answers([(method, number) for number in range(count)])


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_answers_come_in_the_order_of_the_requests() -> None:
    assert asked("double", 7) == [(2 * number, False) for number in range(7)]


def test_as_many_processes_as_jobs_and_no_more_than_requests() -> None:
    assert len(set(asked("process", 6, jobs=2))) == 2
    assert len(set(asked("process", 3, jobs=8))) == 3


@pytest.mark.parametrize(("count", "jobs"), [(4, 1), (1, 4)])
def test_one_job_or_one_request_forks_nothing(count: int, jobs: int) -> None:
    assert asked("double", count, jobs) == [(2 * number, True) for number in range(count)]


def test_without_the_command_line_nothing_is_forked() -> None:
    with Workers(Subject(), lambda _: None) as pool:
        assert pool.answers([("double", 1), ("double", 2)]) == [(2, True), (4, True)]


@pytest.mark.parametrize(("head_start", "here"), [(60, 4), (1e-9, 1)])
def test_a_head_start_is_used_up_before_anything_is_forked(
    monkeypatch: pytest.MonkeyPatch, head_start: float, here: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    with side_by_side(None), Workers(Subject(), lambda _: None, head_start=head_start) as pool:
        assert pool.answers([("double", n) for n in range(4)]) == [(2 * n, n < here) for n in range(4)]


def test_where_a_platform_does_not_fork_everything_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    assert asked("double", 3) == [(0, True), (2, True), (4, True)]


def test_an_error_is_raised_in_this_process() -> None:
    with pytest.raises(ValueError, match=f"no 1 in {os.getpid()}"):
        asked("refuse")


def test_what_cannot_be_sent_is_done_here() -> None:
    assert [answer() for answer in asked("unpicklable", 3)] == [0, 1, 2]
    assert list(map(str, asked("unreadable", 2))) == ["0 twice", "1 twice"]


def test_the_work_of_a_killed_process_is_done_here() -> None:
    assert asked("vanish", 5) == [0, 1, 2, 3, 4]
    assert asked("vanish", 5, jobs=5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("gpus", "forked"), [(-1, True), (0, True), (1, False)])
def test_a_gpu_that_was_asked_for_is_lost_in_a_fork_only_where_there_is_one(
    gpus: int, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many models ask torch.cuda.is_available() while they are imported; -1 says that there is no driver."""
    import torch

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: gpus)
    assert (os.getpid() not in asked("process")) is forked


def test_where_pytorch_forbids_a_backward_after_a_fork_everything_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def forbidden(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr(torch.Tensor, "backward", forbidden)
    assert asked("double", 3) == [(0, True), (2, True), (4, True)]


def test_a_warning_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        assert asked("warn", 6) == [0, 1, 2, 3, 4, 5]
    assert [(str(each.message), each.category) for each in shown] == [("the same for each", FutureWarning)]


def test_progress_is_said_by_the_parent() -> None:
    said: list[str] = []
    subject = Subject()
    with side_by_side(2), Workers(subject, said.append) as pool:
        subject.say = pool.announce
        pool.answers([("announce", number) for number in range(4)])
    assert sorted(said) == ["number 0", "number 1", "number 2", "number 3"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_no_process_stays_behind() -> None:
    before = children()
    asked("double")
    with pytest.raises(ValueError, match="no 1"):
        asked("refuse")
    assert children() == before


# -- from the shell ---------------------------------------------------------------------------------------------------

MODEL = """
import os
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * 36, 10)

    def forward(self, x):
        return self.head(self.body(x))

class Wrong(Net):
    def forward(self, x):
        return self.head(x)

class Exits(Net):
    def forward(self, x):
        raise ArithmeticError("a forward of its own kind")

class Slow(Net):
    def forward(self, x):
        os.write(2, b"running\\n")
        time.sleep(60)
        return super().forward(x)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "model.py:Net", "--input", "3,8,8", "--train", "adamw", "--format", "json"),
        ("report", "model.py:Wrong", "--input", "3,8,8"),
        ("report", "model.py:Exits", "--input", "3,8,8", "--scenario", "fp16,amp-bf16"),
        ("fit", "model.py:Net", "--input", "3,8,8", "--train", "sgd", "--budget", "1GiB", "--format", "json"),
        ("fit", "model.py:Net", "--input", "3,8,8", "--train", "sgd", "--budget", "1GiB", "-b", "9999999"),
        ("fit", "model.py:Wrong", "--input", "3,8,8"),
    ],
    ids=" ".join,
)
def test_jobs_change_nothing_that_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    one = run([*arguments, "--jobs", "1"]), capsys.readouterr()
    assert (run([*arguments, "--jobs", "3"]), capsys.readouterr()) == one


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_ctrl_c_ends_every_process_silently(folder: Path) -> None:
    command = [sys.executable, "-m", "memsize", "report", "model.py:Slow", "--input", "3,8,8", "--jobs", "2"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        running = [process.stderr.readline(), process.stderr.readline()]  # one line from each worker
        os.killpg(process.pid, signal.SIGINT)
        errors, output = process.stderr.read(), process.stdout.read()  # until no process holds them open
    assert running == ["running\n", "running\n"]
    assert (process.returncode, output, errors.strip()) == (130, "", "")  # click ends the line of a terminal's ^C


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process of its parent's end")
def test_workers_end_with_a_parent_that_is_killed(folder: Path) -> None:
    command = [sys.executable, "-m", "memsize", "report", "model.py:Slow", "--input", "3,8,8", "--jobs", "2"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        running = [process.stderr.readline(), process.stderr.readline()]
        start = time.monotonic()
        process.kill()
        process.stderr.read()  # until no process holds it open
    assert running == ["running\n", "running\n"] and time.monotonic() - start < 30


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_computes_for_real_is_not_forked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "fork", None)
    assert run(["report", "model.py:Net", "--input", "3,8,8", "--execute", "--jobs", jobs]) == 0
    assert "model.py:Net" in capsys.readouterr().out


def test_a_saved_run_takes_any_number_of_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run(["report", "model.py:Net", "--input", "3,8,8", "--jobs", "2", "--save", "net.memsize"]) == 0
    first = capsys.readouterr().out
    assert run(["report", "net.memsize", "--jobs", "4"]) == 0
    assert capsys.readouterr().out == first
