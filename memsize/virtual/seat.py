"""Which of its machine's GPUs this process has: the first, unless it is one of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from memsize.records.world import World


class Seat:
    """GPU `index` of `count`; a process has one, as one region is open at a time."""

    def __init__(self) -> None:
        self.take(World())

    def take(self, world: World) -> None:
        """Be where a launcher would put a process of `world`: each has the GPU of its number on its own machine."""
        self.index = world.local_rank
        self.count = world.local_size
        self.device = torch.device("cuda", self.index)


SEAT: Final = Seat()


@contextmanager
def seated(world: World) -> Iterator[None]:
    """While open, this process has the GPU of a process of `world`."""
    SEAT.take(world)
    try:
        yield
    finally:
        SEAT.take(World())


def check_index(device: int) -> None:
    """PyTorch's error for a device that isn't there (c10/cuda/CUDAFunctions.cpp), and one for those of others."""
    if device >= SEAT.count:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    if device not in (SEAT.index, -1):
        raise torch.AcceleratorError(
            f"cuda:{device} is the GPU of another process, this one has cuda:{SEAT.index}: memsize runs one of them"
        )
