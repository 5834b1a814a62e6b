"""The way out where a run without data cannot know which way a model goes: a copy that really computes, on the CPU."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from memsize.constants.known import known
from memsize.errors import MemsizeError
from memsize.internals.pytree import map_tensors
from memsize.spec.subject import Call
from memsize.units import format_bytes

_SPREAD = 0.02
"""Standard deviation of weights that were never made: small, so that activations stay finite through many layers."""


def executable(model: nn.Module) -> nn.Module:
    """A copy of `model` on the CPU whose every tensor has values: its own, or random ones where it was built without.

    Raises `MemsizeError` when the copy would not fit in memory.
    """
    needed = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed * 2 > available:
        raise MemsizeError(
            f"running the model for real needs more than {format_bytes(needed * 2, 'GiB')} of memory, and "
            f"{format_bytes(available, 'GiB')} are free"
        )
    copied = copy.deepcopy(model)
    made: dict[int, torch.Tensor] = {}
    for module in copied.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.device.type != "cpu":
                    table[name] = made.setdefault(id(tensor), _with_values(tensor))  # type: ignore[assignment]
    return copied


def executable_call(call: Call, device: torch.device | str = "cpu") -> Call:
    """The same arguments with values, on `device`: known ones, zeros for integers, a normal distribution for the
    rest.
    """
    real: Call = map_tensors(_with_values, call)
    if torch.device(device).type != "cpu":
        args, kwargs = real
        moved = {name: _moved(each, device) for name, each in kwargs.items()}
        return tuple(_moved(each, device) for each in args), moved
    return real


def _moved(value: Any, device: torch.device | str) -> Any:
    # The batch sizes of a packed sequence stay on the CPU, wherever its data is.
    if isinstance(value, PackedSequence):
        return value.to(torch.device(device))  # type: ignore[arg-type]
    return map_tensors(lambda tensor: tensor.to(device), value)


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    value = known(tensor) if tensor.is_meta else tensor.detach().cpu()
    if value is None:
        value = torch.zeros_like(tensor, device="cpu")
        if value.is_floating_point() or value.is_complex():
            value.normal_(0.0, _SPREAD if isinstance(tensor, nn.Parameter) else 1.0)
    value = value.clone()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
