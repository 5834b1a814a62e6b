"""The region in which tensors that only stand for CUDA tensors behave as CUDA tensors would.

Limits: a thread that the user's forward starts itself does not take part, nor does code that runs below autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memsize.semantics.availability import answered_as_cuda
from memsize.semantics.kernels import register_kernels
from memsize.semantics.key import CUDNN, STAND_INS, CastObserver, Semantics, current, switched_on


@contextmanager
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
    register_kernels()
    outer = current()
    semantics = Semantics("meta" in devices, "cpu" in devices, capability, cudnn, autocast_observer)
    if outer is not None:
        semantics.copies = outer.copies
    with answered_as_cuda(), switched_on(semantics):
        try:
            yield semantics
        finally:
            if outer is None:
                semantics.copies.clear()
