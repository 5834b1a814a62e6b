"""The questions that PyTorch asks about the device before it acts, answered as on a machine with CUDA.

`torch.autocast("cuda")` and `GradScaler` disable themselves where CUDA is missing, `custom_fwd` casts only CUDA
tensors, checkpointing restores autocast for the device of its tensors, no region can be opened for ``meta`` by name,
and the fused paths of `torch.nn` and the list kernels of optimizers, averages of weights and gradient clipping only
accept devices that they know. The answers change only while `cuda_semantics` is
open, and only for the threads that opened it.

Source: torch/amp/autocast_mode.py, torch/amp/grad_scaler.py, torch/utils/checkpoint.py, torch/utils/_foreach_utils.py,
torch/nn/modules/transformer.py and activation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.utils.backend_registration
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from memsize.kernels.semantics import current
from memsize.processes.simulation import Function, Override, Simulation, ThreadPatches

_LIST_KERNELS = "_get_foreach_kernels_supported_devices"
"""Optimizers import this function by name; gradient clipping calls it where it is defined."""


def answered_as_cuda() -> AbstractContextManager[Simulation]:
    """While any thread is inside, answer as on CUDA; the originals are back when the last one leaves."""
    return _answers.active()


@cache
def _questions() -> tuple[Override, ...]:
    common: Any = torch.cuda.amp.common
    mode: Any = torch.amp.autocast_mode
    renamed = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
    return (
        Override(common, "amp_definitely_not_available", _always(False)),
        Override(torch.cuda, "is_bf16_supported", _from_ampere_on),
        *(Override(torch, name, _by_name) for name in renamed),
        Override(torch.amp, "is_autocast_available", _by_name),
        Override(mode, "is_autocast_available", _by_name),
        Override(mode.autocast, "__init__", _by_name_in_method),
        Override(mode, "_cast", _casting_stand_ins),
        Override(torch, "clear_autocast_cache", _dropping_copies),
        Override(torch.utils.checkpoint, "_infer_device_type", _inferring_cuda),
        Override(torch.utils.backend_registration, "_privateuse1_backend_name", _named_too),
        *(Override(module, _LIST_KERNELS, _with_stand_in) for module in (_foreach_utils, optimizer, swa_utils)),
        Override(optimizer, "_get_fused_kernels_supported_devices", _with_stand_in),
    )


class _NameOfStandIn(str):
    """The name of PyTorch's private backend, which also equals ``meta`` in a thread where ``meta`` stands for CUDA.

    The fused paths of `torch.nn` accept tensors on a CPU, on CUDA or on the private backend.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        semantics = current()
        return str.__eq__(self, other) or (other == "meta" and semantics is not None and semantics.meta)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _named_too(original: Any) -> Any:
    return _NameOfStandIn(original)


def _always(answer: bool) -> Callable[[Function], Function]:
    return lambda _: lambda *args, **kwargs: answer


def _from_ampere_on(_: Function) -> Function:
    """Older GPUs emulate bfloat16, which counts unless the caller says otherwise."""

    def answer(including_emulation: bool = True) -> bool:
        semantics = current()
        return including_emulation or (semantics is not None and semantics.capability >= (8, 0))

    return answer


def _by_name(original: Function) -> Function:
    """Code that opens a region for ``x.device.type`` passes ``meta`` here where it would pass ``cuda`` on a GPU."""

    def answer(device_type: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
        return original("cuda" if device_type == "meta" else device_type, *args, **kwargs)

    return answer


def _by_name_in_method(original: Function) -> Function:
    def answer(instance: Any, device_type: Any, *args: Any, **kwargs: Any) -> Any:
        return original(instance, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    return answer


def _casting_stand_ins(original: Function) -> Function:
    """`custom_fwd(cast_inputs=...)` casts the arguments that are CUDA tensors; containers come back here."""

    def answer(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        semantics = current()
        if not isinstance(value, Tensor) or device_type != "cuda" or semantics is None:
            return original(value, device_type, dtype)
        is_cast = value.is_floating_point() and value.dtype is not torch.float64 and semantics.stands_for_cuda(value)
        return value.to(dtype) if is_cast else original(value, device_type, dtype)

    return answer


def _dropping_copies(original: Function) -> Function:
    """PyTorch clears its cache when the outermost region ends; memsize's copies are dropped with it."""

    def answer() -> None:
        original()
        semantics = current()
        if semantics is not None:
            semantics.copies.clear()

    return answer


def _inferring_cuda(original: Function) -> Function:
    """Checkpointing restores this device's autocast in its recomputation.

    It touches no generator of CUDA: it saves those of its tensors' devices, and none of them is a CUDA device.
    """

    def answer(*args: Any) -> str:
        semantics = current()
        inferred: str = original(*args)
        is_stand_in = semantics is not None and {"meta": semantics.meta, "cpu": semantics.cpu}.get(inferred, False)
        return "cuda" if is_stand_in else inferred

    return answer


def _with_stand_in(original: Function) -> Function:
    """The devices that have list kernels, and fused optimizers."""

    def answer() -> list[str]:
        semantics = current()
        return [*original(), *(["meta"] if semantics is not None and semantics.meta else [])]

    return answer


_answers = ThreadPatches(_questions, lambda: current() is not None)
