"""Predictions beside measured GPU memory, where the measurements are at hand (they are not part of the project)."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memsize.device.allocator import replay
from memsize.tracing.ledger import Workspaces
from memsize.tracing.run import Setup, gpu_semantics
from memsize.workloads.training import OwnLoop

TRUTH = Path(__file__).resolve().parents[2] / "shared" / "truth"
A100 = TRUTH / "a100_mlp.csv"
MIB = 2**20

SAMPLES = 4096
"""Of the script that was measured, as are the loop below and the summary before it: ``mlp.py`` of itu-rad/GPUMemNet."""
CONTEXT = 1429
"""MiB of CUDA context on that stack (CUDA before 11.7): the one fitted constant."""


def perceptron(features: int, layers: str) -> nn.Module:
    """The network that a row describes: ``linear 156 | ReLU | linear 78-nobias``."""
    parts: list[nn.Module] = []
    for part in layers.split(" | "):
        kind, _, width = part.partition(" ")
        if kind == "linear":
            size = int(width.removesuffix("-nobias"))
            parts.append(nn.Linear(features, size, bias=not width.endswith("-nobias"), device="meta"))
            features = size
        else:
            parts.append(getattr(nn, kind)())
    return nn.Sequential(*parts)


def epochs(batch: int) -> list[int]:
    """Batch sizes of two passes over the data: full ones, of which three tell all, then what is left over."""
    full, rest = divmod(SAMPLES, batch)
    return ([batch] * min(full, 3) + [rest] * (rest > 0)) * 2


def loop(sizes: list[int], features: int) -> Callable[[nn.Module], Callable[[], None]]:
    """torchsummary runs the model once with two samples. In training, a batch is freed before the next one is copied
    to the GPU; an output and a loss live until the next ones replace them.
    """

    def make(model: nn.Module) -> Callable[[], None]:
        model(torch.empty(2, 1, features, device="meta"))
        optimizer = torch.optim.Adam(model.parameters())
        criterion = nn.CrossEntropyLoss()
        pending = iter(sizes)
        held: dict[str, Tensor] = {}

        def body() -> None:
            batch = next(pending)
            for name in "xy":
                held.pop(name, None)
            held["x"] = torch.empty(batch, features, device="meta")
            held["y"] = torch.zeros(batch, dtype=torch.int64, device="meta")
            optimizer.zero_grad()
            held["output"] = model(held["x"])
            held["loss"] = criterion(held["output"], held["y"])
            held["loss"].backward()
            optimizer.step()

        return body

    return make


def predicted(row: dict[str, str]) -> float:
    """MiB that the card would show: the context and the allocator's segments."""
    features, batch = int(row["input_features"]), int(row["batch_size"])
    sizes = epochs(batch)
    setup = Setup(
        "row",
        "fp32",
        perceptron(features, row["layers"]),
        ((), {}),
        True,
        semantics=gpu_semantics,
        # An A100 with a release that gave cuBLASLt a workspace of its own.
        workspaces=Workspaces(8_519_680, MIB),
    )
    trace = OwnLoop(loop(sizes, features), len(sizes)).run(setup)
    return CONTEXT + replay([(event.storage, event.delta) for event in trace.events]).reserved.bytes / MIB


@pytest.fixture(scope="module")
def errors() -> list[tuple[float, float]]:
    """Absolute (MiB) and relative error of every row."""
    if not A100.exists():
        pytest.skip("the A100 measurements are not here")
    with A100.open() as lines:
        rows = list(csv.DictReader(lines))
    found = [(abs(predicted(row) - float(row["device_mib"])), float(row["device_mib"])) for row in rows]
    return [(error, error / measured) for error, measured in found]


def test_a100_perceptrons(errors: list[tuple[float, float]]) -> None:
    relative = [share for _, share in errors]
    assert statistics.median(relative) <= 0.001
    assert sum(share <= 0.01 for share in relative) >= 0.95 * len(errors)
    assert sum(error <= 8 for error, _ in errors) >= 0.95 * len(errors)


def test_most_rows_are_exact(errors: list[tuple[float, float]]) -> None:
    assert sum(error == 0 for error, _ in errors) >= 0.85 * len(errors)
