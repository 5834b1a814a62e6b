"""Published data sets whose files are not part of the project, predicted where the files are at hand.

`MEMSIZE_SHARED`, or a folder ``shared`` beside the checkout, holds them in ``truth``.
What is kept here is each row's error.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

import memsize
from benchmarks.accuracy import VISION, predicted
from benchmarks.published.recipes import random_networks
from benchmarks.zoo.operators import declare
from memsize.analysis.step import StepTrace
from memsize.device.allocation_events import variants
from memsize.device.replay import replay
from memsize.records.gpu import Interval
from memsize.records.verification import off_by
from memsize.units import MiB

BESIDE: Final = 1429
"""MiB that the A100's figures hold beside the allocator's segments, nearly all of them the same: what is fitted where
the segments alone are judged, and nowhere else."""
STACK: Final = "torch=2.4,cuda=12.1,loading=eager"
"""Not stated: its cleaner looks for an error as PyTorch has named it since about 2.4, and its scripts ask whether there
is a GPU before they use it, after which CUDA loads eagerly up to 12.1."""
SAMPLES: Final = 4096
"""Of the script that was measured, as are the loop and the summary before it: ``mlp.py`` of itu-rad/GPUMemNet."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the prediction of a row is off, as a share of what was measured: its figure, and its interval's end."""

    source: str
    row: int
    kind: str
    error: float
    outside: float
    width: int
    """Bytes between the interval's ends."""


def folder() -> Path | None:
    """Where the data sets are, None if nowhere."""
    named = os.environ.get("MEMSIZE_SHARED")
    root = Path(named) if named else Path(__file__).resolve().parents[3] / "shared"
    return root / "truth" if (root / "truth").is_dir() else None


def gaps(names: Collection[str]) -> Iterator[Gap]:
    """The errors of all rows of the named data sets that are at hand."""
    here = folder()
    for name in names:
        if here is None or not (here / name).exists():
            continue
        with (here / name).open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 1):
                gap = _COMPARISONS[name](number, row)
                if gap is not None:
                    yield gap


# -- 200 perceptrons on an A100 ----------------------------------------------------------------------------------------


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


def _passes(batch: int) -> list[int]:
    """Batch sizes of three passes over the data: full ones, of which three tell all, then what is left over. A network
    of 13 layers still gets a new segment in the third pass.
    """
    full, rest = divmod(SAMPLES, batch)
    return ([batch] * min(full, 3) + [rest] * (rest > 0)) * 3


def _loop(sizes: list[int], features: int) -> Callable[[nn.Module], Callable[[Tensor], None]]:
    """torchsummary runs the model once with two samples. In training, a batch is freed before the next one is copied
    to the GPU; an output and a loss live until the next ones replace them.
    """

    def make(model: nn.Module) -> Callable[[Tensor], None]:
        model(torch.empty(2, 1, features, device="meta"))
        optimizer = torch.optim.Adam(model.parameters())
        criterion = nn.CrossEntropyLoss()
        pending = iter(sizes)
        tensors: dict[str, Tensor] = {}

        def body(_: Tensor) -> None:
            batch = next(pending)
            for name in "xy":
                tensors.pop(name, None)
            tensors["x"] = torch.empty(batch, features, device="meta")
            tensors["y"] = torch.zeros(batch, dtype=torch.int64, device="meta")
            optimizer.zero_grad()
            tensors["output"] = model(tensors["x"])
            tensors["loss"] = criterion(tensors["output"], tensors["y"])
            tensors["loss"].backward()
            optimizer.step()

        return body

    return make


def perceptron_step(row: dict[str, str]) -> StepTrace:
    """The run of a row."""
    features, sizes = int(row["input_features"]), _passes(int(row["batch_size"]))
    return memsize.trace(
        perceptron(features, row["layers"]),
        args=(torch.empty(1),),
        step=_loop(sizes, features),
        steps=len(sizes),
        gpu="a100",
        stack=STACK,
    )


def _perceptron_gap(number: int, row: dict[str, str]) -> Gap:
    """The middle of what the card may show, beside what it showed."""
    device = perceptron_step(row).peak.device
    return _gap("gpumemnet", number, "linear networks", device, round(float(row["device_mib"]) * MiB))


def _gap(source: str, number: int, kind: str, device: Interval, measured: int) -> Gap:
    error = sum(device) / 2 / measured - 1
    return Gap(source, number, kind, error, off_by(device, measured) / measured, device.high - device.low)


# -- random networks on the same A100 ----------------------------------------------------------------------------------


def _network_gap(number: int, row: dict[str, str]) -> Gap:
    device = random_networks.training(random_networks.settings(row), "a100", STACK).peak.device
    measured = round(float(row["max_nvidia_smi_mib"]) * MiB)
    return _gap("gpumemnet-cnn", number, "convolutional networks", device, measured)


# -- the xMem paper ----------------------------------------------------------------------------------------------------


def _xmem_gap(number: int, row: dict[str, str]) -> Gap | None:
    """`reserved` beside the paper's NVML delta, which leaves most of the context out; None where memory ran out."""
    if row["real_oom"] == "true":
        return None
    try:
        step = predicted(row)
    except (ImportError, KeyError) as error:
        print(f"left out: {row['model']}: {error}", file=sys.stderr)
        return None
    measured, said = int(row["ground_nvml_delta_bytes"]), step.peak.reserved
    kind = "convolutional networks" if row["model"] in VISION else "transformers, whole steps"
    interval = _reserved(step)
    outside = off_by(interval, measured) / measured
    return Gap("xmem", number, kind, said / measured - 1, outside, interval.high - interval.low)


def _reserved(step: StepTrace) -> Interval:
    """What the allocator reserves with the least and with the most that convolutions may take."""
    peaks = [
        replay(variant, step.config, streams=step.trace.streams).reserved.bytes for variant in variants(step.trace)
    ]
    return Interval(min(*peaks, step.peak.reserved), max(*peaks, step.peak.reserved))


_COMPARISONS: Final[Mapping[str, Callable[[int, dict[str, str]], Gap | None]]] = {
    "a100_mlp.csv": _perceptron_gap,
    "gpumemnet_cnn.csv": _network_gap,
    "xmem_sample.csv": _xmem_gap,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    declare()
    for gap in gaps(sys.argv[1:]):
        print(json.dumps(asdict(gap)), flush=True)
