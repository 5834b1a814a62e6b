"""Training through the stages of a pipeline, by PyTorch's own schedule, as a `Trace` of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memsize.model.input_tensors import input_tensors
from memsize.ranks.strategies import blocks_in_line, mesh_of, policy_of, shared_out, spread
from memsize.ranks.tensor_parallel import divide
from memsize.records.aggregates import peak
from memsize.records.gpu import Card
from memsize.records.trace import StoredTensor, Trace
from memsize.spec.model_request import Call
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training
from memsize.tracing.run import Run, Setup
from memsize.units import format_bytes
from memsize.virtual.gpu_ledger import VirtualLedger
from memsize.workloads.distributed_step import run_rank
from memsize.workloads.losses import Losses
from memsize.workloads.stages import Stage, line_of
from memsize.workloads.training import Loop, one_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def run_stages(setup: Setup, training: Training, parallel: Parallel, card: Card) -> Trace:
    """The trace of the rank that is asked for, else of the first whose GPU holds most; a note tells of the others."""
    requested = None if parallel.rank is None else parallel.worlds().index(parallel.world)
    peaks: list[int] = []
    shown, index = None, 0
    for number, trace in enumerate(stage_traces(setup, training, parallel, card)):
        size = peak(trace).bytes
        if number == requested or (requested is None and size > max(peaks, default=-1)):
            shown, index = trace, number
        peaks.append(size)
    assert shown is not None
    return replace(shown, notes=(*shown.notes, _beside(peaks, parallel, index)))


def stage_traces(setup: Setup, training: Training, parallel: Parallel, card: Card) -> Iterator[Trace]:
    """The trace of one rank of each stage."""
    for world in parallel.worlds():
        apart = replace(setup, model=deepcopy(setup.model))
        yield _run_stage(apart, parallel.trained(training), replace(parallel, rank=world.rank), card)


def _run_stage(setup: Setup, training: Training, parallel: Parallel, card: Card) -> Trace:
    call, dropped = setup.call, set[str]()

    def make(run: Run) -> Callable[[], None]:
        mesh = mesh_of(parallel)
        stage = _stage_of(run, call, parallel, mesh)
        dropped.update(stage.dropped)
        loop = StageLoop(run, training, parallel, stage, mesh)

        def step() -> None:
            loop()
            if stage.is_last and run.ledger.clock.step == training.steps:
                run.note(loop.losses.note)

        return step

    def stored(model: nn.Module) -> tuple[StoredTensor, ...]:
        return tuple(tensor for tensor in setup.stored(model) if tensor.name not in dropped)

    # What a step takes is of the loop's making: the first stage has all microbatches, the others none.
    trace = run_rank(replace(setup, call=((), {}), stored=stored), parallel.world, card, training.steps, make)
    return replace(trace, inputs=input_tensors(call))


def _stage_of(run: Run, call: Call, parallel: Parallel, mesh: DeviceMesh) -> Stage:
    ledger, model = run.ledger, run.setup.model
    assert isinstance(ledger, VirtualLedger)
    scenario = scenario_named(run.setup.scenario)
    lower = policy_of(scenario).param_dtype if parallel.shards_parameters else None
    with ledger.absently(), run.setup.precision.autocast(), run.setup.precision.forward():
        whole = deepcopy(model) if lower else model
        if parallel.tensor > 1:
            divide(model, mesh["tp"])
        line = line_of(model, blocks_in_line(model), call)
        if lower:  # what blocks return then is what those of the whole model do
            blocks = blocks_in_line(whole)
            line = line._replace(returned=line_of(spread(whole, parallel, scenario), blocks, call).returned)
        return Stage(run, call, line, mesh.get_local_rank("pp"), parallel.stages, lower)


class StageLoop(Loop):
    """The usual body, whose forwards and backwards are those of one stage under the schedule 1F1B."""

    def __init__(self, run: Run, training: Training, parallel: Parallel, stage: Stage, mesh: DeviceMesh) -> None:
        shared = shared_out(stage, stage.blocks, parallel, mesh, scenario_named(run.setup.scenario))
        super().__init__(run.setup, run.ledger, replace(training, gradient_accumulation_steps=1))
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage.cut()
        self._stage, self._count = stage, parallel.microbatches(training)
        self._losses = cycle([self.losses, *(Losses(training.loss, run.ledger) for _ in range(1, self._count))])
        device = torch.device("cuda", torch.cuda.current_device())
        ends: dict[str, Any] = {"input_args": stage.takes, "output_args": stage.returns}
        position = (stage.number, parallel.stages, device)
        staged = PipelineStage(shared, *position, **ends, group=mesh["pp"].get_group())
        self._schedule = Schedule1F1B(staged, self._count, loss_fn=self._loss)
        if self.scaler is not None:  # its scale is made by the first loss, which other ranks don't have
            self.scaler.scale(torch.zeros((), device=device))
        self._batch = [self._whole(tensor) for tensor in stage.takes] if stage.is_first else []

    def _whole(self, tensor: Tensor) -> Tensor:
        """All microbatches of an input."""
        whole = tensor.repeat(self._count, *(1 for _ in tensor.shape[1:]))
        self.ledger.mark(whole, "input")
        return whole

    def _forward_and_backward(self) -> None:
        targets: dict[str, Any] = {}
        if self._stage.is_last:  # the losses make their own; these say how many there are
            targets = {"target": torch.empty(self._count, device="cpu"), "losses": []}
        self._schedule.step(*self._batch, **targets, return_outputs=False)

    def _loss(self, output: Any, target: Any) -> Tensor:
        result, self._stage.result = self._stage.result, None
        with self.setup.precision.autocast(), self.ledger.clock.during("loss"):
            loss = one_number(next(self._losses)(result))
        return loss if self.scaler is None else self.scaler.scale(loss)


def _beside(peaks: list[int], parallel: Parallel, index: int) -> str:
    """Write a note about the peaks of all stages, shown beside one of them."""
    ranks = [world.rank for world in parallel.worlds()]
    stages = [f"rank {rank} {format_bytes(size)}" for rank, size in zip(ranks, peaks, strict=True)]
    return f"each stage at its own peak: {', '.join(stages)}; shown is rank {ranks[index]}"
