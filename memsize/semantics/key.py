"""The dispatch key on which CUDA's decisions are made for tensors that only stand for CUDA tensors.

A dispatch key is a place in PyTorch's dispatcher where a kernel may take a call before autograd records it. Nothing in
PyTorch uses `AutocastIPU`; it sits where CUDA's autocast sits, and sees every call: also those that composites written
in C++ make. Every thread excludes it by default, so kernels that go there (once per process, on first use) sleep until
a thread opens `cuda_semantics`.

Source: c10/core/DispatchKey.h (order of the keys), torch/library.py (kernels in Python).
Limits: a thread that the user's forward starts itself does not take part, nor does code that runs below autograd.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
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
_lock = threading.Lock()
_libraries: list[Any] = []
_registered: set[str] = set()
"""Names of the operators that have their kernel on the key."""


def current() -> Semantics | None:
    """The semantics that this thread has switched on, if any."""
    return _thread.semantics


@contextlib.contextmanager
def cuda_semantics(
    *,
    stands_for: frozenset[str] | set[str] | tuple[str, ...] = ("meta",),
    capability: tuple[int, int] = (8, 0),
    cudnn: int = CUDNN,
    autocast_observer: CastObserver | None = None,
) -> Iterator[Semantics]:
    """Let this thread's tensors on the devices `stands_for` behave as CUDA tensors would; as before afterwards.

    `autocast_observer(source, copy)` is called for every copy that autocast makes of a parameter. Nested use keeps the
    outer one's weight copies. Raises ValueError for a device that cannot stand for CUDA.
    """
    devices = frozenset(stands_for)
    if not devices or not devices <= STAND_INS:
        raise ValueError(f"tensors on {sorted(devices)} cannot stand for CUDA tensors: choose from {sorted(STAND_INS)}")
    _register_once()
    from memsize.semantics.availability import answered_as_cuda

    outer = _thread.semantics
    semantics = Semantics("meta" in devices, "cpu" in devices, capability, cudnn, autocast_observer)
    if outer is not None:
        semantics.copies = outer.copies
    was_included, was_excluded = _is_included(KEY), _is_excluded(KEY)
    with answered_as_cuda():
        _thread.semantics = semantics
        _include(KEY, True)
        _exclude(KEY, False)
        try:
            yield semantics
        finally:
            _exclude(KEY, was_excluded)
            _include(KEY, was_included)
            _thread.semantics = outer
            if outer is None:
                semantics.copies.clear()


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


def _register_once() -> None:
    """Put the kernels on the key that aren't: PyTorch's own at the first call, a library's once it is imported."""
    from memsize.semantics.autocast import LATE

    with _lock:
        if not _libraries:
            fallback = torch.library.Library("_", "IMPL", KEY.name)
            fallback.fallback(torch.library.fallthrough_kernel, KEY.name)
            _libraries.append(fallback)
        elif not any(name not in _registered and torch._C._dispatch_has_kernel(name) for name in LATE):
            return
        _register({name: kernel for name, kernel in _kernels().items() if name not in _registered})


def _kernels() -> Mapping[str, Kernel]:
    """Every kernel by operator name. What autocast wraps is decided on after its casts; attention does both itself."""
    from memsize.semantics import attention, autocast, dropout, encoder, norms, rnn, softmax

    decided = {**dropout.kernels(), **norms.kernels(), **rnn.kernels(), **softmax.kernels()}
    return {**decided, **autocast.kernels(decided), **attention.kernels(), **encoder.kernels()}


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
