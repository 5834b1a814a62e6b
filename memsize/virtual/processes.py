"""Programs that would run as several processes, one for each GPU: here there is one process, and its group is itself.

The group of one process is PyTorch's own fake one, which answers every collective at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from memsize.virtual.tensors import Replacement

_ONE = "memsize has one GPU, and this program wants {} processes, one for each of several: start it for one GPU ({})"


def replacements() -> Iterator[Replacement]:
    """What starts processes, and what joins them to a group."""
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        yield owner, "spawn", _spawned
    if torch.distributed.is_available():
        yield from _of_groups()


@contextmanager
def groups_left() -> Iterator[None]:
    """Afterwards the process is in no group that it was not in before: a program that is stopped leaves none."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not there and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _spawned(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, **options: Any) -> Any:
    """``mp.spawn`` of one process runs it here."""
    if nprocs != 1:
        raise RuntimeError(_ONE.format(nprocs, f"nprocs=1 instead of {nprocs}"))
    fn(0, *args)
    return None if join else _Over()


class _Over:
    """The context of processes that have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _of_groups() -> Iterator[Replacement]:
    distributed: Any = torch.distributed
    original = distributed.init_process_group

    def joined(backend: Any = None, init_method: Any = None, timeout: Any = None, **options: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = options.get("world_size", -1)
        size = int(os.environ.get("WORLD_SIZE", "1")) if size == -1 else size
        if size > 1:
            raise RuntimeError(_ONE.format(size, "without torchrun, or with WORLD_SIZE=1"))
        original("fake", rank=0, world_size=1, store=FakeStore())

    for owner in (distributed, distributed.distributed_c10d):
        yield owner, "init_process_group", joined
        yield owner, "is_nccl_available", lambda: True
    # It compares shapes on the CPU with those that the other processes send.
    yield torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *args, **options: None
    wrapper = torch.nn.parallel.DistributedDataParallel
    yield wrapper, "__init__", _joined_with_itself(wrapper.__init__, wrapper.register_comm_hook)
    yield wrapper, "register_comm_hook", lambda *args: None


def _joined_with_itself(original: Any, register: Any) -> Any:
    """DistributedDataParallel waits for what a collective returns, and the fake ones return nothing."""

    def summed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def made(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        register(self, None, lambda state, bucket: summed(bucket))  # it reads annotations

    return made
