"""Training as one process of many, as a `Trace`: sharded by PyTorch's own code, on a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from memsize.device.config import AllocatorConfig
from memsize.device.context import context
from memsize.errors import ScenarioError
from memsize.internals.pytree import tensors_in
from memsize.model.meta_copy import in_mode
from memsize.model.stored import stored_tensors
from memsize.ranks.strategies import how, spread, wrapped
from memsize.records.aggregates import peak
from memsize.records.finding import join_names
from memsize.records.gpu import Card
from memsize.records.roles import noun
from memsize.records.trace import Trace
from memsize.records.world import World
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training
from memsize.tracing.ledger import Ledger
from memsize.tracing.run import Machine, Run, Setup
from memsize.units import format_bytes
from memsize.virtual.driver import Driver
from memsize.virtual.ledger import VirtualLedger
from memsize.virtual.memory import DeviceMemory
from memsize.virtual.region import virtual_gpu
from memsize.virtual.seat import SEAT
from memsize.workloads import Workload
from memsize.workloads.optimizers import steps_watched
from memsize.workloads.training import Body, Loop, body_of, gradients_marked, step_workload

_LARGEST: Final = 4
"""How many kinds of what one GPU holds beyond another are named."""


@dataclass(frozen=True)
class RankMachine(Machine):
    """The GPU `card` of one process of `world`; what is larger than its memory is there all the same."""

    world: World
    card: Card

    def ledger(self, setup: Setup) -> VirtualLedger:
        return VirtualLedger(setup.workspaces, lambda: None)

    def regions(self, setup: Setup, ledger: Ledger) -> Iterable[AbstractContextManager[Any]]:
        assert isinstance(ledger, VirtualLedger)
        memory = DeviceMemory(
            self.card.bytes, context().low, AllocatorConfig, ledger.events, ledger.streams, bounded=False
        )
        return (virtual_gpu(Driver(self.card, memory), ledger, world=self.world),)


@dataclass(frozen=True, slots=True)
class RankLoop:
    """The user's own loop, run as one process of `world`.

    `make_body(model)` is called once with a copy of the user's model, of which nothing is on the GPU yet: it shards the
    model, or wraps it, and returns the body, which is called `steps` times with the inputs. What the copy still stores
    then is on the GPU from the first step on, and whole parameters that were sharded never are.
    """

    make_body: Callable[[nn.Module], Body]
    world: World
    card: Card
    steps: int = 3

    def run(self, setup: Setup) -> Trace:
        args, kwargs = setup.call

        def made(run: Run) -> Callable[[], None]:
            body = body_of(self.make_body, run.setup.model)

            def step() -> None:
                with setup.autocast():
                    body(*args, **kwargs)

            return step

        return _run_rank(setup, self.world, self.card, self.steps, made)


@dataclass(frozen=True, slots=True)
class ParallelSteps:
    """The usual training loop with these options, as the process of `parallel` whose GPU holds most."""

    options: Training
    parallel: Parallel
    card: Card

    def run(self, setup: Setup) -> Trace:
        """The trace; raises `ScenarioError` for a scenario that cannot be trained so."""
        scenario, parallel = scenario_named(setup.scenario), self.parallel
        if reason := parallel.refuses(scenario):
            raise ScenarioError(reason)
        notes = (*setup.notes, *how(setup.model, parallel, scenario))
        model = wrapped(setup.model, parallel)
        setup = replace(setup, model=model, notes=notes, buckets=None, stored=stored_tensors)
        other = deepcopy(model) if parallel.kind == "dp" and parallel.size > 1 else None
        if parallel.shards_parameters:  # its mixed precision takes the place of autocast, except in the loss
            setup = replace(setup, forward=partial(torch.autocast, "cuda", enabled=False))

        def made(run: Run) -> Callable[[], None]:
            model = spread(run.setup.model, parallel, scenario)
            loop = Loop(replace(run.setup, model=model), run.ledger, parallel.trained(self.options))

            def step() -> None:
                loop()
                if run.ledger.clock.step == self.options.steps:
                    run.note(loop.losses.note)

            return step

        trace = _run_rank(setup, parallel.world, self.card, self.options.steps, made)
        if other is None:
            return trace
        elsewhere = _run_rank(
            replace(setup, model=other), replace(parallel.world, rank=1), self.card, self.options.steps, made
        )
        return replace(trace, notes=(*trace.notes, _beyond(trace, elsewhere)))


def _beyond(first: Trace, other: Trace) -> str:
    """What the first GPU holds beyond another, each at its own peak."""
    here, there = peak(first), peak(other)
    more = {role: size - there.roles.get(role, 0) for role, size in here.roles.items()}
    largest = sorted((role for role in more if more[role] > 0), key=lambda role: -more[role])[:_LARGEST]
    parts = join_names(tuple(f"{format_bytes(more[role])} of {noun(role)}" for role in largest))
    return (
        f"each other GPU holds {format_bytes(there.bytes)} at its peak; GPU 0 holds "
        f"{format_bytes(here.bytes - there.bytes)} more, with {parts} beyond theirs"
    )


def steps_on(training: Training | None, parallel: Parallel | None, card: Card) -> Workload:
    """Training steps with these options, as one process of `parallel` if there is any; without `training` one
    inference.
    """
    if training is None or parallel is None:
        return step_workload(training)
    return ParallelSteps(training, parallel, card)


def _run_rank(setup: Setup, world: World, card: Card, steps: int, make: Callable[[Run], Callable[[], None]]) -> Trace:
    """The trace of `steps` steps of rank `world` on `card`; `make` shards the model of its run and returns a step."""
    setup = replace(setup, machine=RankMachine(world, card))
    run = Run(setup, enter=False, tables=False)
    ledger, model = run.ledger, in_mode(setup.model, setup.training)
    assert isinstance(ledger, VirtualLedger)
    with run.recording(), torch.enable_grad(), steps_watched(ledger):
        with ledger.clock.during("setup"), ledger.elsewhere(chain(model.parameters(), model.buffers())):
            if world.one_process:
                for tensor in chain(model.parameters(), model.buffers(), tensors_in(setup.call)):
                    SEAT.put(tensor, 0)
            else:
                torch.distributed.init_process_group()
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
    for note in ledger.pinned.notes():
        run.note(note)
    return replace(run.trace(), world=world, collectives=tuple(ledger.collectives))
