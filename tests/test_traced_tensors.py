"""Tensors of PyTorch's own tracers, and calls from inside of its modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import memsize
from tests.models import meta_copy


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8))


NET = net()
QUESTIONS: dict[str, Callable[[nn.Module], object]] = {
    "report": lambda model: memsize.report(model, (8,), batch_size=2),
    "trace": lambda model: memsize.trace(model, (8,), batch_size=2),
    "fit": lambda model: memsize.fit(model, (8,), batch_size=2, gpu="t4"),
    "audit_layout": lambda model: memsize.layout(model, (8,), batch_size=2),
    "compare": lambda model: memsize.diff(model, model),
    "execute": lambda model: memsize.report(model, (8,), batch_size=2, execute=True),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_fake_model_is_refused_in_one_line(question: str) -> None:
    with FakeTensorMode():
        model = net()
    with pytest.raises(memsize.MemsizeError, match=r"^0\.weight is a FakeTensor: make it outside of .*$") as caught:
        QUESTIONS[question](model)
    assert "\n" not in str(caught.value)


def test_fake_and_functional_inputs_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(2, 8)
    with pytest.raises(memsize.MemsizeError, match="is a FakeTensor"):
        memsize.report(NET, fake)
    with pytest.raises(memsize.MemsizeError, match=r"outside of torch\.func"):
        memsize.report(NET, torch._to_functional_tensor(torch.ones(2, 8)))
    with pytest.raises(memsize.MemsizeError, match=r"outside of torch\.func"):
        torch.func.vmap(lambda x: memsize.report(NET, x))(torch.ones(3, 2, 8))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode()
        self.references = [StorageWeakRef(torch.ones(2).untyped_storage())]

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_holds_addresses_is_never_copied() -> None:
    """A second `StorageWeakRef` of one address would free it a second time."""
    model = Holder()
    copied = meta_copy(model)
    assert copied.mode is model.mode
    assert copied.references[0] is model.references[0]


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fake": FakeTensorMode,
    "counting": lambda: FlopCounterMode(display=False),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_around_the_call_change_no_figure(mode: str) -> None:
    usual = memsize.trace(NET, (8,), batch_size=2, optimizer="adamw").trace
    with MODES[mode]():
        assert memsize.trace(NET, (8,), batch_size=2, optimizer="adamw").trace == usual


def test_a_profiler_around_the_call_counts_none_of_it() -> None:
    with FlopCounterMode(display=False) as counter:
        memsize.report(NET, (8,), batch_size=2)
    assert counter.get_total_flops() == 0
