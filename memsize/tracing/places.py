"""Where tensors are that a program puts on a GPU, or on the host of one: `meta`, with a number that says which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from memsize.torch_internals.meta import is_meta

_CPU = torch.device("cpu")


class Gpus(Protocol):
    """The GPUs that a program may name by their numbers."""

    def named(self, number: int | None) -> int:
        """The GPU that a device of this number, or of none, means; it may raise."""

    def number_of(self, tensor: Tensor) -> int:
        """The GPU that a stand-in is on; a number of its own for the host."""

    def number_on_host(self, tensor: Tensor) -> int | None:
        """The number of the host for what `tensor` is there, if that is a stand-in; None where it has memory."""


class _OneGpu:
    """Whatever number is named, there is one GPU."""

    def named(self, number: int | None) -> int:
        return 0

    def number_of(self, tensor: Tensor) -> int:
        return 0

    def number_on_host(self, tensor: Tensor) -> int | None:
        return None


_gpus: list[Gpus] = [_OneGpu()]
"""The last ones are there."""


@contextmanager
def there(gpus: Gpus) -> Iterator[None]:
    """While open, the devices that are named are among `gpus`."""
    _gpus.append(gpus)
    try:
        yield
    finally:
        _gpus.remove(gpus)


def gpu_place(number: int | None) -> torch.device:
    """Where stand-ins for tensors on a GPU are. Tensors forget the number: it says which GPU is meant, and tells what
    is asked for here from the `meta` that a program names itself.
    """
    return torch.device("meta", _gpus[-1].named(number))


def named_gpu(device: Any) -> torch.device | None:
    """Where stand-ins are for a CUDA device, named by name, as an object or by its number; None for any other."""
    if type(device) is int:
        return gpu_place(device)
    if isinstance(device, str) and device.startswith("cuda"):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return gpu_place(device.index)
    return None


def place_of(tensor: Tensor) -> torch.device:
    """Where a stand-in is."""
    return torch.device("meta", _gpus[-1].number_of(tensor))


def place_on(tensor: Tensor, device: Any) -> torch.device | None:
    """Where a stand-in for `tensor` is on `device`; None where that is no GPU, and where there is none on the host."""
    on_cpu = isinstance(device, (str, torch.device)) and torch.device(device) == _CPU
    return host_place(tensor) if on_cpu else named_gpu(device)


def host_place(tensor: Tensor) -> torch.device | None:
    """Where a stand-in for what `tensor` is on the host is; None where that has memory."""
    number = _gpus[-1].number_on_host(tensor) if is_meta(tensor) else None
    return None if number is None else torch.device("meta", number)


def means_stand_ins(device: Any) -> bool:
    """Whether tensors on `device` are stand-ins."""
    return device is not None and (named_gpu(device) is not None or torch.device(device).type == "meta")
