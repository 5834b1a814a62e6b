"""Which of its machine's GPUs this process has: the first, unless it is one of several processes.

One process may also drive all of them, as `nn.DataParallel` does. Then one GPU is looked at: what is on it is recorded,
and of a tensor on another nothing is known but the number of that GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from memsize.records.world import World


class Seat:
    """GPU `index` of `count`, which is looked at; a process has one seat, as one region is open at a time."""

    def __init__(self) -> None:
        self.take(World())

    def take(self, world: World) -> None:
        """Be where a launcher would put a process of `world`: each has the GPU of its number on its own machine."""
        self.index = world.local_rank
        self.count = world.local_size
        self.drives_all = world.one_process
        self._device = torch.device("cuda", self.index)
        self._thread = threading.local()
        self._elsewhere: dict[int, int] = {}
        """The GPU of each storage that is on another than this one, by its address."""

    @property
    def current(self) -> int:
        """The GPU that this thread has chosen: at first the process's own, or the first of all."""
        number: int = getattr(self._thread, "current", 0 if self.drives_all else self.index)
        return number

    @property
    def device(self) -> torch.device:
        """The GPU that ``device="cuda"`` means in this thread."""
        return torch.device("cuda", self.current)

    def choose(self, number: int) -> int:
        """Let this thread work on GPU `number` (below 0: where it is); returns the GPU that it worked on before."""
        check_index(number)
        before = self.current
        if number >= 0:
            self._thread.current = number
        return before

    def named(self, number: int | None) -> int:
        """The GPU that a device of this `number` means; raises PyTorch's error where there is none."""
        if number is None or number < 0:
            return self.current
        check_index(number)
        return number

    def number_of(self, tensor: Tensor) -> int:
        """The GPU that a stand-in is on."""
        if not self._elsewhere:
            return self.index
        return self._elsewhere.get(_address(tensor), self.index)

    def device_of(self, tensor: Tensor) -> torch.device:
        """The same as a device."""
        return torch.device("cuda", self.number_of(tensor)) if self._elsewhere else self._device

    def put(self, tensor: Tensor, number: int) -> None:
        """Say that a stand-in, whose storage is new, is on GPU `number`."""
        address = _address(tensor)
        if number != self.index and address and address not in self._elsewhere:
            self._elsewhere[address] = number
            weakref.finalize(tensor.untyped_storage(), self._elsewhere.pop, address, None)


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
    if device not in (SEAT.index, -1) and not SEAT.drives_all:
        raise torch.AcceleratorError(
            f"cuda:{device} is the GPU of another process, this one has cuda:{SEAT.index}: memsize runs one of them "
            "(--one-process gives a single process all GPUs)"
        )


def _address(tensor: Any) -> int:
    try:
        address: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return 0
    return address
