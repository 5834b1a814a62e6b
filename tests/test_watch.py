"""A job on a real GPU beside its prediction: recorded series of NVML's and PyTorch's figures, played again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize.cli import run

GiB = 2**30
CARD = 16 * GiB


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays a series of the bytes that processes have, a mapping for each reading, as NVIDIA's package would say it."""

    def play(series: Sequence[dict[int, int]], beside: int = 0) -> None:
        readings = iter(series)
        now: dict[int, int] = {}

        def processes(gpu: str) -> list[SimpleNamespace]:
            now.clear()
            now.update(next(readings, {}))
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in now.items()]

        module: Any = ModuleType("pynvml")
        module.NVMLError = type("NVMLError", (Exception,), {})
        module.nvmlInit = lambda: None
        module.nvmlDeviceGetCount = lambda: 1
        module.nvmlDeviceGetHandleByIndex = lambda number: "gpu"
        module.nvmlDeviceGetName = lambda gpu: "Tesla T4"
        module.nvmlDeviceGetComputeRunningProcesses = processes
        module.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=CARD, free=CARD - beside - sum(now.values()))
        monkeypatch.setitem(sys.modules, "pynvml", module)

    return play


def watched(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["watch", "--interval", "0.001", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, Any]:
    """A saved run, and what `nvidia-smi` may show of it."""
    step = memsize.trace(nn.Linear(1024, 1024), (1024,), optimizer="adamw", batch_size=4096, gpu="t4")
    step.save(tmp_path / "run.memsize")
    return str(tmp_path / "run.memsize"), step.peak.device


def test_a_job_to_its_end(nvml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    me = os.getpid()
    nvml([{}, {me: GiB}, {me: 3 * GiB}, {me: 2 * GiB}])
    status, out, err = watched(capsys, str(me))
    assert (status, err) == (0, "")
    assert out.startswith("It took at most 3.00 GiB of 16.0 GiB on Tesla T4 in ") and out.endswith(" s.\n")


def test_it_warns_before_what_is_free_is_not_enough(
    nvml: Any, saved: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, predicted = saved
    me = os.getpid()
    # Another process has all but 100 MiB of what this one will need at least beyond its first reading.
    nvml([{me: 2**20}, {me: 2**20}], beside=CARD - predicted.low + 100 * 2**20)
    status, out, err = watched(capsys, str(me), "--run", path)
    assert status == 0 and "were predicted" in out
    assert err.count("\n") == 1 and f"process {me}: it will need" in err and "are free on Tesla T4" in err


def test_it_warns_of_more_than_predicted(nvml: Any, saved: tuple[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path, predicted = saved
    me = os.getpid()
    nvml([{me: predicted.low}, {me: predicted.high}])
    assert watched(capsys, str(me), "--run", path)[2] == ""
    nvml([{me: predicted.high}, {me: predicted.high + 1}, {me: predicted.high + 2}])
    _, _, err = watched(capsys, str(me), "--run", path)
    assert err.count("\n") == 1 and "more than predicted" in err


def test_growth_fills_the_gpu(nvml: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MiB a second from 1 GiB on; after 60 s 14.4 GiB are left, which that fills in 1,475 s: 25 minutes."""
    seconds = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(seconds)))
    monkeypatch.setenv("MEMSIZE_PROGRESS", "never")
    me = os.getpid()
    nvml([{me: GiB + 10 * 2**20 * second} for second in range(70)])
    _, _, err = watched(capsys, str(me))
    assert "it grows by 600.00 MiB a minute: Tesla T4 is full in about 25 min" in err and err.count("\n") == 1
    # The same growth that ends is the start of a program.
    nvml([{me: GiB + 10 * 2**20 * min(second, 40)} for second in range(70)])
    assert watched(capsys, str(me))[2] == ""


def test_without_a_number_it_is_the_only_process(nvml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nvml([{7: GiB}, {7: 2 * GiB}])
    assert "at most 2.00 GiB" in watched(capsys)[1]
    nvml([{7: GiB, 8: GiB}])
    assert watched(capsys)[::2] == (2, "error: name a process by its PID: on a GPU are 7, 8\n")
    nvml([{}])
    assert watched(capsys)[::2] == (2, "error: name a process by its PID: none uses a GPU yet\n")


def test_what_cannot_be_watched(nvml: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml([])
    assert watched(capsys, "999999999")[::2] == (2, "error: there is no process 999999999\n")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in watched(capsys, "1")[2]


# -- in a loop ---------------------------------------------------------------------------------------------------------


def guarded(budget: int, on_excess: str = "warn") -> memsize.Guard:
    model = nn.Linear(8, 8)
    return memsize.guard(
        model, torch.optim.SGD(model.parameters()), torch.zeros(1, 8), budget=budget, on_excess=on_excess
    )


def play(monkeypatch: pytest.MonkeyPatch, guard: memsize.Guard, series: Sequence[tuple[int, int]]) -> list[str]:
    """The lines of `Guard.check` for the bytes at the start of each step and the highest until then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = []
    for current, peak in series:
        stats = {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda stats=stats: stats)
        lines.append(guard.check())
    return lines


def test_a_step_that_will_not_fit_is_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step keeps 1 GiB and needs 3 on top, the first one makes 4 of states: the peaks are 9, 10 and 11 GiB."""
    series = [(2 * GiB, 2 * GiB), (7 * GiB, 9 * GiB), (8 * GiB, 10 * GiB), (9 * GiB, 11 * GiB), (10 * GiB, 12 * GiB)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stops, fits = guarded(12 * GiB, "raise"), guarded(13 * GiB, "raise")
    assert guarded(GiB).check().startswith("predicted ")
    lines = play(monkeypatch, fits, series)
    assert lines[-1].startswith("10.0 GiB allocated, at most 12.0 GiB, predicted ")
    assert play(monkeypatch, stops, series[:4])
    with pytest.raises(memsize.BudgetError, match=r"step 5 will need 13\.0 GiB, 12\.0 GiB are available: memory grows"):
        play(monkeypatch, stops, series[4:])


def test_steps_that_do_not_grow_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the first step, and the gradients that accumulate, are no growth from step to step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    guard = guarded(10 * GiB, "raise")
    play(monkeypatch, guard, [(GiB, GiB), (7 * GiB, 9 * GiB), (7 * GiB, 9 * GiB + 1), (7 * GiB, 9 * GiB + 2)])
    play(monkeypatch, guard, [(5 * GiB, 9 * GiB + 2), (7 * GiB, 9 * GiB + 3), (5 * GiB, 9 * GiB + 4)])
