"""Sweeps: the grid by worked arithmetic, cells beside `memsize.trace`, results that survive a crash, and documents."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import memsize
from memsize import Sweep
from memsize.cli import run
from memsize.documents import document
from memsize.errors import OutputError, TargetError
from memsize.render import FORMATS, render
from memsize.units import GiB, MiB
from tests.conftest import Python
from tests.gpus import card
from tests.models import grid_of, targets_of
from tests.pages import check_golden, table_of
from tests.process import Died, spread
from tests.records import Interval, Outcome, SweepRow, results_file
from tests.rules import SWEEP_RULES

NETS = """
import os, time
from torch import nn

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        return self.fc(x)

class Dies(Net):
    def forward(self, x):
        if len(x) == 8:
            os._exit(9)
        return self.fc(x)

class Hangs(Net):
    def forward(self, x):
        time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with some models."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(cell.settings) for cell in grid_of(data).cells(lambda name: (name,), lambda name: card(name).name)]


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_axes() -> None:
    found = cells({"target": ["a:A", "b:B"], "input": "3", "batch_size": [1, 2, 4], "gpu": ["t4", "a100"]})
    assert len(found) == 2 * 3 * 2
    usual = {"input": "3", "train": "none", "scenario": "as-given"}
    assert found[0] == {**usual, "target": "a:A", "batch_size": 1, "gpu": "Tesla T4"}
    assert found[1] == {**usual, "target": "a:A", "batch_size": 1, "gpu": "A100 40GB"}
    assert found[-1] == {**usual, "target": "b:B", "batch_size": 4, "gpu": "A100 40GB"}


def test_compile_adds_each_scenario_compiled() -> None:
    named = {"target": "a:A", "scenario": ["bf16", "fp32+compile"]}
    scenarios = {key: [cell["scenario"] for cell in cells({**named, "compile": key})] for key in (False, True)}
    assert scenarios == {False: ["bf16", "fp32+compile"], True: ["bf16", "bf16+compile", "fp32+compile"]}
    assert [cell["scenario"] for cell in cells({"target": "a:A", "compile": [True, "reduce-overhead"]})] == [
        "as-given",
        "as-given+compile",
        "as-given+compile:reduce-overhead",
    ]


def test_values_that_mean_the_same_are_one_cell() -> None:
    assert len(cells({"target": ["a:A", "a:A"], "gpu": ["t4", "Tesla T4"], "batch_size": [2, 2]})) == 1


def test_sections_have_what_all_have_and_their_own() -> None:
    section = {"target": "a:A", "batch_size": 8, "train": "none"}
    found = cells({"batch_size": [1, 2], "train": "sgd", "target": [section, {"target": ["b:B", "c:C"]}]})
    told = [(each["target"], each["batch_size"], each["train"]) for each in found]
    assert told == [("a:A", 8, "none"), *((name, batch, "sgd") for name in ("b:B", "c:C") for batch in (1, 2))]


def test_strategies_are_spread_over_numbers_of_gpus() -> None:
    data = {"target": "a:A", "train": "sgd", "parallel": ["ddp", "hsdp=x2"], "gpus": ["2..4", 6]}
    assert [each["parallel"] for each in cells(data)] == ["ddp=2", "ddp=4", "ddp=6", "hsdp=1x2", "hsdp=2x2", "hsdp=3x2"]
    sections = [{"target": "a:A", "gpus": 4}, {"target": "b:B", "parallel": "ddp=2"}]
    found = cells({"train": "sgd", "parallel": "fsdp", "target": sections})
    assert [(each["target"], each["parallel"]) for each in found] == [("a:A", "fsdp=4"), ("b:B", "ddp=2")]


def test_how_a_cell_runs_follows_from_its_settings() -> None:
    grid = grid_of({"target": "a:A", "train": ["none", "adamw"], "arguments": {"width": 3}})
    infer, train = grid.cells(lambda name: (name,), str)
    assert (infer.training, infer.subject.mode) == (None, "eval")
    assert train.training == memsize.Training("adamw") and train.subject.mode == "train"
    assert train.subject.arguments == {"width": 3}


