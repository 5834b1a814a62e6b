"""Training as one process of many, as a `Trace`: sharded by PyTorch's own code, on a virtual GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from memsize.device.cuda_libraries import nccl_notes
from memsize.errors import ForwardError
from memsize.model.meta_copy import in_mode
from memsize.ranks.group import OURS
from memsize.ranks.tensor_parallel import undivided
from memsize.records.gpu import Card
from memsize.records.trace import Trace
from memsize.records.world import World
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.run import Run, Setup
from memsize.virtual.device_assignment import devices
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.region import VirtualMachine
from memsize.workloads.optimizers import steps_watched
from memsize.workloads.training import Body, body_of, gradients_marked


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
    return replace(trace, world=world, collectives=tuple(ledger.collectives), deferred=deferred)
