"""The region in which tensors that stand for CUDA tensors behave as CUDA tensors would.

Each operator for which CUDA decides something has a kernel on the dispatch key. Kernels are registered once per
process, on first use; those of another library's operators once that library is imported.

What PyTorch asks about the device before it acts is answered as on a machine with CUDA. `torch.autocast("cuda")` and
`GradScaler` disable themselves where CUDA is missing, `custom_fwd` casts only CUDA tensors, checkpointing restores
autocast for the device of its tensors, no region can be opened for ``meta`` by name, and the fused paths of `torch.nn`
and the list kernels of optimizers, averages of weights and gradient clipping only accept devices that they know. The
answers change only for the threads in which the region is open.

Source: torch/library.py (kernels in Python), torch/amp/autocast_mode.py, torch/amp/grad_scaler.py,
torch/utils/checkpoint.py, torch/utils/_foreach_utils.py, torch/nn/modules/transformer.py and activation.py.

Limits: threads that the user's forward starts itself do not take part, nor does code that runs below autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.utils.backend_registration
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from memsize.cuda import attention_backend, autocast, encoder, kernel_choice
from memsize.kernels.semantics import CUDNN, STAND_INS, CastObserver, Semantics, current, switched_on
from memsize.processes.simulation import Function, Override, ThreadPatches, open_simulation
from memsize.torch_internals.meta import KEY, NAMESPACE

_libraries: list[Any] = []
"""Those that hold the kernels, which must stay alive."""
_registered: set[str] = set()
"""Names of the operators that have their kernel on the key."""


def register_kernels() -> None:
    """Register those kernels that are not on the key yet."""
    with open_simulation():
        if not _libraries:
            fallback = torch.library.Library("_", "IMPL", KEY.name)
            fallback.fallback(torch.library.fallthrough_kernel, KEY.name)
            _libraries.append(fallback)
        elif not any(name not in _registered and torch._C._dispatch_has_kernel(name) for name in autocast.LATE):
            return
        # Where autocast wraps an operator, its casts come first; attention does both itself.
        choices = kernel_choice.kernels()
        kernels = {**choices, **autocast.kernels(choices), **attention_backend.kernels(), **encoder.kernels()}
        libraries: dict[str, torch.library.Library] = {}
        for name, kernel in kernels.items():
            if name not in _registered:
                namespace, _, own = name.rpartition("::")
                namespace = namespace or NAMESPACE
                if namespace not in libraries:
                    libraries[namespace] = torch.library.Library(namespace, "IMPL", KEY.name)
                libraries[namespace].impl(own, kernel)
                _registered.add(name)
        _libraries.extend(libraries.values())


@contextmanager
def cuda_semantics(
    *,
    stands_for: frozenset[str] | set[str] | tuple[str, ...] = ("meta",),
    capability: tuple[int, int] = (8, 0),
    cudnn: int = CUDNN,
    release: tuple[int, int] | None = None,
    autocast_observer: CastObserver | None = None,
) -> Iterator[Semantics]:
    """Let this thread's tensors on the devices `stands_for` behave as CUDA tensors would while this is open.

    `release` is the PyTorch to simulate, as in (2, 1); None is the newest whose rules are known.
    `autocast_observer(source, copy)` is called for every copy that autocast makes of a parameter. Nested regions keep
    the outer one's weight copies. Raises ValueError for a device that cannot stand for CUDA.
    """
    devices = frozenset(stands_for)
    if not devices or not devices <= STAND_INS:
        raise ValueError(f"tensors on {sorted(devices)} cannot stand for CUDA tensors: choose from {sorted(STAND_INS)}")
    register_kernels()
    outer = current()
    semantics = Semantics("meta" in devices, "cpu" in devices, capability, cudnn, autocast_observer, release)
    if outer is not None:
        semantics.copies = outer.copies
    with _answers.active(), _lists.active(), switched_on(semantics):
        try:
            yield semantics
        finally:
            if outer is None:
                semantics.copies.clear()


# -- answers about the device ------------------------------------------------------------------------------------------

_LIST_KERNELS = "_get_foreach_kernels_supported_devices"
"""Optimizers import this function by name; gradient clipping calls it where it is defined."""


@cache
def _questions() -> tuple[Override, ...]:
    common: Any = torch.cuda.amp.common
    mode: Any = torch.amp.autocast_mode
    renamed = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
    return (
        Override(common, "amp_definitely_not_available", lambda *_, **__: False),
        Override(torch.cuda, "is_bf16_supported", _from_ampere_on),
        *(Override(torch, name, _by_name) for name in renamed),
        Override(torch.amp, "is_autocast_available", _by_name),
        Override(mode, "is_autocast_available", _by_name),
        Override(mode.autocast, "__init__", lambda method, region, *a, **k: _by_name(partial(method, region), *a, **k)),
        Override(mode, "_cast", _casting_stand_ins),
        Override(torch, "clear_autocast_cache", _dropping_copies),
        Override(torch.utils.checkpoint, "_infer_device_type", _inferring_cuda),
        Override(torch.utils.backend_registration, "_privateuse1_backend_name", _NameOfStandIn),
    )


@cache
def _lists_of_devices() -> tuple[Override, ...]:
    return (
        *(Override(module, _LIST_KERNELS, _with_stand_in) for module in (_foreach_utils, optimizer, swa_utils)),
        Override(optimizer, "_get_fused_kernels_supported_devices", _with_stand_in),
    )


@contextmanager
def original_lists_of_devices() -> Iterator[None]:
    """Restore PyTorch's lists of the devices that have some kernel while open: `meta` is none of them."""
    with _lists.suspended():
        yield


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


def _from_ampere_on(_: Function, including_emulation: bool = True) -> bool:
    """Whether the GPU has bfloat16; older ones emulate it, which counts unless the caller says otherwise."""
    semantics = current()
    return including_emulation or (semantics is not None and semantics.capability >= (8, 0))


def _by_name(original: Function, device_type: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
    """Take ``meta`` for ``cuda``: code that opens a region for ``x.device.type`` passes that on a GPU."""
    return original("cuda" if device_type == "meta" else device_type, *args, **kwargs)


def _casting_stand_ins(original: Function, value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """`custom_fwd(cast_inputs=...)` casts the arguments that are CUDA tensors; containers come back here."""
    semantics = current() if isinstance(value, Tensor) and device_type == "cuda" else None
    is_cast = semantics is not None and autocast.is_eligible(value, semantics)
    return value.to(dtype) if is_cast else original(value, device_type, dtype)


def _dropping_copies(original: Function) -> None:
    """PyTorch clears its cache when the outermost region ends; memsize's copies are dropped with it."""
    original()
    semantics = current()
    if semantics is not None:
        semantics.copies.clear()


def _inferring_cuda(original: Function, *args: Any) -> str:
    """The device whose autocast checkpointing restores in its recomputation.

    It touches no generator of CUDA: it saves those of its tensors' devices, and none of them is a CUDA device.
    """
    semantics = current()
    inferred: str = original(*args)
    is_stand_in = semantics is not None and {"meta": semantics.meta, "cpu": semantics.cpu}.get(inferred, False)
    return "cuda" if is_stand_in else inferred


def _with_stand_in(original: Function) -> list[str]:
    """The devices that have list kernels, and fused optimizers."""
    semantics = current()
    return [*original(), *(["meta"] if semantics is not None and semantics.meta else [])]


_answers = ThreadPatches(_questions, lambda: current() is not None)
_lists = ThreadPatches(_lists_of_devices, lambda: current() is not None)
