"""Deep models for the tests of `memsize.depth`, and a run of one beside that of all its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memsize import ModelRequest
from memsize.analysis.model_setups import plans_of as plans_of
from memsize.analysis.runner import Runner as Runner
from memsize.analysis.short_runs import different_part as different_part
from memsize.api.opened import opened as opened
from memsize.depth.alignment import (
    Insertion as Insertion,
    Table as Table,
    extended as extended,
    insertions as insertions,
    origins as origins,
)
from memsize.depth.blocks import (
    FoldedPath as FoldedPath,
    ModelBlocks as ModelBlocks,
    RepeatedBlocks as RepeatedBlocks,
    Repetition as Repetition,
    find_blocks as find_blocks,
    shorten as shorten,
)
from memsize.depth.trace_extension import NotRepeatedError as NotRepeatedError
from memsize.kernels.cudnn import handle, installed
from memsize.records.trace import Trace
from memsize.spec.parallel import parse_parallel as parse_parallel
from memsize.spec.scenario import SCENARIOS
from memsize.workloads import Forward as Forward, Inference as Inference, Workload
from memsize.workloads.generation import GenerationSteps as GenerationSteps
from memsize.workloads.kv_caches import OnGpuWithHost as OnGpuWithHost
from memsize.workloads.parallel import ParallelSteps as ParallelSteps
from memsize.workloads.training import TrainingSteps as TrainingSteps

WIDTH = 4

cudnn_handle, cudnn_releases = handle, installed


class Block(nn.Module):
    """A residual block."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x)).relu()


class Deep(nn.Module):
    """Blocks between an embedding and a head. Subclasses change what is done with them."""

    def __init__(self, blocks: int = 16, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(block(index) for index in range(blocks))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            x = self.layer(index, layer, x)
        return self.head(x)

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        return layer(x)


class Deeper(Deep):
    """Has so many blocks that even a single run of short models is worth its proof."""

    def __init__(self) -> None:
        super().__init__(40)


def traced(
    model: nn.Module, workload: Workload, scenario: str = "as-given", *, whole: bool = False, **data: Any
) -> Trace:
    """Run `workload` on a model; `whole` runs all layers."""
    if not whole:
        return first_and_next(model, workload, workload, scenario, **data)[1]
    with opened(_request(model, **data)) as request:
        return Runner(*request.run, whole=True).run(workload, SCENARIOS[scenario])


def first_and_next(
    model: nn.Module, proof: Workload, workload: Workload, scenario: str = "as-given", **data: Any
) -> tuple[Trace, Trace]:
    """Run `proof` on the model as given, which runs all layers and may prove the next run: `workload` in `scenario`."""
    with opened(_request(model, **data)) as request:
        runner = Runner(*request.run)
        first = runner.run(proof, SCENARIOS["as-given"])
        if workload.proof is not None:  # as if so many had been made that short runs are worth it for any model
            runner.short_runs.whole_runs[workload.proof.kind] = 100
        return first, runner.run(workload, SCENARIOS[scenario])


def _request(model: nn.Module, **data: Any) -> ModelRequest:
    return ModelRequest.of(model, **data or {"args": (torch.zeros(5, 3),)})


def run_once(model: nn.Module, workload: Workload, *, whole: bool) -> Trace:
    """Run `workload` on a model for the first time."""
    with opened(ModelRequest.of(model, args=(torch.zeros(5, 3),))) as request:
        return Runner(*request.run, whole=whole).run(workload, SCENARIOS["as-given"])


def reasons_after(runs: int, model: nn.Module, workload: Workload) -> tuple[str, ...]:
    """Say why none of some runs of a model was extended."""
    with opened(ModelRequest.of(model, args=(torch.zeros(5, 3),))) as request:
        runner = Runner(*request.run)
        assert not any(runner.run(workload, SCENARIOS["as-given"]).extended_from for _ in range(runs))
        return runner.short_runs.reasons


def both(model: nn.Module, workload: Workload, scenario: str = "as-given", **data: Any) -> tuple[Trace, Trace]:
    """Return a run as it is usually made, and that of all layers."""
    whole, run = first_and_next(model, workload, workload, scenario, **data)
    if scenario != "as-given":
        whole = traced(model, workload, scenario, whole=True, **data)
    assert whole.extended_from == ()
    return run, whole


def assert_law(*args: Any, **data: Any) -> Trace:
    """Check that a run is that of all layers, in every record but for the note on how it was made; return it."""
    run, whole = both(*args, **data)
    assert_same(run, whole)
    return run


def assert_same(run: Trace, whole: Trace) -> None:
    """Check that two runs are the same in every record but for the note on how one was made."""
    notes = tuple(note for note in run.notes if "repeated layers" not in note)
    follows = ["by repetition" in note for note in run.notes if note not in notes]
    assert follows == [True] if run.extended_from else follows in ([], [False])
    assert different_part(replace(run, notes=notes), whole) == ""


def installed_cudnn(wanted: str | None = None) -> Any:
    """The cuDNN that a process which has loaded none would ask."""
    cudnn_releases.installed.cache_clear()
    cudnn_releases._opened.cache_clear()
    cudnn_releases._loaded.clear()
    try:
        return cudnn_releases.installed(wanted)
    finally:
        cudnn_releases.installed.cache_clear()
