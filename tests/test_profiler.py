"""A second witness: the allocations and frees that `torch.profiler` sees in a real run on the CPU.

It sees the allocator itself, below PyTorch's dispatcher. Numbers of a few bytes, which kernels of the CPU make for
themselves, are left aside; so are models with kernels (layer norm, convolution) that take larger ones there.
"""

from __future__ import annotations

import copy
import gc

import pytest
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.test_step import OPTIMIZERS, ZOO, stepped

SMALLEST = 33
"""Bytes from which an event counts."""


def seen_by_the_profiler(model: nn.Module, value: Tensor) -> list[int]:
    """Bytes that appear (> 0) and disappear (< 0) over two real training steps, in order."""
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    kept: list[Tensor] = []
    gc.collect()  # what earlier tests left in cycles would be freed while the profiler watches
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            output = model(value)
            loss = output.mean()
            kept[:] = [output]
            del output
            loss.backward()
            del loss
            optimizer.step()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (event.start_ns(), index, event.nbytes()) for index, event in enumerate(events) if event.name() == "[memory]"
    )
    return [size for _, _, size in memory if abs(size) >= SMALLEST]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # 2.11 gives this advice with one cycle too
@pytest.mark.parametrize("name", ["perceptron", "deep", "tanh", "no bias", "in place", "custom function"])
def test_the_allocator_saw_the_same(name: str) -> None:
    build, make = ZOO[name]
    model, value = build(), make()
    trace = stepped(model, value, OPTIMIZERS["sgd"], "meta")
    planned = [e.delta for e in trace.events if trace.phases[e.phase] != "setup" and abs(e.delta) >= SMALLEST]
    assert planned == seen_by_the_profiler(model, value)
