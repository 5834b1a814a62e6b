"""The benchmarks run. What they measure is for a person to read: no test asserts a time."""

from __future__ import annotations

import sys

import pytest

from benchmarks.__main__ import main, table
from benchmarks.measure import Line, compared, megabytes, processes_in_turn, seconds
from benchmarks.resnet import PARAMETERS, ResNet50


def test_the_resnet_is_the_known_one() -> None:
    model = ResNet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS == 25_557_032
    # 53 convolutions, each with a batch norm of 2 · channels, and one linear layer
    assert len(list(model.parameters())) == 53 * 3 + 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("startup", marks=pytest.mark.slow),
        pytest.param("resnet", marks=pytest.mark.thorough),
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("step", marks=pytest.mark.slow),
        pytest.param("fit", marks=pytest.mark.slow),
        pytest.param("commands", marks=pytest.mark.slow),
        "replay",
    ],
)
def test_each_prints_its_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([name, "--quick"])
    out, _ = capsys.readouterr()
    head, _, body = out.partition("\n\n")
    assert "torch " in head
    assert len(body.splitlines()) > 2


@pytest.mark.skipif(sys.platform != "linux", reason="processes are adopted on Linux alone")
def test_the_cpu_time_of_workers_counts_that_outlive_their_process() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {busy!r}])"
    (spent,) = processes_in_turn([("-S", "-c", starts)], 1)
    assert spent.cpu > 0.3


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["startupp"])
    assert "choose from startup, resnet" in capsys.readouterr().err


def test_the_table() -> None:
    line = compared("a report", 1.35, "an import", 1.0, 1.35)
    assert line == Line("a report", "1.35 s", "an import", "1.00 s", 1.35, 1.35)
    assert (line.verdict, compared("a", 2, "b", 1, 1.5).verdict, compared("a", 2, "b", 1).verdict) == ("yes", "no", "")
    assert table([line]).splitlines()[2].split() == "a report 1.35 s an import 1.00 s 1.35 × 1.35 × yes".split()
    assert (seconds(0.0314), seconds(12.5), megabytes(428_400_000)) == ("31 ms", "12.50 s", "428 MB")
