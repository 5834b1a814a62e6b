"""Scripts that resume from a checkpoint which is not there: what stands for it takes what a real one would."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import memsize
from memsize import ForwardError, ProgramRun

RESUMING = """
    import os, sys, torch
    from pathlib import Path
    from torch import nn

    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 512, device="cuda")).sum().backward()
            optimizer.step()

    def resume(path, device):
        checkpoint = torch.load(path, map_location=device)
        model.load_state_dict(state_dict=checkpoint["model"])
        optimizer.load_state_dict(state_dict=checkpoint["optimizer"])
        schedule.load_state_dict(state_dict=checkpoint["schedule"])
        start, best = checkpoint["epoch"] + 1, checkpoint.get("best", 0)
        return checkpoint, f"{best:.2f}", best < 1, range(start)
"""
STATE = 4 * (512 * 1024 + 1024 + 1024 * 512 + 512)
"""Bytes of the weights."""


def ran(folder: Path, text: str, *arguments: str, checkpoint: str | None = "stand-in") -> ProgramRun:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, arguments, gpu="t4", checkpoint=checkpoint)
    assert isinstance(run, ProgramRun)
    return run


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("device", ["'cpu'", "'cuda'", "None"])
def test_a_stand_in_takes_what_a_checkpoint_takes_that_is_there(tmp_path: Path, device: str) -> None:
    """The oracle is a checkpoint that the same script has saved before."""
    text = textwrap.dedent(RESUMING)
    resuming = f"""
assert sys.argv[2] == "real.txt" or os.path.isfile(sys.argv[1])
before = torch.cuda.memory_allocated()
names = resume(sys.argv[1], {device})
Path(sys.argv[2]).write_text(str(torch.cuda.memory_allocated() - before))
"""
    saving = """
train(1)
states = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
torch.save({**states, 'schedule': schedule.state_dict(), 'epoch': 0, 'best': 0.0}, sys.argv[1])
optimizer.zero_grad(); optimizer.state.clear(); del states
"""
    stood_in = ran(tmp_path, f"{text}{resuming}\ntrain(3)", "last.pt", "stood_in.txt")
    real = ran(tmp_path, f"{text}{saving}{resuming}\ntrain(2)", "last.pt", "real.txt", checkpoint=None)
    assert any("last.pt does not exist" in note for note in stood_in.trace.notes)
    assert not any("last.pt" in note for note in real.trace.notes)
    taken = [int((tmp_path / name).read_text()) for name in ("stood_in.txt", "real.txt")]
    assert taken[0] == taken[1] >= 2 * STATE
    assert not (tmp_path / "last.pt").exists()


def test_entries_that_a_script_goes_through_are_those_of_its_model(tmp_path: Path) -> None:
    text = """
    weights = torch.load("absent.pth", map_location="cpu")["state_dict"]
    named = {name.removeprefix("module."): weight for name, weight in weights.items()}
    assert list(named) == list(model.state_dict()) and named["0.weight"].shape == (1024, 512)
    model.load_state_dict(named)
    train(3)
    """
    assert ran(tmp_path, textwrap.dedent(RESUMING) + textwrap.dedent(text)).steps == 3


def test_a_checkpoint_that_is_not_there_fails_without_the_option(tmp_path: Path) -> None:
    with pytest.raises(memsize.ForwardError, match="No such file"):
        ran(tmp_path, textwrap.dedent(RESUMING) + "\nresume('absent.pt', None)", checkpoint=None)


def test_a_missing_checkpoint_is_pointed_at_its_stand_in(tmp_path: Path) -> None:
    """What a person sees who resumes a script without the file, and what the answer says to type."""
    text = f"{textwrap.dedent(RESUMING)}\nresume(sys.argv[1], 'cuda')\ntrain(1)"
    with pytest.raises(
        ForwardError, match=r"last\.pt is not on this machine: run the script with checkpoint stand-in, which"
    ):
        ran(tmp_path, text, "last.pt", checkpoint=None)
    assert ran(tmp_path, text, "last.pt").failure is None
