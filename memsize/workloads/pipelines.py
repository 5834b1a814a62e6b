"""Training through the stages of a pipeline, by PyTorch's own schedule, as a `Trace` of one of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from memsize.model.inputs import input_tensors
from memsize.records.aggregates import peak
from memsize.records.gpu import Card
from memsize.records.trace import StoredTensor, Trace
from memsize.records.world import World
from memsize.spec.parallel import Parallel
from memsize.spec.subject import Call
from memsize.spec.training import Training
from memsize.tracing.run import Run, Setup
from memsize.units import format_bytes
from memsize.virtual.ledger import VirtualLedger
from memsize.workloads.losses import Losses
from memsize.workloads.ranks import run_rank
from memsize.workloads.stages import Stage, line_of
from memsize.workloads.training import Loop, one_number


def run_stages(setup: Setup, training: Training, parallel: Parallel, card: Card) -> Trace:
    """The trace of the rank that is asked for, else of the first whose GPU holds most; a note tells of the others."""
    traces = stage_traces(setup, training, parallel, card)
    peaks = [peak(trace).bytes for trace in traces]
    rank = peaks.index(max(peaks)) if parallel.rank is None else parallel.rank
    return replace(traces[rank], notes=(*traces[rank].notes, _beside(peaks, rank)))


def stage_traces(setup: Setup, training: Training, parallel: Parallel, card: Card) -> list[Trace]:
    """The trace of each rank."""
    models = [setup.model, *(deepcopy(setup.model) for _ in range(1, parallel.stages))]
    worlds = [replace(parallel.world, rank=rank) for rank in range(parallel.stages)]
    return [
        _run_stage(replace(setup, model=model), training, parallel, world, card)
        for model, world in zip(models, worlds, strict=True)
    ]


def _run_stage(setup: Setup, training: Training, parallel: Parallel, world: World, card: Card) -> Trace:
    call, count, dropped = setup.call, parallel.microbatches(training), set[str]()

    def made(run: Run) -> Callable[[], None]:
        assert isinstance(run.ledger, VirtualLedger)
        stage = _stage_of(run, call, world)
        dropped.update(stage.dropped)
        loop = StageLoop(run, call, training, stage, world, count)

        def step() -> None:
            loop()
            if stage.is_last and run.ledger.clock.step == training.steps:
                run.note(loop.losses.note)

        return step

    def stored(model: nn.Module) -> tuple[StoredTensor, ...]:
        return tuple(tensor for tensor in setup.stored(model) if tensor.name not in dropped)

    # What a step takes is of the loop's making: the first stage has all microbatches, the others none.
    trace = run_rank(replace(setup, call=((), {}), stored=stored), world, card, training.steps, made)
    return replace(trace, inputs=input_tensors(call))


def _stage_of(run: Run, call: Call, world: World) -> Stage:
    ledger, model = run.ledger, run.setup.model
    assert isinstance(ledger, VirtualLedger)
    ledger.absent = True
    try:
        with run.setup.autocast():
            line = line_of(model, call)
    finally:
        ledger.absent = False
    return Stage(run, call, line, world.rank, world.size)


class StageLoop(Loop):
    """The usual body, whose forwards and backwards are those of one stage under the schedule 1F1B."""

    def __init__(self, run: Run, call: Call, training: Training, stage: Stage, world: World, count: int) -> None:
        super().__init__(run.setup, run.ledger, replace(training, accumulate=1))
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self._stage, self._count = stage, count
        self._losses = cycle([self.losses, *(Losses(training.loss, run.ledger) for _ in range(1, count))])
        device = torch.device("cuda", torch.cuda.current_device())
        staged = PipelineStage(stage, world.rank, world.size, device, input_args=stage.takes, output_args=stage.returns)
        self._schedule = Schedule1F1B(staged, count, loss_fn=self._loss)
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
        with self.setup.autocast(), self.ledger.clock.during("loss"):
            loss = one_number(next(self._losses)(result))
        return loss if self.scaler is None else self.scaler.scale(loss)


def _beside(peaks: list[int], shown: int) -> str:
    """What each stage holds, for who looks at one of them."""
    held = [f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(peaks)]
    return f"each stage at its own peak: {', '.join(held)}; shown is rank {shown}"
