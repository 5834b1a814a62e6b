"""The region in which tensors that stand for CUDA tensors behave as CUDA tensors would.

Each operator for which CUDA decides something has a kernel on the dispatch key. Kernels are registered once per
process, on first use; those of another library's operators once that library is imported.

Source: torch/library.py (kernels in Python).

Limits: threads that the user's forward starts itself do not take part, nor does code that runs below autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memsize.cuda import attention_backend, autocast, encoder, kernel_choice, recurrent
from memsize.cuda.availability import answered_as_cuda
from memsize.kernels.semantics import CUDNN, STAND_INS, CastObserver, Semantics, current, switched_on
from memsize.processes.simulation import open_simulation
from memsize.torch_internals.dispatch_key import KEY, NAMESPACE, Kernel

_libraries: list[Any] = []
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
        _register({name: kernel for name, kernel in kernels().items() if name not in _registered})


def kernels() -> Mapping[str, Kernel]:
    """Return every function on the dispatch key, by the operator's name.

    Where autocast wraps an operator, its casts come first; attention does both itself.
    """
    choices = {**kernel_choice.kernels(), **recurrent.kernels()}
    return {**choices, **autocast.kernels(choices), **attention_backend.kernels(), **encoder.kernels()}


def _register(kernels: Mapping[str, Kernel]) -> None:
    """Put `kernels` on the key; the libraries that hold them must stay alive."""
    libraries: dict[str, torch.library.Library] = {}
    for name, kernel in kernels.items():
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
    with answered_as_cuda(), switched_on(semantics):
        try:
            yield semantics
        finally:
            if outer is None:
                semantics.copies.clear()
