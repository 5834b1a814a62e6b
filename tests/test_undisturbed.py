"""The user's model and the process are the same after a report as before, also after one that failed."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memsize
from tests import models
from tests.conftest import Python


def build_hooked() -> nn.Module:
    model = models.Small().eval()
    model.conv.register_forward_hook(lambda module, args, output: None)
    model.norm.weight.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | str]] = {
    "with hooks, in eval mode, partly frozen": (build_hooked, (3, 32, 32)),
    "lazy": (models.Lazy, (20,)),
    "fails half-way": (models.Forgetful, (10,)),
    "wrong input": (models.Small, (3, 16, 16)),
    "modules in a list": (models.Listed, (100,)),
    "lstm": (models.Recurrent, (5, 16)),
    "attention": (models.Attention, (7, 64)),
    "spectral norm": (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(10, 10))), (10,)),
    "parametrized": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(10, 10))), (10,)),
}


def state(model: nn.Module) -> list[object]:
    """Everything of a model that a report could touch."""
    seen: list[object] = []
    for path, module in model.named_modules():
        seen.append((path, type(module), id(module), module.training, sorted(vars(module))))
        seen.append([list(table) for name, table in sorted(vars(module).items()) if name.endswith("_hooks")])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.append((name, id(tensor), tensor.requires_grad, tensor.device, tensor.dtype, type(tensor)))
        if not nn.parameter.is_lazy(tensor):
            seen.append((tensor._version, tensor.data_ptr(), tensor.detach().clone().tolist(), tensor.grad))
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_untouched(name: str) -> None:
    build, size = MODELS[name]
    model = build()
    before = state(model)
    with suppress(memsize.MemsizeError):
        memsize.report(model, size, batch_size=2, scenarios="all")
    assert state(model) == before


@pytest.mark.parametrize("name", ["with hooks, in eval mode, partly frozen", "fails half-way"])
def test_the_process_is_untouched(name: str) -> None:
    build, size = MODELS[name]
    model = build()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = list(process())
    with suppress(memsize.MemsizeError):
        memsize.report(model, size, batch_size=2, scenarios="all")
    assert list(process()) == before


def process() -> Iterator[object]:
    """Global state that running a model may move."""
    yield torch.get_rng_state().tolist()
    yield random.getstate()
    yield np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    yield torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    yield gc.isenabled(), list(warnings.filters)
    yield torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    yield (
        torch.overrides._get_current_function_mode() if hasattr(torch.overrides, "_get_current_function_mode") else None
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_changes_no_figure(mode: Callable[[], AbstractContextManager[object]]) -> None:
    model = models.Small()
    expected = memsize.report(model, (3, 32, 32), batch_size=2)
    step = memsize.trace(model, (3, 32, 32), batch_size=2)
    with mode():
        before = list(process())
        built = models.Small()
        for each in (model, built):
            found = memsize.report(each, (3, 32, 32), batch_size=2)
            assert found.trace == expected.trace
            assert found.totals.saved_bytes > 0
        assert memsize.trace(built, torch.randn(2, 3, 32, 32)).peak == step.peak
        assert list(process())[3:] == before[3:]  # building the model drew random numbers


class Everyday(nn.Module):
    """Convolutions, norms, a recurrent layer, attention, a logged statistic: ops that save what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        self.largest = x.softmax(-1).norm().item()
        x = self.lstm(x)[0].exp()
        attended: torch.Tensor = self.attention(x, x, x)[0]
        return attended.sigmoid()


def live_objects(model: nn.Module, rounds: int) -> int:
    """What the garbage collector knows of after some reports and training steps."""
    for _ in range(rounds):
        memsize.report(model, (3, 8, 8))
        memsize.trace(model, (3, 8, 8), steps=2)
    gc.collect()
    return len(gc.get_objects())


def test_nothing_stays_behind() -> None:
    model = Everyday()
    before = live_objects(model, 3)
    # One round leaks about 2,400 objects where autograd's graphs are not freed. Caches may still learn a few dozen.
    assert live_objects(model, 3) - before < 100


RESIDENT = """
import re
from pathlib import Path
from tests.test_undisturbed import Everyday, live_objects

def resident() -> int:
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

model = Everyday()
objects, kibibytes = live_objects(model, 5), resident()
print(live_objects(model, 245) - objects, resident() - kibibytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own figures")
def test_memory_stays_where_it_was_over_500_runs(python: Python) -> None:
    """A report and a trace a round, in a process of its own."""
    done = python("-c", RESIDENT)
    assert done.returncode == 0, done.stderr
    objects, kibibytes = map(int, done.stdout.split())
    assert objects < 100
    assert kibibytes < 4096


def test_a_model_still_trains_after_its_report() -> None:
    model = models.Small()
    twin = copy.deepcopy(model)
    memsize.report(model, (3, 32, 32), batch_size=2)
    data = torch.randn(2, 3, 32, 32)
    results = []
    for each in (model, twin):
        torch.manual_seed(0)
        each(data).sum().backward()
        results.append(each.head.weight.grad)
    assert torch.equal(results[0], results[1])
