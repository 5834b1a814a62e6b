"""Training as one process of many, as a `Trace`: sharded by PyTorch's own code, on a virtual GPU.

Either the user's own loop shards its model, or the usual one is spread over GPUs by a strategy in a few words. The
stages of a pipeline run by PyTorch's own schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memsize.depth.buckets import joined, without_indices
from memsize.device.cuda_libraries import nccl_notes
from memsize.errors import ForwardError, ScenarioError
from memsize.known_values.data_dependent import imbalanced
from memsize.model.input_tensors import input_tensors
from memsize.model.meta_copy import in_mode
from memsize.model.tensor_storage import stored_tensors
from memsize.precision.adapters import has_adapters
from memsize.ranks.group import OURS
from memsize.ranks.strategies import (
    blocks_in_line,
    blocks_of,
    compile_blocks,
    count_all_experts,
    divide,
    how,
    mesh_of,
    policy_of,
    shared_out,
    spread,
    undivided,
    wrapped,
)
from memsize.records.aggregates import peak
from memsize.records.finding import join_names
from memsize.records.gpu import Card
from memsize.records.roles import noun
from memsize.records.trace import StoredTensor, Trace
from memsize.records.world import World
from memsize.spec.model_request import Call
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.run import Run, Setup
from memsize.units import format_bytes
from memsize.virtual.device_assignment import devices
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.region import VirtualMachine
from memsize.workloads import Forward, Proof, Workload
from memsize.workloads.losses import Losses
from memsize.workloads.optimizers import steps_watched
from memsize.workloads.stages import Stage, line_of
from memsize.workloads.training import Body, Loop, body_of, gradients_marked, is_regular, one_number, step_workload

_LARGEST: Final = 4
"""How many kinds of what one GPU holds beyond another are named."""


@dataclass(frozen=True, slots=True)
class RankLoop(Workload):
    """The user's own loop, run as one process of `world`. `make_body(model)` shards or wraps a copy of the user's
    model, of which nothing is on the GPU yet, and returns the body, which is called `steps` times. What the copy still
    stores then is on the GPU from the first step on, and whole parameters that were sharded never are.
    """

    make_body: Callable[[nn.Module], Body]
    world: World
    card: Card
    steps: int = 3

    def run(self, setup: Setup) -> Trace:
        args, kwargs = setup.call

        def make(run: Run) -> Callable[[], None]:
            body = body_of(self.make_body, run.setup.model)

            def step() -> None:
                with setup.precision.autocast():
                    body(*args, **kwargs)

            return step

        try:
            return run_rank(setup, self.world, self.card, self.steps, make)
        except ForwardError as error:
            advice = undivided(str(error), error.trace, self.world.size)
            if advice is None:
                raise
            sentence, shape = advice
            raise ForwardError(f"{error}\n{sentence.format(shape=shape)}", error.trace) from error.__cause__


def run_rank(setup: Setup, world: World, card: Card, steps: int, make: Callable[[Run], Callable[[], None]]) -> Trace:
    """The trace of `steps` steps of rank `world` on `card`; `make` shards the model of its run and returns a step."""
    setup = replace(setup, machine=VirtualMachine(card, world))
    run = Run(setup, enter=False, tables=False)
    ledger, model = run.ledger, in_mode(setup.model, setup.training)
    assert isinstance(ledger, VirtualLedger)
    with run.recording(), torch.enable_grad(), steps_watched(ledger):
        with ledger.clock.during("setup"), ledger.elsewhere(chain(model.parameters(), model.buffers())):
            if world.one_process:
                for tensor in chain(model.parameters(), model.buffers(), tensors_in(setup.call)):
                    devices().put(tensor, 0)
            else:
                torch.distributed.init_process_group(OURS)
            step = make(run)
        run.tensors, ledger.counts = setup.stored(model), True
        for index, seen in enumerate(run.calls.seen):
            ledger.own(seen.module, index)
        run.enter_inputs()
        with gradients_marked(run):
            for number in range(1, steps + 1):
                ledger.clock.step = number
                with ledger.clock.during("step"):
                    step()
    for note in (*ledger.host_memory.notes(), *nccl_notes(ledger.collectives)):
        run.note(note)
    trace = run.trace()
    deferred = ledger.order.deferred(len(trace.events))
    host = ledger.host_memory.use
    return replace(trace, world=world, collectives=tuple(ledger.collectives), deferred=deferred, host=host)


# -- the usual loop ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParallelSteps(Workload):
    """The usual training loop with these options, as the process of `parallel` that is asked for, or holds most."""

    options: Training
    parallel: Parallel
    card: Card
    own_buckets: bool = False
    """Whether each tensor has a bucket of its own under `DistributedDataParallel`."""

    @property
    def proof(self) -> Proof | None:
        # A stage of a pipeline has some of the blocks. DataParallel sends pieces that end anywhere in a block, as the
        # buckets do of which gradients are views.
        tells_blocks_apart = self.parallel.is_pipeline or self.parallel.kind == "dp" or self.parallel.views
        return Forward().proof if is_regular(self.options) and not tells_blocks_apart else None

    @property
    def apart(self) -> ParallelSteps | None:
        return replace(self, own_buckets=True) if self.parallel.kind == "ddp" else None

    def joined(self, apart: Trace, like: Trace) -> Trace:
        return joined(apart, like)

    def run(self, setup: Setup) -> Trace:
        """The trace; raises `ScenarioError` for a scenario that cannot be trained so."""
        scenario, parallel = scenario_named(setup.scenario), self.parallel
        if reason := parallel.refuses(scenario):
            raise ScenarioError(reason)
        if setup.precision.sizes and (parallel.kind != "ddp" or parallel.is_pipeline):
            raise ScenarioError(f"a quantized base is trained under ddp, whole on each GPU, and not under {parallel}")
        if parallel.tensor > 1 and has_adapters(setup.model):
            raise ScenarioError(f"adapters are trained under ddp, fsdp and hsdp: the plan of {parallel} has none")
        notes = (*setup.notes, *how(setup.model, parallel, scenario))
        setup = replace(spread_setup(setup, parallel), notes=notes)
        model = setup.model
        if parallel.is_pipeline:
            return run_stages(setup, self.options, parallel, self.card)
        other = deepcopy(model) if parallel.kind == "dp" and parallel.size > 1 and not parallel.rank else None

        def make(run: Run) -> Callable[[], None]:
            assert isinstance(run.ledger, VirtualLedger)
            if parallel.shards_parameters:
                compile_blocks(run.setup.model, blocks_of(run.setup.model).modules, scenario)
            model = spread(run.setup.model, parallel, scenario, run.ledger.absently, apart=self.own_buckets)
            if scenario.compile and not parallel.shards_parameters:
                model = torch.compile(model, mode=scenario.compile)  # type: ignore[assignment]
            loop = Loop(replace(run.setup, model=model), run.ledger, parallel.trained(self.options))

            def step() -> None:
                loop()
                if run.ledger.clock.step == self.options.steps:
                    run.note(loop.losses.note)

            return step

        groups = parallel.experts if parallel.experts > 1 else None
        with imbalanced(groups=groups, position=parallel.world.rank):  # the rank that is shown is the busiest
            trace = run_rank(setup, parallel.world, self.card, self.options.steps, make)
        if other is None:
            return without_indices(trace) if self.own_buckets else trace
        elsewhere = run_rank(
            replace(setup, model=other), replace(parallel.world, rank=1), self.card, self.options.steps, make
        )
        return replace(trace, notes=(*trace.notes, _beyond(trace, elsewhere)))


def spread_setup(setup: Setup, parallel: Parallel) -> Setup:
    """`setup` for a model that is to be spread by `parallel`."""

    def ended(model: nn.Module) -> None:
        count_all_experts(model, parallel.experts)
        setup.ended(model)

    model = wrapped(setup.model, parallel)
    spread = replace(setup, model=model, buckets=None, stored=stored_tensors, ended=ended, compiled=None)
    if not parallel.shards_parameters:
        return spread
    # its mixed precision takes the place of autocast, except in the loss
    return replace(spread, precision=replace(setup.precision, forward=partial(torch.autocast, "cuda", enabled=False)))


def _beyond(first: Trace, other: Trace) -> str:
    here, there = peak(first), peak(other)
    more = {role: size - there.roles.get(role, 0) for role, size in here.roles.items()}
    largest = sorted((role for role in more if more[role] > 0), key=lambda role: -more[role])[:_LARGEST]
    parts = join_names(tuple(f"{format_bytes(more[role])} of {noun(role)}" for role in largest))
    return (
        f"each other GPU holds {format_bytes(there.bytes)} at its peak; GPU 0 holds "
        f"{format_bytes(here.bytes - there.bytes)} more, with {parts} beyond theirs"
    )


def steps_on(training: Training | None, parallel: Parallel | None, card: Card) -> Workload:
    """Training steps as one process of `parallel`, if there is any; without `training` one inference."""
    if training is None or parallel is None:
        return step_workload(training)
    return ParallelSteps(training, parallel, card)


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# -- pipelines ------------------------------------------------------------------------------------------------------


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
    ranks = [world.rank for world in parallel.worlds()]
    stages = ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in zip(ranks, peaks, strict=True))
    note = f"each stage at its own peak: {stages}; this is rank {ranks[index]}"
    return replace(shown, notes=(*shown.notes, note))


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
        compile_blocks(stage, stage.blocks, scenario_named(run.setup.scenario))
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
        takes = stage.takes if stage.is_first else ()
        self._batch = [tensor.repeat(self._count, *(1 for _ in tensor.shape[1:])) for tensor in takes]
        for whole in self._batch:
            run.ledger.mark(whole, "input")

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
