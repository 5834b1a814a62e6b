"""One of several real processes with gloo on the CPU, under the same ledger: what `memsize.trace` predicts for a rank.

``python -m tests.gloo RANK SIZE STORE OUT KIND…`` writes each loop's events as JSON to OUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from itertools import chain
from typing import Any

import torch
import torch.distributed as distributed
from torch.utils._python_dispatch import _disable_current_modes

from memsize.ranks import sharding
from memsize.records.trace import Trace
from memsize.tracing.ledger import Ledger
from memsize.tracing.run import Run, RunDevice, Setup
from memsize.workloads.optimizers import steps_watched
from memsize.workloads.training import gradients_marked
from tests.ranks import LOOPS, Step

STEPS = 2


class _Real(RunDevice):
    """The CPU of a process that computes and sends."""

    def regions(self, setup: Setup, ledger: Ledger) -> Iterable[AbstractContextManager[Any]]:
        return (sharding_patches(ledger), *super().regions(setup, ledger))


@contextmanager
def sharding_patches(ledger: Ledger) -> Iterator[None]:
    later = sharding.later(ledger, _disable_current_modes, alone=False)
    sharded = chain.from_iterable(make(import_module(module)) for module, make in later.items())
    for owner, name, value in [*sharding.replacements(nullcontext), *sharded]:
        if name not in ("_verify_param_shape_across_processes", "set_runtime_stats_and_log"):
            setattr(owner, name, value)
    yield


def events(trace: Trace) -> list[tuple[str, str, int]]:
    """Each event of a run's steps: the phase, the bytes, and the op that made them. What was there before the steps is
    left out, and so are a GPU's own workspaces.
    """
    new = set[int]()
    found: list[tuple[str, str, int]] = []
    for event in trace.events:
        phase = trace.phases[event.phase]
        if event.delta > 0 and phase != "setup" and trace.storages[event.storage].role != "workspace":
            new.add(event.storage)
        if event.storage in new:
            found.append((phase, event.op if event.delta > 0 else "", event.delta))
    return found


def _ran(make: Step, model: Callable[[], torch.nn.Module]) -> list[tuple[str, str, int]]:
    ids = torch.zeros(2, 8, dtype=torch.long)
    setup = Setup("model", "as-given", model(), ((ids,), {}), True, device="cpu", machine=_Real())
    run = Run(setup, enter=False, tables=False)
    ledger = run.ledger
    with run.recording(), torch.enable_grad(), steps_watched(ledger):
        body = make(setup.model)
        run.enter_inputs()
        with gradients_marked(run):
            for number in range(1, STEPS + 1):
                ledger.clock.step = number
                with ledger.clock.during("step"):
                    body(ids)
    return events(run.trace())


def main(rank: str, size: str, store: str, out: str, *kinds: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, int(size)), rank=int(rank), world_size=int(size)
    )
    found = {kind: _ran(*LOOPS[kind]) for kind in kinds}
    distributed.destroy_process_group()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
