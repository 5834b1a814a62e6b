"""Names: what the commands list, and other spellings of them that people try first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memsize.cli import run
from memsize.errors import TargetError
from tests.models import SCENARIOS, load, scenario_named


def listed(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert run(command) == 0
    return capsys.readouterr().out


def test_gpus_by_a_part_of_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, "gpus", "T4").splitlines()[2:] == ["Tesla T4  14.6 GiB  t4"]
    lines = listed(capsys, "gpus").splitlines()
    assert len(lines) > 90 and max(map(len, lines)) < 80
    assert [line.split("  ")[0] for line in listed(capsys, "gpus", "h*").splitlines()[2:]] == [
        "H100 80GB",
        "H100 NVL",
        "H200",
    ]


def test_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in listed(capsys, "scenarios").splitlines()[2:]] == [*SCENARIOS]


def test_models_of_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    assert "timm:resnet18\n" in listed(capsys, "models", "timm:resnet1*")


@pytest.mark.parametrize("kind", ["gpus", "models", "scenarios"])
def test_a_name_that_there_is_not(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    assert run([kind, "nothing like it"]) == 2
    assert f"no {'GPU' if kind == 'gpus' else kind[:-1]} is called 'nothing like it'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "scenario"), [("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16")])
def test_the_dtypes_of_scenarios_name_them(name: str, scenario: str) -> None:
    assert scenario_named(name) is scenario_named(scenario)


def test_a_bare_name_is_that_of_a_library(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    assert load("resnet18").name == "timm:resnet18"
    with pytest.raises(TargetError, match="no module 'resnet1818'"):
        load("resnet1818")
    # A module of the user's own comes first, even a broken one.
    (tmp_path / "resnet18.py").write_text("model = 1")
    with pytest.raises(TargetError, match="resnet18 defines no"):
        load("resnet18")


def test_a_name_whose_library_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.loading.hubs.model_names", lambda library: [])
    monkeypatch.setattr("memsize.loading.loader._BY_NAME", ("not_timm", "not_torchvision"))
    with pytest.raises(TargetError, match=r"models by name come with timm and torchvision: pip install 'memsize"):
        load("resnet50")
