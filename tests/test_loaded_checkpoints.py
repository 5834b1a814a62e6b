"""Checkpoints that a script loads to the GPU, and keeps there beside the model."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import ProgramRun

SCRIPT = """
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = torch.load("last.pt", map_location={where!r})
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    {then}
    losses = []
    for _ in range(10):
        loss = model(torch.randn(16, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss{detached})
"""
PARAMETERS = 4 * (256 * 256 + 256) * 4


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checkpoint() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(16, 256)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")


def ran(where: str = "cuda", then: str = "pass", detached: str = ".detach()", **options: Any) -> ProgramRun:
    Path("train.py").write_text(textwrap.dedent(SCRIPT).format(where=where, then=then, detached=detached))
    run = memsize.run("train.py", gpu="t4", **options)
    assert isinstance(run, ProgramRun) and run.steps == 3
    return run


def sentences(run: ProgramRun, code: str) -> list[str]:
    return [finding.text("KiB") for finding in run.findings if finding.code == code]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_on_the_gpu_stays_there(is_there: bool) -> None:
    """The moments become those of the optimizer, without a copy; the parameters were copied."""
    if is_there:
        checkpoint()
    run = ran(checkpoint=None if is_there else "stand-in")
    assert run.loaded_checkpoint == (PARAMETERS, "checkpoint")
    assert sentences(run, "run-checkpoint-stays") == [
        "A loaded checkpoint keeps 1,028.00 KiB on the GPU during training, beside the model that has its own copy. "
        "Load it with map_location='cpu', or del checkpoint after load_state_dict."
    ]


@pytest.mark.parametrize(("where", "then"), [("cpu", "pass"), ("cuda", "del checkpoint")])
def test_nothing_stays_of_what_is_on_the_cpu_or_was_dropped(where: str, then: str) -> None:
    checkpoint()
    run = ran(where, then)
    assert run.loaded_checkpoint is None and not sentences(run, "run-checkpoint-stays")


def test_what_was_there_before_the_steps_does_not_grow_with_them() -> None:
    """The checkpoint's biases and the losses are too small to have lines of their own: only the list grows."""
    checkpoint()
    growth = ran(detached="").growth
    assert growth is not None and growth.holder is not None
    assert (growth.bytes, growth.holder.name) == (4, "losses")
