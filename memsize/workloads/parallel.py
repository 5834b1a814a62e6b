"""The usual training loop, spread over several GPUs by a strategy in a few words, as a `Trace` of one of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from memsize.errors import ScenarioError
from memsize.model.stored import stored_tensors
from memsize.ranks.strategies import how, spread, wrapped
from memsize.records.aggregates import peak
from memsize.records.finding import join_names
from memsize.records.gpu import Card
from memsize.records.roles import noun
from memsize.records.trace import Trace
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training
from memsize.tracing.run import Run, Setup
from memsize.units import format_bytes
from memsize.virtual.gpu_ledger import VirtualLedger
from memsize.workloads import Workload
from memsize.workloads.distributed_step import run_rank
from memsize.workloads.pipelines import run_stages
from memsize.workloads.training import Loop, step_workload

_LARGEST: Final = 4
"""How many kinds of what one GPU holds beyond another are named."""


@dataclass(frozen=True, slots=True)
class ParallelSteps:
    """The usual training loop with these options, as the process of `parallel` that is asked for, or holds most."""

    options: Training
    parallel: Parallel
    card: Card

    def run(self, setup: Setup) -> Trace:
        """The trace; raises `ScenarioError` for a scenario that cannot be trained so."""
        scenario, parallel = scenario_named(setup.scenario), self.parallel
        if reason := parallel.refuses(scenario):
            raise ScenarioError(reason)
        notes = (*setup.notes, *how(setup.model, parallel, scenario))
        setup = replace(spread_setup(setup, parallel), notes=notes)
        model = setup.model
        if parallel.is_pipeline:
            return run_stages(setup, self.options, parallel, self.card)
        other = deepcopy(model) if parallel.kind == "dp" and parallel.size > 1 and not parallel.rank else None

        def make(run: Run) -> Callable[[], None]:
            assert isinstance(run.ledger, VirtualLedger)
            model = spread(run.setup.model, parallel, scenario, run.ledger.absently)
            loop = Loop(replace(run.setup, model=model), run.ledger, parallel.trained(self.options))

            def step() -> None:
                loop()
                if run.ledger.clock.step == self.options.steps:
                    run.note(loop.losses.note)

            return step

        trace = run_rank(setup, parallel.world, self.card, self.options.steps, make)
        if other is None:
            return trace
        elsewhere = run_rank(
            replace(setup, model=other), replace(parallel.world, rank=1), self.card, self.options.steps, make
        )
        return replace(trace, notes=(*trace.notes, _beyond(trace, elsewhere)))


def spread_setup(setup: Setup, parallel: Parallel) -> Setup:
    """`setup` for a model that is to be spread by `parallel`."""
    setup = replace(setup, model=wrapped(setup.model, parallel), buckets=None, stored=stored_tensors)
    if not parallel.shards_parameters:
        return setup
    # its mixed precision takes the place of autocast, except in the loss
    return replace(setup, precision=replace(setup.precision, forward=partial(torch.autocast, "cuda", enabled=False)))


def _beyond(first: Trace, other: Trace) -> str:
    """Write a note about the bytes that the first GPU stores beyond another, each at its own peak."""
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
