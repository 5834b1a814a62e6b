"""A ResNet-50, in-process and warm: one trace and the default report beside one run of a summary on the CPU."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator

import torch
import torchinfo
from torch import nn

import memsize
from benchmarks.measure import Line, compared, in_turn
from benchmarks.nets.residual import ResNet50
from memsize.analysis.runner import Runner
from memsize.model.input_tensors import inputs_from_specs
from memsize.spec.inputs import InputSpec
from memsize.spec.scenario import DEFAULT, SCENARIOS
from memsize.workloads import Forward

SIZE = (3, 224, 224)
PARAMETERS = 25_557_032


def traced(model: nn.Module, scenario: str) -> None:
    """One forward under `scenario`, from the model to its trace."""
    inputs = inputs_from_specs((InputSpec(None, SIZE),), 1)
    Runner("resnet", model, inputs, True).run(Forward(), SCENARIOS[scenario])


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
    yield compared("ResNet-50, default report", report, "torchinfo.summary", torchinfo_takes, 2.5)
    yield compared("ResNet-50, default report", report, "torchsummary.summary", torchsummary_takes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other take CPU time as well
    try:
        torchinfo_takes, _, report = in_turn(calls[:3], 1 if quick else 7, time.process_time)
    finally:
        torch.set_num_threads(threads)
    yield compared("ResNet-50, default report, CPU", report, "torchinfo, one thread", torchinfo_takes, 2.5)