MISTAKES: dict[str, tuple[str, str]] = {
    "nothing": ("", 'x.toml needs a target, such as target = ["timm:resnet*", "model.py:Net"]'),
    "no target": ("[[target]]\nbatch_size = 2", "x.toml:1: a section needs a target"),
    "an unknown key": (
        'target = "m.py:N"\nbatchsize = 3',
        "x.toml has no key 'batchsize': did you mean batch_size, base?",
    ),
    "a key for all": ('batchsize = 3\n[[target]]\ntarget = "m.py:N"', "x.toml has no key 'batchsize'"),
    "a key of a section": (
        'train = "sgd"\n[[target]]\ntarget = "m.py:N"\n\n[[target]]\ntarget = "m.py:N"\nbatch = 2',
        "x.toml:5 has no key 'batch': did you mean batch_size?",
    ),
    "a wrong type": ('target = "m.py:N"\nbatch_size = ["x"]', "x.toml: batch_size is 'x': it should be a whole number"),
    "no batch": ('target = "m.py:N"\nbatch_size = [1, 0]', "x.toml: batch_size is 0: it must be at least 1"),
    "no values": ('target = "m.py:N"\ngpu = []', "x.toml: gpu is an empty list"),
    "a scenario": ('target = "m.py:N"\nscenario = "fp8"', "x.toml: scenario: no scenario 'fp8': did you mean"),
    "a compile mode": (
        'target = "m.py:N"\ncompile = "reduce"',
        "x.toml: compile: no compile mode 'reduce': did you mean reduce-overhead?",
    ),
    "compile": ('target = "m.py:N"\ncompile = 3', "x.toml: compile is '3': it should be true or false or a text"),
    "an optimizer": ('target = "m.py:N"\ntrain = "adamm"', "x.toml: train: no optimizer 'adamm': did you mean adam"),
    "an input": ('target = "m.py:N"\ninput = "3,x"', "x.toml: input '3,x': '' is not a size"),
    "a mode": ('target = "m.py:N"\nmode = "trian"', "x.toml: mode: no mode 'trian': did you mean train?"),
    "a loss without training": ('target = "torch.nn:ReLU"\nloss = "mse"', "x.toml: loss is for training steps"),
    "a GPU": ('target = "torch.nn:ReLU"\ngpu = "h10"', "x.toml: gpu: no GPU 'h10' in the table: did you mean"),
    "an allocator": ('target = "torch.nn:ReLU"\nallocator = "x:1"', "x.toml: allocator: "),
    "a missing file": ('target = "m.py:N"', "x.toml: target: no such file: m.py"),
    "a pattern": ('target = "nets/*.py:N"', "x.toml: target: no file matches 'nets/*.py'"),
    "GPUs alone": ('target = "m.py:N"\ngpus = 8', "x.toml: --gpus goes with --parallel"),
    "GPUs of a strategy": ('target = "m.py:N"\nparallel = "fsdp"', "x.toml: on how many GPUs? write it like fsdp=8"),
    "a strategy": ('target = "m.py:N"\nparallel = "fdsp=8"', "x.toml: no strategy 'fdsp'"),
    "a number of GPUs": (
        'target = "m.py:N"\nparallel = "fsdp"\ngpus = "8.."',
        "x.toml: cannot read the number of GPUs",
    ),
    "GPUs for inference": ('target = "torch.nn:ReLU"\nparallel = "fsdp=8"', "x.toml: fsdp=8 distributes a training"),
    "too many": (
        f'target = "m.py:N"\nbatch_size = {[*range(1, 401)]}\nseq_len = {[*range(1, 401)]}',
        "x.toml: more than 100,000 cells",
    ),
    "no TOML": ("target = ", "x.toml is not TOML: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_that_names_the_key(
    mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = MISTAKES[mistake]
    (folder / "x.toml").write_text(text)
    assert run(["sweep", "x.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not (folder / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheduler", "tcp://x:1"], "a scheduler belongs to a cluster: choose the backend dask"),
        (["--backend", "dask", "--timeout", "3"], "timeout: Dask runs cells in threads"),
        (["--results", "nets.py"], "nets.py:1 is not the result of a sweep: name another file with --results"),
        (["--results", "one.json", "--fresh"], "one.json is not the result of a sweep"),
        (["--results", "no/where.jsonl"], "cannot write no/where.jsonl: No such file or directory"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text('target = "nets.py:Net"\ninput = "64"')
    (folder / "one.json").write_text("{}")
    assert run(["sweep", "x.toml", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert (folder / "nets.py").read_text() == NETS and (folder / "one.json").read_text() == "{}"


def test_patterns(folder: Path) -> None:
    timm = pytest.importorskip("timm")
    assert targets_of("timm:vgg1*_bn") == ("timm:vgg11_bn", "timm:vgg13_bn", "timm:vgg16_bn", "timm:vgg19_bn")
    assert targets_of("timm:vgg1[16]?num_classes=10") == ("timm:vgg11?num_classes=10", "timm:vgg16?num_classes=10")
    assert len(targets_of("timm:*")) == len(timm.list_models())
    assert targets_of("nets.py:Net") == ("nets.py:Net",)
    assert targets_of("*.py:Net") == ("nets.py:Net",)
    with pytest.raises(TargetError, match="no model of timm matches 'resnett\\*': did you mean resnet"):
        targets_of("timm:resnett*")


# -- cells -------------------------------------------------------------------------------------------------------------


def test_each_cell_is_what_a_trace_of_its_own_says(folder: Path) -> None:
    found = memsize.sweep(
        {
            "target": "nets.py:Net",
            "input": "64",
            "arguments": {"width": 64},
            "train": ["none", "adamw"],
            "scenario": ["fp32", "fp16"],
            "batch_size": [1, 32],
            "gpu": ["t4", "a100", "h100"],
        },
        jobs=1,
    )
    assert len(found.sweep_rows) == 2 * 2 * 2 * 3
    for row in found.sweep_rows:
        how = row.settings
        optimizer = None if how["train"] == "none" else str(how["train"])
        step = memsize.trace(
            "nets.py:Net",
            "64",
            batch_size=int(str(how["batch_size"])),
            scenario=str(how["scenario"]),
            optimizer=optimizer,
            gpu=str(how["gpu"]),
            mode="train" if optimizer else "eval",
        )
        peak = step.peak
        assert (row.requested, row.allocated, row.reserved, row.device, dict(row.roles)) == (
            *(peak.requested, peak.allocated, peak.reserved, peak.device, dict(peak.roles)),
        )
        assert row.parameters == 64 * 10 + 10
        assert row.stored == (64 * 10 + 10) * (4 if how["scenario"] == "fp32" else 2)
        assert row.left == card(str(how["gpu"])).bytes - peak.device.high
    assert found.varying == ("train", "scenario", "batch_size", "gpu")


def test_trainings_on_several_gpus_are_those_of_a_report(folder: Path) -> None:
    """Of 64 x 10 + 10 float32 parameters and gradients each GPU of `fsdp=2` stores half."""
    grid = {
        **{"target": "nets.py:Net", "input": "64", "train": "sgd", "scenario": ["fp32", "int8-weight"]},
        **{"parallel": ["ddp", "fsdp"], "gpus": [1, 2], "gpu": "t4"},
    }
    found = memsize.sweep(grid, jobs=1, results="r.jsonl")
    ran, failed = (found.sweep_rows[:4], found.sweep_rows[4:])
    assert [(row.settings["parallel"], row.gpus) for row in ran] == [
        *(("ddp=1", 1), ("ddp=2", 2), ("fsdp=1", 1), ("fsdp=2", 2)),
    ]
    for row in ran:
        how: Any = {"parallel": row.settings["parallel"], "scenarios": "fp32", "gpu": "t4"}
        (result,) = memsize.report("nets.py:Net", "64", train="sgd", **how).scenario_results
        assert result.training is not None
        assert (row.requested, row.reserved, row.device) == (
            *(result.training.requested, result.training.reserved, result.training.device),
        )
    assert [row.stored for row in ran] == [2600, 2600, 2600, 1300]
    assert {row.outcome for row in failed} == {"failed"} and "quantized weights" in (failed[0].reason or "")
    assert found.rows["gpus"].tolist() == [1, 2, 1, 2] * 2
    assert memsize.sweep(grid, jobs=1, results="r.jsonl").reused == 8
    assert found.findings[0].text() == "These cells fit: on Tesla T4 2 of 2 each with 1 and 2 GPUs."
    assert found.findings[1].text() == "The fewest GPUs that fit every cell are 1 x Tesla T4."


def test_a_cell_that_fails_says_why_and_the_others_are_there(folder: Path) -> None:
    sections = [{"target": "nets.py:Net", "input": ["64"]}, {"target": "nets.py:Nat"}, {"target": "nets.py:Net"}]
    found = memsize.sweep({"target": sections, "batch_size": [1, 2]}, jobs=1)
    assert [row.outcome for row in found.sweep_rows] == ["fits", "fits", *["failed"] * 4]
    reasons = [row.reason or "" for row in found.sweep_rows]
    assert "did you mean Net?" in reasons[2] and reasons[3] == reasons[2]
    assert "did you mean Net?." not in str(found)
    assert reasons[4].startswith("the model needs an input: its forward takes x")
    assert all(row.reserved is None and row.left is None for row in found.sweep_rows[2:])
    assert found.rows["reserved"].isna().tolist() == [False, False, *[True] * 4]


def test_a_model_is_built_once_for_its_cells(folder: Path) -> None:
    (folder / "counted.py").write_text(f"with open('imported', 'a') as file: file.write('x')\n{NETS}")
    memsize.sweep(
        {"target": "counted.py:Net", "input": "64", "batch_size": [1, 2, 3, 4], "gpu": ["t4", "a100"]}, jobs=1
    )
    assert (folder / "imported").read_text() == "x"


@pytest.mark.thorough
def test_a_short_sweep_takes_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "counted.py").write_text(f"with open('imported', 'a') as file: file.write('x')\n{NETS}")
    grid = {"target": "counted.py:Net", "input": "64", "batch_size": [1, 2, 3, 4]}
    alone = memsize.sweep(grid, jobs=1)
    (folder / "imported").unlink()
    assert [row.reserved for row in memsize.sweep(grid).sweep_rows] == [row.reserved for row in alone.sweep_rows]
    assert (folder / "imported").read_text() == "x"
    # Without patience, the first process does one cell of four.
    monkeypatch.setattr("memsize.api.sweeping._HEAD_START", 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [row.reserved for row in memsize.sweep(grid).sweep_rows] == [row.reserved for row in alone.sweep_rows]
    assert len((folder / "imported").read_text()) == 1 + 1 + 3


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_cell_along(folder: Path) -> None:
    grid = {"target": ["nets.py:Net", "nets.py:Dies"], "input": "64", "batch_size": [2, 8]}
    found = memsize.sweep(grid, jobs=2, results="r.jsonl")
    outcomes = {(row.settings["target"], row.settings["batch_size"]): row for row in found.sweep_rows}
    failed = outcomes.pop(("nets.py:Dies", 8))
    assert failed.outcome == "failed" and "the process that ran it ended" in (failed.reason or "")
    assert {row.outcome for row in outcomes.values()} == {"fits"} and len(outcomes) == 3
    assert len((folder / "r.jsonl").read_text().splitlines()) == 4


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="nothing interrupts a run here")
def test_a_cell_that_takes_too_long_fails(folder: Path) -> None:
    grid = {"target": ["nets.py:Hangs", "nets.py:Net"], "input": "64", "batch_size": 2}
    late, other = memsize.sweep(grid, jobs=1, timeout=0.5).sweep_rows
    assert (late.outcome, late.reason) == ("failed", "it took more than 0.5 s")
    assert other.outcome == "fits"
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_whose_process_died_is_found_out() -> None:
    # What is defined in here goes to the other processes as it is: they import nothing.
    found = dict(spread(lambda number: os._exit(1) if number == 3 else number * number, range(6), 2))
    died = found.pop(3)
    assert isinstance(died, Died) and "it crashed, or was killed for its memory" in died.reason
    assert found == {number: number * number for number in (0, 1, 2, 4, 5)}


def test_what_the_work_raises_is_raised() -> None:
    found = spread(_halved, [4, 2, 1], 1)
    assert next(found) == (4, 2) and next(found) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        next(found)


def _halved(number: int) -> int:
    return number // 2 or 1 // 0


GROWING = """
import sys, time
from memsize.processes.spread import spread

def grow(number):
    time.sleep(1.1)  # joblib looks once a second how large a process is
    vars(sys).setdefault("hoard", []).append(b"x" * 350_000_000)
    return number

print(sorted(spread(grow, range(6), 2)))
"""


@pytest.mark.thorough
def test_all_answers_come_where_warnings_are_errors_and_processes_grow(python: Python) -> None:
    done = python("-W", "error", "-c", GROWING)
    assert (done.stdout.strip(), done.stderr) == (str([(number, number) for number in range(6)]), "")


# -- results that are kept ---------------------------------------------------------------------------------------------

GRID = {"target": "nets.py:Net", "input": "64", "batch_size": [1, 2, 3], "gpu": ["t4", "a100"]}


def test_inputs_may_be_a_list(folder: Path) -> None:
    """As in a project's file; a cell comes back from the file of results."""
    grid = {"target": "nets.py:Net", "input": ["64"], "gpu": "t4"}
    ran, again = (memsize.sweep(grid, jobs=1, results="r.jsonl") for _ in range(2))
    assert (ran.reused, again.reused) == (0, 1) and ran.sweep_rows[0].reserved == again.sweep_rows[0].reserved


def swept(**options: Any) -> tuple[Sweep, int]:
    """The sweep, and how many cells were run for it."""
    said: list[str] = []
    found = memsize.sweep(GRID, jobs=1, results="r.jsonl", progress=said.append, **options)
    (count,) = (int(text.split()[1]) for text in said if text.startswith("running"))
    return found, count


def test_a_sweep_goes_on_where_it_was_cut_off(folder: Path) -> None:
    whole, count = swept()
    assert count == 6 and whole.reused == 0
    content = (folder / "r.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    assert len(lines) == 6
    for kept, rest in ((6, b""), (4, b""), (4, lines[4][:50]), (2, lines[2][:-1]), (0, b'{"sch')):
        (folder / "r.jsonl").write_bytes(b"".join(lines[:kept]) + rest)
        again, count = swept()
        assert count == 6 - kept == 6 - again.reused
        assert [row.reserved for row in again.sweep_rows] == [row.reserved for row in whole.sweep_rows]
        assert len((folder / "r.jsonl").read_bytes().splitlines()) == 6


def test_what_has_changed_is_run_again(folder: Path) -> None:
    swept()
    (folder / "nets.py").write_text(NETS.replace("width, 10", "width, 20"))
    changed, count = swept()
    assert count == 6 and changed.sweep_rows[0].parameters == 64 * 20 + 20
    assert swept()[1] == 0
    assert swept(fresh=True)[1] == 6
    assert len((folder / "r.jsonl").read_bytes().splitlines()) == 6


def test_failed_cells_are_run_again_if_asked(folder: Path) -> None:
    (folder / "nets.py").write_text(NETS.replace("return self.fc(x)", "return self.fc(x) if len(x) < 3 else None + 1"))
    assert swept()[1] == 6
    assert swept()[1] == 0
    assert swept(retry=True)[1] == 2


def test_two_sweeps_do_not_write_to_one_file(folder: Path) -> None:
    pytest.importorskip("fcntl")
    with results_file(folder / "r.jsonl"), pytest.raises(OutputError, match="another sweep writes to"):
        swept()


ROW = SweepRow({"target": "a:A", "batch_size": 1, "gpu": "Tesla T4"}, "fits", device=Interval(1, 2), seconds=0.5)


@given(cut=st.integers(0, 10_000), rows=st.integers(1, 4))
def test_any_beginning_of_a_results_file_is_read(cut: int, rows: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("results") / "r.jsonl"
    made = {"memsize": "0"}
    each = [SweepRow({**ROW.settings, "batch_size": n}, "fits", device=Interval(n, n)) for n in range(rows)]
    with results_file(path) as file:
        file.add((row, made) for row in each)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    with results_file(path) as file:
        found = [row for row in each if file.find(row.settings, made) == row]
        assert found == each[: content.count(b"\n")]
        file.add([(row, made) for row in each[len(found) :]])
    with results_file(path) as file:
        assert all(file.find(row.settings, made) == row for row in each)
        assert all(file.find(row.settings, {"memsize": "1"}) is None for row in each)


# -- documents ---------------------------------------------------------------------------------------------------------


def made_by_hand() -> Sweep:
    """Two models, two batches, two cards; one model cannot be run with the larger batch."""
    rows = []
    for target, size in (("nets.py:Small", 1), ("nets.py:Large", 6)):
        for batch in (8, 64):
            for gpu in ("Tesla T4", "A100 40GB"):
                settings = {"target": target, "train": "adamw", "scenario": "fp32", "batch_size": batch, "gpu": gpu}
                total = card(gpu).bytes
                if (target, batch) == ("nets.py:Small", 64):
                    reason = "the forward failed in fc (Linear): no"
                    rows.append(SweepRow(settings, "failed", reason, gpu_bytes=total))
                    continue
                kept = size * batch * 64 * MiB
                roles = {"activation": kept, "parameter": size * 100 * MiB, "optimizer state": size * 200 * MiB}
                peak = sum(roles.values())
                device = Interval(peak + 400 * MiB, peak + 700 * MiB)
                outcome = "fits" if device.high < total else "exceeds" if device.low > total else "unsure"
                rows.append(
                    SweepRow(
                        *(settings, outcome, None, size * 1000, size * 4000, peak, peak, peak, device, total),
                        phase="backward",
                        layer="fc",
                        roles=roles,
                        notes=("the loss is cross-entropy of the output",),
                        seconds=0.25,
                    )
                )
    return Sweep("sweep.toml", tuple(rows), SWEEP_RULES.findings(tuple(rows)), 3)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(format: str) -> None:
    check_golden(f"sweep{FORMATS[format][0]}", render(made_by_hand(), format))


def test_the_heat_map_has_what_each_gpu_shows_at_most() -> None:
    table = table_of(made_by_hand(), "loads")
    assert table.keys == ("target", "batch_size", "Tesla T4", "A100 40GB")
    *_, large = table.rows
    # 6 × (300 + 64 · 64) MiB of tensors and 700 MiB beside them
    most = (6 * (300 + 64 * 64) + 700) * MiB
    assert large[2:] == (most / card("t4").bytes, most / card("a100").bytes)
    assert [isinstance(row[2], float) for row in table.rows] == [True, False, True, True]  # one could not be run
    page = render(made_by_hand(), "html")
    assert page.count('class="share load over"') == 1 and page.count('class="share load"') == 5


def test_the_chart_and_the_verdict_mean_the_same_peak() -> None:
    """Of 40 models, the one with most reserved is named first, although another requests more."""
    rows = [
        SweepRow(
            {"target": f"m:N{n}", "gpu": "T4"},
            "fits",
            requested=n * MiB,
            reserved=(42 - n if n < 30 else n) * MiB,
            gpu_bytes=GiB,
            roles={"parameter": n * MiB},
            phase="forward",
        )
        for n in range(1, 41)
    ]
    sweep = Sweep("x.toml", tuple(rows), SWEEP_RULES.findings(tuple(rows)))
    bars = document(sweep).bars()
    largest = next(finding for finding in sweep.findings if finding.code == "sweep-largest")
    assert largest.values["cell"] == "m:N1" and bars is not None and bars.bars[0].labels[0].text == "m:N1"


def test_golden_at_a_terminals_width() -> None:
    check_golden("sweep.80.txt", render(made_by_hand(), "text", width=80, height=24))


def test_a_target_that_all_cells_have_needs_no_column() -> None:
    rows = tuple(row for row in made_by_hand().sweep_rows if row.settings["target"] == "nets.py:Large")
    one, several = Sweep("x.toml", rows[:1], ()), Sweep("x.toml", rows, ())
    assert [table_of(sweep, "cells").columns[0].key for sweep in (one, several)] == ["target", "batch_size"]
    assert render(several, "text").startswith("x.toml   4 cells   nets.py:Large   ")
    assert [record["target"] for record in several.tables()["rows"].records()] == ["nets.py:Large"] * 4


def test_a_model_without_a_setting_of_others_has_a_dash() -> None:
    first, *others = made_by_hand().sweep_rows
    named = replace(first, settings={**first.settings, "input": "3,64,64"})
    told = render(Sweep("x.toml", (named, *others), ()), "text")
    assert "nets.py:Large  –" in told and "None" not in told


def test_what_follows_from_the_cells() -> None:
    # large at batch 64: 6 × (300 + 64 · 64) MiB = 25.8 GiB are too many for a T4 with 14.6 GiB, not for 39.4 GiB
    found = {finding.code: finding for finding in made_by_hand().why()}
    assert 14 * GiB < 6 * (300 + 64 * 64) * MiB < 39 * GiB
    assert found["sweep-fits"].text() == "These cells fit: 2 of 3 on Tesla T4, 3 of 3 on A100 40GB."
    assert found["sweep-smallest-card"].values == {"gpu": "A100 40GB"}
    assert found["sweep-largest"].bytes == 6 * (300 + 64 * 64) * MiB
    assert found["sweep-failed"].values["failed"] == "2 cells"


def test_no_card_for_all() -> None:
    rows = [row for row in made_by_hand().sweep_rows if row.settings["gpu"] == "Tesla T4"]
    more = [SweepRow({**row.settings, "gpu": "A10G"}, row.outcome, gpu_bytes=22 * GiB, roles=row.roles) for row in rows]
    assert "sweep-no-card" in {finding.code for finding in SWEEP_RULES.findings([*rows, *more])}


def test_only_what_was_asked_for_all_cells_may_be_the_smallest() -> None:
    """A training is spread over two and four GPUs, another model is on one: no number of them was asked for both."""
    options: dict[str, Any] = {"gpu_bytes": 16 * GiB, "roles": {"parameter": 1}}
    spread = [
        SweepRow({"target": "a:A", "parallel": f"fsdp={n}", "gpu": "T4"}, "fits", gpus=n, **options) for n in (2, 4)
    ]
    alone = SweepRow({"target": "b:B", "gpu": "T4"}, "fits", **options)
    codes = {finding.code for finding in SWEEP_RULES.findings([*spread, alone])}
    assert not codes & {"sweep-smallest-card", "sweep-no-card"}
    (found,) = (each for each in SWEEP_RULES.findings(spread) if each.code == "sweep-smallest-card")
    assert found.text() == "The fewest GPUs that fit every cell are 2 x T4."


def test_what_fits_is_told_card_by_card_by_their_number() -> None:
    """The memory of four T4 is that of one A100, and less than that of two."""
    outcomes: dict[str, dict[int, tuple[Outcome, Outcome]]] = {
        "A100": {1: ("fits", "exceeds"), 2: ("fits", "fits"), 4: ("fits", "fits"), 8: ("fits", "fits")},
        "T4": {1: ("exceeds", "exceeds"), 2: ("fits", "exceeds"), 4: ("fits", "exceeds"), 8: ("fits", "fits")},
    }
    rows = [
        SweepRow(
            {"parallel": f"fsdp={count}", "batch_size": batch, "gpu": name},
            outcome,
            gpu_bytes={"A100": 64, "T4": 16}[name] * GiB,
            roles={"parameter": 1},
            gpus=count,
        )
        for name, counts in outcomes.items()
        for count, found in counts.items()
        for batch, outcome in zip((8, 64), found, strict=True)
    ]
    told = {finding.code: finding.text() for finding in SWEEP_RULES.findings(rows)}
    assert told["sweep-fits"] == (
        "These cells fit: on T4 0 of 2 with 1 GPU, 1 of 2 each with 2 and 4 GPUs, 2 of 2 with 8 GPUs; "
        "on A100 1 of 2 with 1 GPU, 2 of 2 each with 2 to 8 GPUs."
    )
    assert (
        told["sweep-smallest-card"] == "The fewest GPUs that fit every cell are 2 x A100."
    )  # no more memory than 8 x T4


def test_parquet(folder: Path) -> None:
    pandas, sweep = pytest.importorskip("pandas"), made_by_hand()
    pytest.importorskip("pyarrow")
    sweep.to_parquet("s.parquet")
    read = pandas.read_parquet("s.parquet")
    assert read.shape == (8, len(sweep.rows.columns))
    assert read["reserved"].tolist()[4:] == sweep.rows["reserved"].tolist()[4:]


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text('target = "nets.py:Net"\ninput = "64"\nbatch_size = [1, 2]')
    assert run(["sweep", "x.toml", "--jobs", "1", "-o", "x.csv", "--save", "x.memsize"]) == 0
    lines = (folder / "x.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("target,input,train,scenario,batch_size,gpu,outcome,parameters")
    assert (folder / "x.jsonl").is_file()
    assert run(["sweep", "x.toml", "--jobs", "1", "-o", "x.parquet"]) == 0
    assert (folder / "x.parquet").read_bytes()[:4] == b"PAR1"
    capsys.readouterr()
    assert run(["sweep", "x.memsize", "-f", "json"]) == 0
    assert [row["batch_size"] for row in json.loads(capsys.readouterr().out)["cells"]] == [1, 2]
    assert run(["sweep", "x.jsonl"]) == 2
    assert "holds results: name the TOML file" in capsys.readouterr().err
