"""A step that is recorded as a repetition is the step that would have been run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import memsize
from memsize import Trace
from tests.workloads import StepRepetition


def convolutional() -> nn.Module:
    block = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (2, 3, 16, 16)),
    "attentive": (attentive, (2, 6, 16)),
}


def traced(model: nn.Module, size: tuple[int, ...], **options: Any) -> tuple[Trace, int]:
    """The trace of a training, and how many of its steps were repetitions."""
    with mock.patch.object(StepRepetition, "repeat", autospec=True, side_effect=StepRepetition.repeat) as repeated:
        trace = memsize.trace(model, torch.zeros(size), **{"optimizer": "adamw", **options}).trace
    return trace, repeated.call_count


def all_run(model: nn.Module, size: tuple[int, ...], **options: Any) -> Trace:
    with mock.patch.object(StepRepetition, "repeat_themselves", False):
        trace, repeated = traced(model, size, **options)
    assert repeated == 0
    return trace


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "sgd"},
    {"optimizer": "sgd:momentum=0.9", "scenario": "bf16"},
    {"optimizer": "adamw:foreach=False"},
    {"optimizer": "adafactor", "ema": True},
    {"scenario": "amp-fp16", "gradient_accumulation_steps": 2},
    {"scenario": "amp-bf16", "loss": "mean"},
    {"scenario": "fp16", "gpu": "t4"},
)


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_the_third_step_is_recorded_as_it_would_have_run(name: str, options: dict[str, Any]) -> None:
    make, size = NETS[name]
    trace, repeated = traced(make(), size, **options)
    assert repeated == 1
    assert trace == all_run(make(), size, **options)


def test_gradients_that_stay_are_zeroed_for_the_first_time_in_the_second_step() -> None:
    make, size = NETS["convolutional"]
    trace, repeated = traced(make(), size, set_to_none=False)
    assert repeated == 0  # the first step made gradients to keep, the second made others to add to them
    assert trace == all_run(make(), size, set_to_none=False)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_other_numbers_of_steps_are_run(steps: int) -> None:
    trace, repeated = traced(nn.Linear(4, 4), (2, 4), steps=steps)
    assert repeated == 0
    assert trace.phases[-1].endswith(f" {steps}")


class Alternating(nn.Module):
    """Every other forward is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return self.linear(x.repeat(1 + self.number % 2, 1))


class Hoarding(nn.Module):
    """It keeps what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.all: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all.append(self.linear(x))
        return self.all[-1]


@pytest.mark.parametrize("model", [Alternating, Hoarding])
def test_steps_that_differ_are_run(model: Callable[[], nn.Module]) -> None:
    trace, repeated = traced(model(), (2, 4))
    assert repeated == 0
    assert trace == all_run(model(), (2, 4))


def test_an_optimizer_from_elsewhere_runs_every_step() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    _, repeated = traced(nn.Linear(4, 4), (2, 4), optimizer=make)
    assert repeated == 0
