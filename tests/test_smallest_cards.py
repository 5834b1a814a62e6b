"""The smallest GPU for a batch, against a run on every GPU of the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memsize
from memsize.errors import InputError
from memsize.render import render
from tests.gpus import CARDS

CUDA = sorted((card for card in CARDS.values() if card.platform == "CUDA"), key=lambda card: card.bytes)
SCENARIOS = "fp32,bf16,amp-fp16"


def network() -> nn.Module:
    """Its parameters alone take 2 GiB, their gradients and Adam's state six more."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(16384, 16384), nn.ReLU(), nn.Linear(16384, 16384))


@pytest.mark.thorough
def test_it_is_the_smallest_of_all_that_were_run() -> None:
    question = {"train": "adamw", "batch_size": 64, "scenarios": SCENARIOS}
    smallest = memsize.fit(network(), (16384,), gpu="all", **question)
    runs_on_all = memsize.fit(network(), (16384,), gpu=[card.name for card in CUDA], remedies=False, **question)
    allocators = {budget.name: budget.allocator for budget in runs_on_all.budgets}
    for row in smallest.fit_rows:
        enough = [allocators[other.gpu] for other in runs_on_all.fit_rows
                  if other.scenario == row.scenario and other.status == "fits"]  # fmt: skip
        assert row.status == "fits" and row.budget == min(enough)
    assert [row.scenario for row in smallest.fit_rows] == SCENARIOS.split(",")
    assert smallest.runs <= 2 * len(smallest.fit_rows) < runs_on_all.runs
    assert len(smallest.budgets) <= len(smallest.fit_rows)


@pytest.mark.thorough
def test_each_number_of_gpus_has_its_smallest() -> None:
    sharded = memsize.fit(
        network(), (16384,), gpu="all", train="adamw", batch_size=1, parallel="fsdp", gpus="1..4", scenarios="fp32"
    )
    (one, two, four) = sharded.fit_rows
    assert one.budget > two.budget >= four.budget
    assert [budget.gpus for budget in sharded.budgets] == [1, 2, 4]
    assert "smallest GPU for batch 1 is 4 x" in render(sharded, "text")


@pytest.mark.thorough
def test_where_none_is_large_enough_it_is_the_largest() -> None:
    fit = memsize.fit(network(), (16384,), gpu="all", train="adamw", batch_size=2**22, scenarios="fp32")
    (row,) = fit.fit_rows
    assert row.status == "exceeds" and row.gpu == CUDA[-1].name
    assert "no GPU fits batch 4,194,304" in render(fit, "text")


@pytest.mark.thorough
@pytest.mark.parametrize("question", [{}, {"batch_size": 8, "vary": "image"}])
def test_it_is_about_a_batch(question: dict[str, object]) -> None:
    with pytest.raises(InputError, match="finds the smallest GPU for a batch"):
        memsize.fit(network(), (16384,), gpu="all", **question)
