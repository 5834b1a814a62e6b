"""A ResNet-50, in-process and warm: one trace and the default report beside one run of a summary on the CPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

import torch
import torchinfo
from torch import nn

import memsize
from benchmarks.measure import Line, compared, in_turn
from memsize.inputs import InputSpec
from memsize.scenario import DEFAULT, SCENARIOS
from memsize.study import Study
from memsize.tracing.feed import feed_from_specs

SIZE = (3, 224, 224)
PARAMETERS = 25_557_032


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, and a shortcut around them; He et al., 2015, with the stride in the 3×3."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.reduce, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.middle, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.expand, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            projection = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.reduce(x)))
        y = self.relu(self.norm2(self.middle(y)))
        return self.relu(self.norm3(self.expand(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """16 bottlenecks in four stages, for 1,000 classes: 25,557,032 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.Sequential(*(_stage(stage, blocks) for stage, blocks in enumerate((3, 4, 6, 3))))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


def _stage(stage: int, blocks: int) -> nn.Sequential:
    width = 64 * 2**stage
    first = Bottleneck(64 if stage == 0 else 2 * width, width, 1 if stage == 0 else 2)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))


def traced(model: nn.Module, scenario: str) -> None:
    """One forward under `scenario`, from the model to its trace."""
    feed = feed_from_specs((InputSpec(None, SIZE),), 1)
    Study("resnet", model, feed, True, lambda _: None).trace(SCENARIOS[scenario])


def by_torchinfo(model: nn.Module) -> None:
    torchinfo.summary(model, (1, *SIZE), verbose=0, device="cpu")


def by_torchsummary(model: nn.Module) -> None:
    """It runs two samples and prints its table, whether one wants that or not."""
    from torchsummary import summary

    with contextlib.redirect_stdout(io.StringIO()):
        summary(model, SIZE, device="cpu")


def lines(quick: bool) -> Iterator[Line]:
    """One sample everywhere, which costs a summary on the CPU the least."""
    model = ResNet50()
    scenarios = ["fp32", "amp-bf16"] if quick else [name for name in DEFAULT if name != "as-given"]
    calls: list[Callable[[], object]] = [lambda: by_torchinfo(model), lambda: by_torchsummary(model)]
    calls.append(lambda: memsize.report(model, SIZE, scenarios=scenarios if quick else None))
    calls += [lambda name=name: traced(model, name) for name in scenarios]  # type: ignore[misc]
    in_turn(calls, 1)
    torchinfo_takes, torchsummary_takes, report, *traces = in_turn(calls, 1 if quick else 7)
    for name, trace in zip(scenarios, traces, strict=True):
        yield compared(f"ResNet-50, trace of {name}", trace, "torchinfo.summary", torchinfo_takes, 1.0)
    yield compared("ResNet-50, default report", report, "torchinfo.summary", torchinfo_takes, 3.0)
    yield compared("ResNet-50, default report", report, "torchsummary.summary", torchsummary_takes)
