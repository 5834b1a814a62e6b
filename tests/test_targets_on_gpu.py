"""Targets whose files want a GPU: they load as on a machine with one, and are what they are on the CPU."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize.cli import run as command
from tests.programs import gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

NET = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.fc = nn.Linear(16, 2048)
        self.register_buffer("scale", torch.linspace(0, 1, 2048))
        {inside}

    def forward(self, x):
        y = self.fc(self.conv(x).mean((2, 3)))
        return y * self.scale if self.scale[0] == 0 else y

{after}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def written(inside: str = "pass", after: str = "model = Net()") -> str:
        # One name for all, so that answers can be compared.
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "net.py").write_text(NET.format(inside=inside, after=textwrap.dedent(after)))
        monkeypatch.chdir(folder)
        return "net.py:model"

    return written


def stored(model: str, **options: Any) -> Any:
    return memsize.report(model, (3, 16, 16), batch_size=2, **options)


@pytest.mark.parametrize(
    ("inside", "after"),
    [
        ("pass", "model = Net().cuda()"),
        ("self.to('cuda'); assert float(self.scale[-1]) == 1", "model = Net()"),
        ("self.fc.weight.data = self.fc.weight.data.cuda()", "model = Net().to('cuda:0')"),
        ("pass", "assert torch.cuda.is_available(), 'this file needs a GPU'\nmodel = Net()"),
        ("pass", "if not torch.cuda.is_available():\n    sys.exit('no GPU')\nmodel = Net()"),
        ("pass", "name = torch.cuda.get_device_name(0)\nmodel = Net()"),
        ("pass", "torch.cuda.set_device(0)\nwith torch.device('cuda'):\n    model = Net()"),
        ("pass", "model = nn.DataParallel(Net()).cuda().module"),
        ("self.side = torch.cuda.Stream()", "model = Net()"),
    ],
)
def test_a_file_that_wants_a_gpu_is_answered_as_if_it_did_not(
    write: Callable[..., str], inside: str, after: str
) -> None:
    assert stored(write(inside, after)) == stored(write())


def test_training_steps_and_fits_meet_the_gpu_too(write: Callable[..., str]) -> None:
    there, here = (
        stored(write(after=text), train="adamw", gpu="t4") for text in ("model = Net().cuda()", "model = Net()")
    )
    assert there == here
    target = write(after="model = Net().cuda()")
    there, here = (memsize.fit(each, (3, 16, 16), gpu="t4").rows for each in (target, write()))
    assert there.equals(here)


def test_the_gpu_is_the_one_that_was_named(write: Callable[..., str]) -> None:
    target = write(after="assert torch.cuda.get_device_name() == 'Tesla T4'\nmodel = Net()")
    assert stored(target, gpu="t4").layers is not None
    with pytest.raises(memsize.TargetError, match=r"net\.py:\d+: AssertionError"):
        stored(target, gpu="h100")


def test_a_model_larger_than_the_gpu_is_built(write: Callable[..., str]) -> None:
    """64 Gi parameters of 4 bytes are 256 GiB, and a T4 has 15."""
    target = write(after="Net().cuda()\nmodel = nn.Linear(2**18, 2**18, bias=False, device='cuda')")
    assert memsize.report(target).trace.tensors[0].bytes == 2**38


def test_inputs_are_made_on_the_gpu(write: Callable[..., str]) -> None:
    write(after="def batch(batch_size):\n    return torch.randn(batch_size, 3, 16, 16).cuda()\nmodel = Net()")
    assert memsize.report("net.py:model", input_data="net.py:batch", batch_size=2) == stored("net.py:model")


def test_an_error_that_has_nothing_to_do_with_a_gpu_is_told_as_it_is(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(after="print('loading')\nraise ValueError(torch.cuda.is_available())")
    assert command(["report", "net.py:model"]) == 2
    assert "ValueError: False" in capsys.readouterr().err


def test_inside_of_a_virtual_gpu_it_is_that_one(write: Callable[..., str]) -> None:
    target = write(after="model = Net().cuda()")
    with gpu():
        assert memsize.report(target).trace.tensors


def test_nothing_stays_of_the_gpu(write: Callable[..., str]) -> None:
    before = {
        name: id(value)
        for owner in (torch._C, torch.cuda, torch.Tensor, nn.Module)
        for name, value in vars(owner).items()
    }
    stored(write(after="torch.set_default_tensor_type(torch.cuda.HalfTensor)\nmodel = Net().cuda()"))
    after = {
        name: id(value)
        for owner in (torch._C, torch.cuda, torch.Tensor, nn.Module)
        for name, value in vars(owner).items()
    }
    assert {name for name in before if before[name] != after.get(name)} == set()
    assert torch.get_default_dtype() is torch.float32 and torch.ones(1).device.type == "cpu"
    assert not torch.cuda.is_available() and not any("memsize" in str(type(finder)) for finder in sys.meta_path)
