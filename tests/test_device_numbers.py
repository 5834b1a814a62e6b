"""GPUs by their bare number, on builds of PyTorch for which a number means no GPU; and TorchScript, which knows classes
and functions by identity.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize.errors import InputError

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.device(0),
        lambda: torch.ones(3).to(0).device,
        lambda: torch.ones(3).to(device=0, dtype=torch.float16).device,
        lambda: torch.ones(3).to(torch.device(0)).device,
        lambda: torch.ones(3).cuda(0).device,
        lambda: torch.zeros(3, device=0).device,
        lambda: torch.tensor([1.0], device=0).device,
        lambda: torch.as_tensor([1.0], device=0).device,
        lambda: torch.empty_like(torch.ones(3), device=0).device,
        lambda: torch.ones(3).new_zeros(3, device=0).device,
        lambda: nn.Linear(2, 2).to(0).weight.device,
        lambda: nn.Linear(2, 2, device=torch.device(0)).weight.device,
        lambda: torch.Generator(0).device,
        lambda: torch.Generator(device=torch.device(0)).device,
    ],
)
def test_a_number_means_that_gpu(make: Callable[[], torch.device]) -> None:
    with memsize.virtual_gpu("t4"):
        assert make() == GPU


def test_a_number_is_a_place_to_make_tensors() -> None:
    with memsize.virtual_gpu("t4"):
        with torch.device(0):
            assert torch.ones(3).device == GPU
        torch.set_default_device(0)
        try:
            assert torch.ones(3).device == torch.get_default_device() == GPU
        finally:
            torch.set_default_device(None)
        torch.ones(2**18, device=0)
        assert torch.cuda.max_memory_allocated(torch.device(0)) == torch.cuda.max_memory_allocated() >= 2**20


def test_the_number_is_that_of_this_process() -> None:
    def step(model: nn.Module) -> Any:
        assert torch.device(2) == torch.device("cuda:2") == torch.zeros(2, device="cuda").device
        with pytest.raises(InputError, match="cuda:0 is the GPU of another process, this one has cuda:2"):
            torch.zeros(2, device=torch.device(0))
        return lambda x: model(x).sum().backward()

    memsize.trace(nn.Linear(2, 2), (2,), world=memsize.World(4, 2), step=step, gpu="t4")


def test_devices_are_what_they_were() -> None:
    """Their class, in what is pickled, copied, compared and saved, on both sides of the region."""
    before, original = torch.device("cpu"), torch.device
    with memsize.virtual_gpu("t4"):
        here = torch.device(0)
        assert isinstance(before, torch.device) and isinstance(here, torch.device | int)
        assert type(here) == torch.device and {original: 1}[torch.device] == 1  # noqa: E721
        assert copy.deepcopy(here) == pickle.loads(pickle.dumps(here)) == here
        kept = pickle.dumps((here, torch.device))
        saved = io.BytesIO()
        torch.save({"device": here}, saved)
        saved.seek(0)
        assert torch.load(saved) == {"device": here}
        with pytest.raises(TypeError, match="invalid combination of arguments"):
            torch.device(1.5)  # type: ignore[call-overload]
    assert torch.device is original and pickle.loads(kept) == (here, original)
    saved.seek(0)
    assert torch.load(saved) == {"device": here}


def made(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(x.shape, device=device) + x.to(torch.device("cpu"))


def alike(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(3, device=x.device)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return made(x, self.device)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_functions_are_compiled_by_torchscript() -> None:
    with memsize.virtual_gpu("t4"):
        assert torch.jit.script(made)(torch.ones(3), torch.device("cpu")).tolist() == [1, 1, 1]
        assert torch.jit.script(Kept())(torch.ones(3)).tolist() == [1, 1, 1]
        assert torch.jit.script(alike)(torch.ones(3, device=0)).device == GPU
