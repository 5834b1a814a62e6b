"""What Python shows in a line, the plain numbers of an answer, and the GPU of questions that name none."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import memsize
from memsize.cli import run
from tests.models import read_project, usual_gpu


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU())  # 8 × 4 + 4 parameters


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMSIZE_GPU", raising=False)
    return tmp_path


def test_a_report_in_a_line() -> None:
    report = memsize.report(small(), (8,), scenarios="fp32", gpu="a100")
    assert (report.parameters, report.scenario_results[0].name) == (36, "fp32")
    inference = report.scenario_results[0].inference
    assert inference is not None and report.peak == inference.allocated
    # The block of cuBLAS's workspace is another with another release's allocator: 8.13 MiB in all, or 9.13 with 2.11.
    assert repr(report) == f"<memsize.Report Sequential: 36 parameters, peak {report.peak / 2**20:.2f} MiB>"


def test_other_answers_in_a_line() -> None:
    step = memsize.trace(small(), (8,), optimizer="sgd")
    assert repr(step).startswith("<memsize.StepTrace Sequential on A100 40GB: peak ")
    assert f"{step.peak.allocated / 2**20:.2f} MiB allocated" in repr(step)
    for answer in (memsize.fit(small(), (8,), gpu="t4", scenarios="fp32"), memsize.diff(small(), small(), (8,))):
        assert repr(answer).startswith(f"<memsize.{type(answer).__name__} Sequential") and "\n" not in repr(answer)


def test_the_gpu_of_a_project_and_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usual_gpu() is None
    (folder / "pyproject.toml").write_text('[tool.memsize]\ngpu = "t4"\n')
    inside = folder / "models"
    inside.mkdir()
    monkeypatch.chdir(inside)
    assert memsize.trace(small(), (8,)).gpu == "Tesla T4"
    monkeypatch.setenv("MEMSIZE_GPU", "h100")
    assert memsize.trace(small(), (8,)).gpu == "H100 80GB"
    assert memsize.trace(small(), (8,), gpu="a100").gpu == "A100 40GB"
    # A budget is instead of a GPU.
    assert memsize.fit(small(), (8,), budget="1GiB", scenarios="fp32").budgets[0].device == 2**30


def test_the_command_line_takes_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(8, 4)\n")
    monkeypatch.setenv("MEMSIZE_GPU", "t4")
    assert run(["fit", "net.py:net", "-i", "8", "--scenario", "fp32"]) == 0
    assert "Tesla T4" in capsys.readouterr().out


def test_limits_are_for_the_gpu_of_the_project(folder: Path) -> None:
    (folder / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(8, 4)\n")
    limits = '[[tool.memsize.target]]\ntarget = "net.py:net"\ninput = "8"\nlimits.inference_peak = "1GiB"\n'
    (folder / "pyproject.toml").write_text(f'[tool.memsize]\ngpu = "t4"\n\n{limits}')
    assert read_project(folder / "pyproject.toml").targets[0].run.gpu.name == "t4"
    assert memsize.check().findings == ()
    (folder / "pyproject.toml").write_text(f"[tool.memsize]\ngpu = 4\n\n{limits}")
    with pytest.raises(memsize.InputError, match="gpu"):
        memsize.check()
