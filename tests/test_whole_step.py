"""A script that runs out of memory says what its steps need altogether, and which batch fits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import memsize

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="scripts are run again in a process of their own")

SCRIPT = """\
import sys
from pathlib import Path

import torch
from torch import nn

batch = int(sys.argv[2]) if len(sys.argv) > 1 else 4096
Path("log.txt").write_text("a new file, which the script may write again")
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    model(torch.randn(batch, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run_with(script: Path, *arguments: str) -> memsize.ProgramRun:
    (script.parent / "log.txt").unlink(missing_ok=True)
    run = memsize.run(script, arguments, gpu="t4", allocator="per_process_memory_fraction:0.02", steps=2)
    assert isinstance(run, memsize.ProgramRun)
    return run


def test_the_batch_that_is_named_fits_and_the_next_does_not(script: Path) -> None:
    run = run_with(script, "--bs", "4096")
    assert run.ran_out and run.whole is not None and run.whole.batch is not None
    argument, size, largest = run.whole.batch
    assert argument == "--bs" and largest and size < 4096
    assert not run_with(script, "--batch-size", str(size)).refused
    assert run_with(script, "--batch-size", str(size + 1)).ran_out
    sentence = next(finding for finding in run.findings if finding.code == "run-out-of-memory").brief
    assert "A whole step needs {needs}, {short} more than PyTorch can use." in sentence
    assert sentence.endswith("The largest {argument} that fits is {size}.")


def test_a_log_that_was_there_has_a_copy_in_each_run(script: Path) -> None:
    """The copy goes when a run ends, also by an error; the next run makes its own."""
    (script.parent / "log.txt").write_text("of a real training")
    run = memsize.run(script, gpu="t4", allocator="per_process_memory_fraction:0.02", steps=2)
    assert isinstance(run, memsize.ProgramRun) and run.ran_out and run.whole is not None
    assert (script.parent / "log.txt").read_text() == "of a real training"


def test_the_batch_that_is_named_is_that_of_fit(script: Path) -> None:
    """A run refuses what can't fit beside the least that CUDA takes; what fits does so beside the most."""
    fit = memsize.fit_script(script, ("--batch-size", "4096"), vary="batch-size", gpu="t4", steps=2)
    (script.parent / "log.txt").unlink()
    run = memsize.run(script, ("--batch-size", "400000"), gpu="t4", steps=2)
    assert isinstance(run, memsize.ProgramRun) and run.whole is not None and run.whole.batch is not None
    assert run.whole.batch.size == fit.fit_rows[0].size


@pytest.mark.parametrize(
    "declared", ["'-b', '--batch-size'", pytest.param("'--train_batch_size'", marks=pytest.mark.thorough)]
)
def test_a_batch_that_is_left_at_its_default_is_named(script: Path, declared: str) -> None:
    parser = f"""\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--eval-batch-size", type=int, default=1000)
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument({declared}, type=int, default=4096, dest="batch")
batch = parser.parse_args().batch
"""
    script.write_text(SCRIPT.replace(SCRIPT.splitlines(keepends=True)[6], parser))
    run = run_with(script)
    assert run.ran_out and run.whole is not None and run.whole.batch is not None
    argument, size, largest = run.whole.batch
    assert argument == declared.split("'")[-2] and largest
    assert not run_with(script, argument, str(size)).refused


def test_the_step_needs_its_tensors_and_more_than_there_is(script: Path) -> None:
    """At the end of the second backward, when its last temporary has gone: four copies of the weights, the input, the
    activations and the gradient of the hidden layer's output."""
    run = run_with(script)
    assert run.whole is not None and run.whole.batch is None and run.whole.steps == 2
    weights = 4 * (1024 * 4096 + 4096 + 4096 * 1024 + 1024)
    batch = 4 * 4096 * 1024
    assert run.whole.needs > run.capacity
    assert run.whole.needs >= 4 * weights + batch + 4 * batch


def test_a_script_that_fails_when_it_has_memory_is_left_alone(script: Path) -> None:
    script.write_text(f"{SCRIPT}\nraise ValueError('the end')\n".replace("range(10)", "range(1)"))
    run = run_with(script, "--batch-size", "32768")
    assert run.ran_out and run.whole is None


def test_a_script_that_goes_on_is_not_run_again(script: Path) -> None:
    lines = SCRIPT.replace("    model(", "    try:\n        model(").replace(
        "    optimizer.step()", "    except torch.OutOfMemoryError:\n        break\n    optimizer.step()"
    )
    script.write_text(lines.replace(".backward()\n", ".backward()\n", 1))
    run = run_with(script)
    assert run.refused and not run.ran_out and run.whole is None


ADVERSARIES = """\
import sys

import torch
from torch import nn

batch = int(sys.argv[2])
widths = [128, 512, 256, 128, 64]
layers = []
for index, (narrow, wide) in enumerate(zip(widths, widths[1:])):
    layers += [nn.ConvTranspose2d(narrow, wide, 4, 2 if index else 1, 1 if index else 0)]
    layers += [nn.BatchNorm2d(wide), nn.ReLU(True)]
generator = nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 4, 0), nn.Tanh()).cuda()
layers = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True)]
for width in (64, 128, 256):
    layers += [nn.Conv2d(width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, True)]
critic = nn.Sequential(*layers, nn.Conv2d(512, 1, 8)).cuda()
optimizers = [torch.optim.Adam(net.parameters(), 2e-4) for net in (generator, critic)]
loss = nn.BCEWithLogitsLoss()
for step in range(3):
    real = torch.randn(batch, 3, 128, 128, device="cuda")
    z = torch.randn(batch, 128, 1, 1, device="cuda")
    fake = generator(z)
    optimizers[1].zero_grad()
    r, f = critic(real).flatten(), critic(fake.detach()).flatten()
    loss_d = loss(r, torch.ones_like(r)) + loss(f, torch.zeros_like(f))
    loss_d.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    f = critic(fake).flatten()
    loss_g = loss(f, torch.ones_like(f))
    loss_g.backward()
    optimizers[0].step()
"""


@pytest.mark.thorough
def test_a_batch_that_ran_out_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less memory than the run had, this batch would fit: cached blocks are given back at another moment."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "gan.py"
    script.write_text(ADVERSARIES)
    run = memsize.run(script, ["--batch-size", "1906"], gpu="t4")
    assert isinstance(run, memsize.ProgramRun) and run.ran_out
    assert run.whole is not None and run.whole.batch is not None
    assert 1600 < run.whole.batch.size < 1906 and not run.whole.batch.largest
    smaller = memsize.run(script, ["--batch-size", str(run.whole.batch.size)], gpu="t4")
    assert isinstance(smaller, memsize.ProgramRun) and not smaller.ran_out
