"""What cuDNN says of convolutions beside the estimate that takes its place where it is not installed.

    python -m benchmarks.workspaces [--every]

The first table goes over the convolutions of the suite's networks, at the suite's batches and dtypes, on five kinds of
GPU; the second over the peaks of its workloads on an H100 (`--every`: all of them, and not one for each network). No
GPU is needed, but cuDNN is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from tabulate import tabulate

from benchmarks.truth.suite import SUITE, Entry
from memsize.device.allocation_events import requests, variants
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.device.replay import replay
from memsize.kernels.cudnn.installed import installed
from memsize.kernels.cudnn.plans import Convolution, Plans, PlanSource, estimate
from memsize.records.measurement import SoftwareStack
from memsize.records.trace import Trace

GPUS = ("t4", "a100", "rtx 3090", "h100", "rtx 5090")
NETS = ("toy", "resnet18", "resnet50", "vgg16", "efficientnet-b0", "convnext-tiny", "unet", "vit-base", "swin-tiny")
MIB = 2**20


def stack(gpu: str) -> SoftwareStack:
    """The newest PyTorch on a card."""
    gpu_card = card(gpu)
    return SoftwareStack(gpu_card.name, gpu_card.capability, gpu_card.bytes, "2.14.1", "3.12")


def entries(every: bool) -> list[Entry]:
    """The workloads in which convolutions run: all, or each network's first training and first inference."""
    convolutional = [entry for entry in SUITE.values() if entry.net in NETS]
    if every:
        return convolutional
    firsts = {(entry.net, entry.training is None): entry for entry in reversed(convolutional)}
    return [entry for entry in convolutional if entry in firsts.values()]


def convolutions(gpu: str) -> dict[Convolution, int]:
    """What the suite asks cuDNN for on a card, and the estimate of each."""
    where = stack(gpu)
    plans = Plans(where.capability)
    for entry in entries(True):
        entry.case.trace(where, plans)
    return plans.answers


def judged(gpu: str, library: PlanSource) -> tuple[Any, ...]:
    """How near the estimates are on one card: shares of the convolutions, and of all bytes of workspace."""
    capability = card(gpu).capability
    rows = []
    for convolution in convolutions(gpu):
        plan = library.plan(convolution, capability)
        rows.append((plan.workspace if plan else 0, estimate(convolution, capability), convolution.operands))
    near = [abs(said - guess) <= 0.1 * operands for said, guess, operands in rows]
    below = [said <= max(2 * guess, 0.1 * operands) for said, guess, operands in rows]
    real, guessed = sum(said for said, _, _ in rows), sum(guess for _, guess, _ in rows)
    share = median(said / operands for said, _, operands in rows)
    return card(gpu).name, len(rows), _share(near), _share(below), f"{guessed / real:.2f}", f"{share:.2f}"


def _share(flags: Sequence[bool]) -> str:
    return f"{sum(flags) / len(flags):.0%}"


def peaks(entry: Entry, library: PlanSource) -> tuple[Any, ...]:
    """The peaks of one workload: without workspaces, by estimates with their interval, and by cuDNN."""
    where = stack("h100")
    guess = entry.case.trace(where, Plans(where.capability))
    answered = entry.case.trace(where, Plans(where.capability, lambda: library))
    least, most = _interval(guess)
    return (
        entry.name,
        _allocated(requests(answered, 0)),
        _allocated(requests(guess)),
        f"{least:,} to {most:,}",
        _allocated(requests(answered)),
        _reserved(requests(guess)),
        _reserved(requests(answered)),
    )


def _interval(trace: Trace) -> tuple[int, int]:
    sizes = [_allocated(variant) for variant in variants(replace(trace, cudnn=None))]
    return min(sizes), max(sizes)


def _allocated(events: Iterable[tuple[int, int]]) -> int:
    return replay(events, AllocatorConfig()).allocated.bytes // MIB


def _reserved(events: Iterable[tuple[int, int]]) -> int:
    return replay(events, AllocatorConfig()).reserved.bytes // MIB


def tables(library: PlanSource, gpus: Sequence[str] = GPUS, every: bool = False) -> Iterator[str]:
    """Both tables, ready to print."""
    titles = ("GPU", "convolutions", "within 10 %", "below twice", "estimated / said", "median share")
    yield tabulate((judged(gpu, library) for gpu in gpus), titles, "github", disable_numparse=True)
    titles = ("workload", "without", "estimate", "interval", "cuDNN", "reserved: estimate", "cuDNN")
    yield tabulate((peaks(entry, library) for entry in entries(every)), titles, "github")


def main(arguments: Sequence[str]) -> None:
    library = installed()
    if library is None:
        sys.exit("no cuDNN is installed that can be asked without a GPU: pip install nvidia-cudnn-cu13")
    print(f"cuDNN {library}; allocated and reserved in MiB\n")
    print("\n\n".join(tables(library, every="--every" in arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
