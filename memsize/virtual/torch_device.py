"""``torch.device(0)`` on a build of PyTorch without CUDA, and TorchScript, which compares classes by identity.

PyTorch's own class looks in its C++ code for the devices that it was built for. A class that creates PyTorch's devices
replaces it, and TorchScript's compiler gets the originals of this class and of all functions that are replaced.

Source: torch/csrc/Device.cpp, torch/jit/_builtins.py and annotations.py (2.11 to 2.14).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.jit._builtins
import torch.jit.annotations

from memsize.processes.patches import Patch


class _Class(type):
    """The metaclass of the replaced `torch.device`: it makes devices, and recognizes them."""

    __wrapped__: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int and not options:
            return cls.__wrapped__("cuda", args[0])
        return cls.__wrapped__(*args, **options)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__wrapped__)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__wrapped__

    def __hash__(cls) -> int:
        return hash(cls.__wrapped__)


def replacements() -> Iterator[Patch]:
    """Patch `torch.device` where a number does not mean a CUDA device, and TorchScript."""
    if not _means_cuda():
        original: Any = torch.device
        # Pickles look for it by its module and name.
        yield torch, "device", _Class("device", (), {"__module__": "torch", "__wrapped__": original})

    yield from _script_replacements()


def _means_cuda() -> bool:
    try:
        return torch.device(0).type == "cuda"
    except RuntimeError:  # no accelerator at all
        return False


# -- torch script ----------------------------------------------------------------------------------------------------


def _script_replacements() -> Iterator[Patch]:
    """Patch the compiler: it gets the original functions, and annotations with the present `torch.device`."""
    find: Any = torch.jit._builtins._find_builtin
    read: Any = torch.jit.annotations.try_ann_to_type

    def find_original(function: Any) -> Any:
        return find(inspect.unwrap(function))

    def type_of(annotation: Any, *where: Any) -> Any:
        return read(torch.device if annotation == torch.device else annotation, *where)

    yield torch.jit._builtins, "_find_builtin", find_original
    yield torch.jit.annotations, "try_ann_to_type", type_of
