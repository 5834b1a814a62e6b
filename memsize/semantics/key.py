"""The dispatch key on which CUDA's decisions are made for tensors that only stand for CUDA tensors.

A dispatch key is a place in PyTorch's dispatcher where a kernel may take a call before autograd records it. Nothing in
PyTorch uses `AutocastIPU`; it sits where CUDA's autocast sits, and sees every call: also those that composites written
in C++ make. Every thread excludes it by default, so the kernels that `kernels` puts there sleep until a thread is
`switched_on`.

Source: c10/core/DispatchKey.h (order of the keys).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
CastObserver = Callable[[Tensor, Tensor], None]

KEY: torch._C.DispatchKey = torch._C.DispatchKey.__members__["AutocastIPU"]
NAMESPACE = "aten"
STAND_INS = frozenset({"meta", "cpu"})
CUDNN = 91501
"""The version of cuDNN that is meant where none is named: 9.15.1."""
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_include = torch._C._dispatch_tls_set_dispatch_key_included
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


@dataclass(slots=True)
class Semantics:
    """What one thread takes for CUDA, and autocast's weight copies that are alive in it.

    `capability` and `cudnn` (9.15.1 is 91501) are those of the GPU and its libraries; `observer` hears of every copy
    that autocast makes of a parameter. `copies` maps a parameter's id to the parameter and its copy.
    """

    meta: bool
    cpu: bool
    capability: tuple[int, int]
    cudnn: int
    observer: CastObserver | None
    copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=dict)

    def stands_for_cuda(self, tensor: Tensor) -> bool:
        """Whether `tensor` would be on the GPU."""
        return (self.meta and tensor.is_meta) or (self.cpu and tensor.is_cpu)


class _Thread(threading.local):
    semantics: Semantics | None = None


_thread = _Thread()


def current() -> Semantics | None:
    """The semantics that this thread has switched on, if any."""
    return _thread.semantics


@contextlib.contextmanager
def switched_on(semantics: Semantics) -> Iterator[None]:
    """Let the kernels of the key answer this thread, as `semantics` says; as before afterwards."""
    outer, was_included, was_excluded = _thread.semantics, _is_included(KEY), _is_excluded(KEY)
    _thread.semantics = semantics
    _include(KEY, True)
    _exclude(KEY, False)
    try:
        yield
    finally:
        _exclude(KEY, was_excluded)
        _include(KEY, was_included)
        _thread.semantics = outer


class suspended:  # noqa: N801 - reads as the context manager that it is
    """Call PyTorch with the kernels of the key passed over: what runs below autograd is no longer CUDA's to decide."""

    __slots__ = ("_was_excluded",)

    def __enter__(self) -> None:
        self._was_excluded = _is_excluded(KEY)
        _exclude(KEY, True)

    def __exit__(self, *_: object) -> None:
        _exclude(KEY, self._was_excluded)


def overload(name: str) -> Any:
    """The callable of the operator `name` (``"softmax.int"``, ``"torchvision::nms"``), without the checks of its Python
    face.
    """
    namespace, _, own = name.rpartition("::")
    packet, _, variant = own.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or NAMESPACE), packet), variant or "default")._op
