"""The GPU that a thread simulates, and the dispatch key on which CUDA's decisions are made for tensors that stand for
CUDA tensors.

A dispatch key is a place in PyTorch's dispatcher where a kernel may intercept a call before autograd records it.
Nothing in PyTorch uses `AutocastIPU`; it sits where CUDA's autocast sits and sees every call, including those that
composites written in C++ make. Every thread excludes it by default, so the kernels that `kernels` registers for it stay
inactive until a thread is `switched_on`.

Source: c10/core/DispatchKey.h (order of the keys).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from memsize.torch_internals.meta import KEY, exclude, include, is_excluded, is_included, is_meta

CastObserver = Callable[[Tensor, Tensor], None]
STAND_INS = frozenset({"meta", "cpu"})
CUDNN = 91501
"""The version of cuDNN that is assumed where none is given: 9.15.1."""


@dataclass(slots=True)
class Semantics:
    """The devices that one thread treats as CUDA, the GPU that it simulates, and autocast's live weight copies.

    `capability` and `cudnn` (9.15.1 is 91501) are those of the GPU and its libraries, `release` is that of the PyTorch
    to simulate where it is another than the installed one. `observer` is called for every copy that autocast makes of a
    parameter. `copies` maps a parameter's id to the parameter and its copy.
    """

    meta: bool
    cpu: bool
    capability: tuple[int, int]
    cudnn: int
    observer: CastObserver | None
    release: tuple[int, int] | None = None
    copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=dict)
    fakes: bool = False
    """Whether tensors on the CPU are fakes, which stand for CUDA tensors and compute nothing."""

    def stands_for_cuda(self, tensor: Tensor) -> bool:
        """Whether `tensor` would be on the GPU."""
        return self.is_stand_in(tensor) or (self.cpu and tensor.is_cpu)

    def is_stand_in(self, tensor: Tensor) -> bool:
        """Whether CUDA's kernel can be called for its result on `tensor`; on the CPU it could not run."""
        return (self.meta and is_meta(tensor)) or (self.fakes and tensor.is_cpu)

    def for_fakes(self) -> Semantics:
        """The same GPU, for the fakes on the CPU that a compiler traces with. It keeps no copies."""
        return Semantics(False, False, self.capability, self.cudnn, None, self.release, fakes=True)


class _Thread(threading.local):
    semantics: Semantics | None = None


_thread = _Thread()


def current() -> Semantics | None:
    """The semantics that this thread has switched on, if any."""
    return _thread.semantics


def simulated_release() -> tuple[int, int] | None:
    """The release of PyTorch that this thread simulates; None is the installed one."""
    return None if _thread.semantics is None else _thread.semantics.release


@contextlib.contextmanager
def switched_on(semantics: Semantics) -> Iterator[None]:
    """While open, the kernels of the key answer this thread's calls as `semantics` says."""
    outer, was_included, was_excluded = _thread.semantics, is_included(KEY), is_excluded(KEY)
    _thread.semantics = semantics
    include(KEY, True)
    exclude(KEY, False)
    try:
        yield
    finally:
        exclude(KEY, was_excluded)
        include(KEY, was_included)
        _thread.semantics = outer
