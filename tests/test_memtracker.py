"""PyTorch's own MemTracker over a real run on the CPU says the same peak.

Its roles differ in one way: a gradient is "temporary" there until it is accumulated, and here a gradient from the
start; both together, with activations, are the same bytes. On the CPU it also counts AdamW's step counters, 4 bytes for
each parameter, and the 4 bytes of the one that is added to them: all of that lives on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from memsize import Trace, Training
from memsize.tracing.run import Setup
from tests.models import inputs_from_data, meta_copy
from tests.records import peak
from tests.test_step import OPTIMIZERS, Block
from tests.workloads import TrainingSteps

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        lambda: torch.randn(16, 64),
    ),
    "deep": (lambda: nn.Sequential(*[nn.Linear(48, 48) for _ in range(8)]), lambda: torch.randn(32, 48)),
    "transformer": (lambda: nn.Sequential(Block(), Block()), lambda: torch.randn(4, 16, 32)),
}


def tracked(model: nn.Module, value: Tensor, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, int]:
    """MemTracker's peak over two real steps, by the names of its roles."""
    optimizer = make(model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer, value)
    with tracker:
        for step in range(2):
            optimizer.zero_grad()
            output = model(value)
            loss = output.mean()
            loss.backward()
            optimizer.step()
            if step == 0:
                tracker.reset_mod_stats()
    roles = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(role).rpartition(".")[2]: size for role, size in roles.items()}


def planned(model: nn.Module, value: Tensor, make: Callable[[Any], torch.optim.Optimizer]) -> Trace:
    setup = Setup("m", "as-given", meta_copy(model), inputs_from_data(value).call(), True)
    return TrainingSteps(Training(make, loss="mean", steps=2)).run(setup)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_memtrackers(name: str, optimizer: str) -> None:
    build, make = MODELS[name]
    model, value = build(), make()
    theirs = tracked(copy.deepcopy(model), value, OPTIMIZERS[optimizer])
    found = peak(planned(model, value, OPTIMIZERS[optimizer]))
    counters = 4 * sum(1 for _ in model.parameters()) if optimizer == "adamw" else 0
    assert theirs["Total"] - found.bytes in (0, counters, counters + 4)
    assert theirs["PARAM"] == found.roles["parameter"]
    # What an optimizer's step makes on the way counts as the optimizer's there, and as temporary here.
    ours = found.roles.get("optimizer state", 0)
    passing = found.roles.get("temporary", 0)
    assert theirs["OPT"] - ours in (0, counters, passing + counters, passing + counters + 4)
