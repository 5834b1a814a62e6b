"""Models and inputs with real values, for runs that really compute: on the CPU (`--execute`) or on a GPU (`verify`).

Tensors that were built without values get random ones directly on the device and in their own dtype, so that nothing
larger exists on the way. Memory does not depend on the values, except where a model looks at its own numbers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from memsize.errors import MemsizeError
from memsize.known_values.values import constant_of
from memsize.spec.model_request import Call
from memsize.torch_internals.isolation import undisturbed
from memsize.torch_internals.pytree import arguments_in, map_tensors, tensors_in
from memsize.units import format_bytes

_CPU: Final = torch.device("cpu")
_STD: Final = 0.02
"""Standard deviation of random weights: small, so that activations stay finite through many layers."""
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")


@undisturbed()
def executable(model: nn.Module) -> nn.Module:
    """A copy of `model` on the CPU whose every tensor has values, the same each time; lazy ones have none yet.

    Raises `MemsizeError` when the copy would not fit in memory.
    """
    _check_free((tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)), times=2)
    copied = real_copy(model)
    materialize(copied, _CPU)
    return copied


def real_copy(model: nn.Module) -> nn.Module:
    """A copy of `model`, values and all, also of one whose tensors have been computed with."""
    with _ResultsCopied():
        return copy.deepcopy(model)


class _ResultsCopied(TorchFunctionMode):
    """While open, `copy.deepcopy` also copies tensors that PyTorch refuses to copy: buffers without a shape yet, and
    results of ops (a pruned weight, an output on an attribute), whose values it takes without their history.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if is_lazy(tensor):
                return memo.setdefault(id(tensor), _still_lazy(tensor, tensor.device))
            if not tensor.is_leaf:
                return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def _still_lazy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    kind: Any = type(tensor)
    return kind(tensor.requires_grad, device=device, dtype=tensor.dtype)  # type: ignore[no-any-return]


def _check_free(tensors: Iterable[torch.Tensor], times: int = 1) -> None:
    needed = times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > available:
        raise MemsizeError(
            f"running the model for real needs more than {format_bytes(needed, 'GiB')} of memory, and "
            f"{format_bytes(available, 'GiB')} are free"
        )


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Move everything that `model.to(device)` moves, children first; tensors without values get random ones."""
    replacements: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []  # an id belongs to one tensor for as long as that lives

    def materialized(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replacements:
            replacements[id(tensor)] = _materialized(name, tensor, device)
            originals.append(tensor)
        return replacements[id(tensor)]

    for module in _children_first(model, set()):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = materialized(name, tensor)  # type: ignore[assignment]
        # Plain attributes stay where they are, but for tensors without values.
        for name, value in list(vars(module).items()):
            if name not in _REGISTRIES and any(tensor.is_meta for tensor in arguments_in([value])):
                vars(module)[name] = map_tensors(partial(materialized, name), value)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # else the first forward does it


def executable_call(call: Call, device: torch.device | str = _CPU) -> Call:
    """The same arguments with values, on `device`: known constants, zeros for other integers, normally distributed
    numbers for the rest.

    Raises `MemsizeError` when they would not fit in memory.
    """
    _check_free(tensor for tensor in tensors_in(call) if tensor.is_meta)
    real: Call = map_tensors(_argument, call)
    if torch.device(device) == _CPU:
        return real
    args, kwargs = real
    return tuple(_moved(value, device) for value in args), {
        name: _moved(value, device) for name, value in kwargs.items()
    }


def _argument(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == _CPU:
        return tensor
    value = constant_of(tensor) if tensor.is_meta else tensor.detach().cpu()
    if value is not None:
        return value.clone()
    value = torch.zeros_like(tensor, device=_CPU)
    return value.normal_() if value.is_floating_point() or value.is_complex() else value


def _moved(value: Any, device: torch.device | str) -> Any:
    # The batch sizes of a packed sequence stay on the CPU, wherever its data is.
    if isinstance(value, PackedSequence):
        return value.to(torch.device(device))  # type: ignore[arg-type]
    return map_tensors(lambda tensor: tensor.to(device), value)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _materialized(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    if is_lazy(tensor):
        return _still_lazy(tensor, device)
    if tensor.is_meta:
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        _fill(name, moved)
    else:
        moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Keep activations from vanishing or overflowing: scales and variances of one, small weights."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.zero_()
    elif tensor.dim() == 1 and name in ("weight", "running_var"):
        tensor.fill_(1)
    else:
        tensor.normal_(0.0, _STD)
