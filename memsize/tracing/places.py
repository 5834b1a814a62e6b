"""Where tensors are that a program puts on a GPU, or on the host of one: `meta`, with a number that says which."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from memsize.processes.simulation import current
from memsize.torch_internals.meta import is_meta

_CPU = torch.device("cpu")


class Gpus:
    """The GPUs that a program may name by their numbers. Here there is one, whatever number is named."""

    def named(self, number: int | None) -> int:
        """Return the GPU that a device of this number, or of none, means; it may raise."""
        return 0

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the GPU that a stand-in is on; the host has a number of its own."""
        return 0

    def number_on_host(self, tensor: Tensor) -> int | None:
        """Return the host's number if a copy of `tensor` there is a stand-in, and `None` if it has memory."""
        return None


_ONE_GPU: Final = Gpus()


def _gpus() -> Gpus:
    simulation = current()
    return (simulation and simulation.get(Gpus)) or _ONE_GPU


def gpu_place(number: int | None) -> torch.device:
    """Where stand-ins for tensors on a GPU are. Tensors forget the number: it says which GPU is meant, and tells what
    is asked for here from the `meta` that a program names itself.
    """
    return torch.device("meta", _gpus().named(number))


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
    return torch.device("meta", _gpus().number_of(tensor))


def place_on(tensor: Tensor, device: Any) -> torch.device | None:
    """Where a stand-in for `tensor` is on `device`; None where that is no GPU, and where there is none on the host."""
    on_cpu = isinstance(device, (str, torch.device)) and torch.device(device) == _CPU
    return host_place(tensor) if on_cpu else named_gpu(device)


def host_place(tensor: Tensor) -> torch.device | None:
    """Where a stand-in for what `tensor` is on the host is; None where that has memory."""
    number = _gpus().number_on_host(tensor) if is_meta(tensor) else None
    return None if number is None else torch.device("meta", number)


def means_stand_ins(device: Any) -> bool:
    """Whether tensors on `device` are stand-ins."""
    return device is not None and (named_gpu(device) is not None or torch.device(device).type == "meta")
