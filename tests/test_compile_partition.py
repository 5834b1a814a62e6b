"""Which layers keep the same compiled as in eager code, where the partition recomputes nothing, and which don't.

Images have 32 rows and columns, so that Inductor pads no strides: it aligns those of a convolution's input to 128 B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memsize
from memsize.records.trace import Trace
from tests.records import totals
from tests.test_compile import COMPILED, default_partition

IMAGES, ROWS = (3, 32, 32), (32, 64)


class Net(nn.Module):
    """Layers that `call` puts together."""

    def __init__(self, call: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.layers)


def linear(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), *between, nn.Linear(64, 8))


def convolved(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *between, nn.Conv2d(16, 4, 3))


def two() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(64, 64), nn.Linear(64, 64)


SAME: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm, max pool": (lambda: convolved(nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)), IMAGES),
    "group norm, silu, adaptive pool": (
        lambda: convolved(nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(8)),
        IMAGES,
    ),
    "transposed convolution, elu": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 4, 3)),
        IMAGES,
    ),
    "hardswish, average pool, hardsigmoid": (
        lambda: convolved(nn.Hardswish(), nn.AvgPool2d(2), nn.Hardsigmoid()),
        IMAGES,
    ),
    "rms norm": (lambda: linear(nn.RMSNorm(64)), ROWS),
    "gelu by tanh": (lambda: linear(nn.GELU(approximate="tanh")), ROWS),
    "dropout": (lambda: linear(nn.Dropout(0.1)), ROWS),
    "swiglu": (lambda: Net(lambda x, up, gate: F.silu(gate(x)) * up(x), *two()), ROWS),
    "softmax of scores": (lambda: Net(lambda x, q, k: (q(x) @ k(x).transpose(1, 2) / 8).softmax(-1) @ x, *two()), ROWS),
    "masked_fill, tanh, sigmoid": (
        lambda: Net(lambda x, up: up(x).masked_fill(x > 0, 0).tanh().sigmoid(), nn.Linear(64, 64)),
        ROWS,
    ),
    "chunk, exp, cat": (
        lambda: Net(lambda x, up, down: down(torch.cat([c.exp() for c in up(x).chunk(4, -1)], -1)), *two()),
        ROWS,
    ),
}


def traced(model: nn.Module, scenario: str, size: tuple[int, ...]) -> Trace:
    return memsize.trace(model, input_size=size, batch_size=8, scenario=scenario, optimizer="sgd").trace


def both(name: str, scenario: str, nets: dict[str, Any]) -> tuple[Trace, Trace]:
    make, size = nets[name]
    with default_partition():
        compiled = traced(make(), scenario + COMPILED, size)
    return traced(make(), scenario, size), compiled


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("name", SAME)
def test_layers_keep_the_same(name: str, scenario: str) -> None:
    eager, compiled = both(name, scenario, SAME)
    assert totals(compiled).saved_bytes == totals(eager).saved_bytes


def test_batch_norms_keep_their_statistics_in_float32() -> None:
    """As on CUDA; PyTorch's decomposition has them in the input's dtype on the CPU: 16 means and 16 deviations."""
    _, compiled = both("batch norm, max pool", "amp-bf16", SAME)
    assert [s.dtype for s in compiled.storages if s.saved_by >= 0 and s.shape in ((16,), (1, 16, 1, 1))] == [
        "float32"
    ] * 2


DIFFERENT: dict[str, Any] = {
    "nearest": (lambda: convolved(nn.Upsample(scale_factor=2)), IMAGES),
    "bilinear": (lambda: convolved(nn.Upsample(scale_factor=2, mode="bilinear")), IMAGES),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("nearest", {("int64", 64 * 8): 2}),  # of 64 rows and columns, the one of 32 that it comes from
        ("bilinear", {("int64", 64 * 8): 4, ("float32", 64 * 4): 2}),  # the two that it lies between, and how far
    ],
)
def test_upsampling_keeps_its_indices(name: str, more: dict[tuple[str, int], int]) -> None:
    """Inductor decomposes it into an indexed read, whose indices autograd keeps."""
    eager, compiled = (
        Counter((s.dtype, s.bytes) for s in trace.storages if s.saved_by >= 0)
        for trace in both(name, "fp32", DIFFERENT)
    )
    assert compiled - eager == more and not eager - compiled


@pytest.mark.thorough
def test_weights_of_convolutions_are_kept_as_their_copies_in_channels_last() -> None:
    """Inductor prefers that layout where most convolutions have many channels, and copies their weights into it."""
    net = {
        "convolutions": (lambda: nn.Sequential(*(nn.Conv2d(128, 128, 3, bias=False) for _ in range(3))), (128, 32, 32))
    }
    eager, compiled = both("convolutions", "fp32", net)
    more = totals(compiled).saved_bytes - totals(eager).saved_bytes
    copies = [s for s in compiled.storages if s.saved_by >= 0 and s.op == "clone" and s.shape == (128, 128, 3, 3)]
    assert more == sum(s.bytes for s in copies) == 3 * 128 * 128 * 3 * 3 * 4
    assert [compiled.layers[s.layer].path for s in copies] == ["0", "1", "2"]
