"""Runs that really compute: of any model that runs, always with the same numbers, and none taken from the user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import memsize
from tests.measurements import executable


def pruned() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    return nn.Sequential(layer, nn.ReLU())


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.body(x))
        return self.seen[-1]


def used() -> nn.Module:
    model = Remembering()
    model(torch.ones(2, 8))
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())


@pytest.mark.parametrize("build", [pruned, used, lazy])
def test_computing_keeps_what_the_meta_copy_keeps(build: Callable[[], nn.Module]) -> None:
    model = build()
    computed, predicted = (
        memsize.report(model, (8,), batch_size=2, scenarios="fp32", execute=execute) for execute in (True, False)
    )
    assert computed.layers["saved_bytes"].tolist() == predicted.layers["saved_bytes"].tolist()


def test_a_copy_has_the_values_and_shares_none() -> None:
    model = pruned()
    copied = executable(model)
    assert torch.equal(copied[0].weight, model[0].weight)  # type: ignore[index,union-attr]
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()  # type: ignore[index,union-attr,operator]


def test_values_are_made_the_same_each_time() -> None:
    model = nn.Linear(64, 64, device="meta")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = executable(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(executable(model).weight, first.weight)  # type: ignore[arg-type]
