"""``torch.device(0)`` where PyTorch was built without CUDA: the GPU of that number, as on a build with it.

PyTorch's own class looks in its C++ code for what it was built for. Here another stands in its place, which makes
PyTorch's devices.

Source: torch/csrc/Device.cpp (2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memsize.processes.patches import Patch


class _Class(type):
    """What `torch.device` is, for those who call it, or ask whether something is one."""

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
    """What is replaced where a number does not mean a GPU of CUDA."""
    if not _means_cuda():
        original: Any = torch.device
        # Pickles look for it by its module and name.
        yield torch, "device", _Class("device", (), {"__module__": "torch", "__wrapped__": original})


def _means_cuda() -> bool:
    try:
        return torch.device(0).type == "cuda"
    except RuntimeError:  # no accelerator at all
        return False
