"""One process with several GPUs: `nn.DataParallel` by PyTorch's own code, layers on different GPUs, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import RankRuns, Trace, World
from memsize.cli import run as command
from memsize.errors import InputError
from tests.ranks import BLOCK, LAYERS, PARAMETERS, WIDTH, Model
from tests.test_ranks import at_the_end, most

IDS = torch.zeros(8, 8, dtype=torch.long)
OUTPUT = 8 * 8 * 96 * 4
"""Bytes of the logits of the whole batch."""


@pytest.fixture(scope="module")
def first() -> Trace:
    """GPU 0 of four."""
    return memsize.trace(Model(), IDS, optimizer="adamw", parallel="dp=4", gpu="t4").trace


def test_the_first_gpu_has_the_optimizer_and_the_whole_output(first: Trace) -> None:
    assert first.world == World(4, one_process=True)
    held = at_the_end(first)
    assert held["parameter"] == PARAMETERS * 4
    assert held["optimizer state"] == 2 * PARAMETERS * 4
    assert {each.bytes for each in first.storages if each.role == "output"} == {OUTPUT}


def test_gradients_are_there_before_and_after_they_are_added_up(first: Trace) -> None:
    """Autograd hands all of a copy's gradients to the reduction at once, so that both are whole."""
    assert most(first, "unsharded gradient") == PARAMETERS * 4
    assert most(first, "gradient") == PARAMETERS * 4


def test_parameters_are_broadcast_for_each_forward(first: Trace) -> None:
    in_step = [each for each in first.collectives if first.phases[each.phase].endswith("3")]
    for kind in ("broadcast", "reduce"):
        assert sum(each.bytes for each in in_step if each.kind == kind) == PARAMETERS * 4
    assert {each.ranks for each in in_step} == {4}


def test_what_the_first_gpu_holds_beyond_the_others_is_said(first: Trace) -> None:
    assert first.notes[0].startswith("dp: nn.DataParallel splits the batch over 4 GPUs")
    assert "of optimizer states" in first.notes[-1] or "of optimizer state" in first.notes[-1]
    assert "each other GPU holds" in first.notes[-1] and "beyond theirs" in first.notes[-1]


def test_a_copy_of_the_model_is_freed_with_its_step() -> None:
    """GPU 1 holds the parameters once, however many steps there were: each forward brings a copy of its own."""
    second = memsize.trace(Model(), IDS, optimizer="adamw", parallel="dp=4,rank=1", gpu="t4").trace
    assert most(second, "parameter") == PARAMETERS * 4


def test_layers_are_listed_once_and_own_their_activations(first: Trace) -> None:
    assert {layer.calls for layer in first.layers if layer.path.startswith("module.blocks.0.")} == {4}
    kept = [each for each in first.storages if each.saved_by >= 0 and each.shape == (2, 8, 4 * WIDTH)]
    # each block keeps the output of its ReLU, of a quarter of the batch
    assert {first.layers[each.layer].path for each in kept} == {f"module.blocks.{number}" for number in range(LAYERS)}


TRAIN = """
import sys
import torch
from torch import nn
from tests.ranks import Model

model = nn.DataParallel(Model().cuda())
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.zeros(int(sys.argv[1]), 8, dtype=torch.long)
for _ in range(3):
    logits = model(ids)
    assert logits.device == torch.device("cuda:0") and len(logits) == len(ids)
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten().cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    return path


def test_gpus_of_a_script_are_shown_beside_one_another(script: Path) -> None:
    found: Any = memsize.run(script, ["8"], gpus=4, one_process=True, rank="all", gpu="t4", jobs=2)
    assert isinstance(found, RankRuns)
    zero, others = found.groups
    assert (zero.ranks, others.ranks) == ((0,), (1, 2, 3))
    held = zero.run.peak.roles
    assert held["optimizer state"] == 2 * PARAMETERS * 4 and "optimizer state" not in others.run.peak.roles
    trace = others.run.trace
    assert most(trace, "parameter") == most(trace, "unsharded gradient") == PARAMETERS * 4
    # two samples of eight numbers of eight bytes; nothing is there once a step is over, save cuBLAS's workspaces
    assert most(trace, "input") == 2 * 8 * 8
    assert set(at_the_end(trace)) == {"workspace"}
    assert "GPU 0 needs the most" in str(found) and "4 GPUs" in str(found)


def test_a_gpu_that_gets_no_sample_gets_no_copy(script: Path) -> None:
    run: Any = memsize.run(script, ["3"], gpus=4, one_process=True, rank=3, gpu="t4")
    assert not run.trace.events and str(run.trace.world) == "GPU 3 of 4"


def test_one_gpu_runs_the_model_itself(script: Path) -> None:
    run: Any = memsize.run(script, ["4"], gpus=1, one_process=True, gpu="t4")
    assert "unsharded gradient" not in run.peak.roles


def test_layers_may_lie_on_different_gpus() -> None:
    """As `device_map` spreads them: each GPU has its layers, and what comes from the other is copied there."""
    for rank, held in ((0, 96 * WIDTH), (1, 2 * BLOCK)):
        with memsize.virtual_gpu("t4", world=World(2, rank, one_process=True)) as gpu:
            embedding = nn.Embedding(96, WIDTH).to("cuda:0")
            up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            block = nn.Sequential(up, down).to(1)
            x = embedding(torch.zeros(2, 8, dtype=torch.long, device="cuda"))
            assert (x.device, x.get_device(), torch.cuda.current_device()) == (torch.device("cuda:0"), 0, 0)
            with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cuda:1"):
                block(x)
            y = block(x.to("cuda:1"))
            assert y.device == torch.device("cuda:1") == torch.zeros_like(y).device == y[[0, 1]].device
            assert y.to("cuda:1") is y and y.to(x).device == y.cuda().device == torch.device("cuda:0")
            with torch.cuda.device(1):
                assert torch.zeros(2, device="cuda").get_device() == torch.cuda.current_stream().device_index == 1
            y.sum().backward()
            assert embedding.weight.grad.device == torch.device("cuda:0") and up.weight.grad.get_device() == 1
        assert at_the_end(gpu.trace)["parameter"] == 4 * held


def test_the_command_runs_one_process(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "--gpus", "2", "--one-process", "--gpu", "t4", str(script), "4"]) == 0
    assert "GPU 0 of 2" in capsys.readouterr().out
    assert command(["run", "--gpus", "2", "--gpu", "t4", str(script), "4"]) == 2
    assert "--one-process gives a single process all GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 8, "nodes": 2}, "one process has the GPUs of its own machine, not those of 2 nodes"),
        ({"gpus": 4, "rank": 4}, "no rank 4 among 4"),
        ({}, "say how many, as in gpus=8"),
    ],
)
def test_what_one_process_cannot_have(script: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        memsize.run(script, ["4"], one_process=True, gpu="t4", **options)
