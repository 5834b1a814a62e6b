"""Programs that would run as several processes, one for each GPU: here there is one process, which is one of them.

Its group is PyTorch's own fake one, which is as large as the job, and in which it is alone (`memsize.ranks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing

from memsize.errors import InputError
from memsize.processes.patches import Patch
from memsize.processes.rank_processes import RankConnection
from memsize.ranks import group, objects, peer_checks, reduced_values, sharding
from memsize.records.world import World
from memsize.virtual.gpu_ledger import VirtualLedger


def replacements(world: World, ledger: VirtualLedger, line: RankConnection | None) -> Iterator[Patch]:
    """What starts processes, and what joins them to a group, in which they send each other objects by `line`."""
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        yield owner, "spawn", _spawning(world)
    if group.is_available():
        yield from group.replacements(world)
        yield from objects.replacements(ledger.evaluator.rely_on, line)
        yield from peer_checks.replacements(ledger.evaluator.rely_on)
        yield from reduced_values.replacements()
        yield from sharding.replacements(ledger.in_pytorch)


def later(ledger: VirtualLedger, line: RankConnection | None) -> dict[str, Callable[[Any], Iterator[Patch]]]:
    """What is replaced in PyTorch's modules for many processes, by their names, once the program has imported them."""
    if not group.is_available():
        return {}
    return {**sharding.later(ledger, ledger.aside, alone=line is None), **peer_checks.later()}


def _spawning(world: World) -> Callable[..., Any]:
    """``mp.spawn`` of as many processes as there are GPUs runs here what it would run as this rank."""

    def spawned(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, **options: Any) -> Any:
        if nprocs != world.local_size:
            raise InputError(group.wanted(nprocs * world.nodes, world))
        fn(world.local_rank, *args)
        return None if join else _Over()

    return spawned


class _Over:
    """The context of processes that have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True
