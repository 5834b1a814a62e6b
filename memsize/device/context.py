"""What a process holds on the GPU outside the caching allocator: the CUDA context, loaded kernels, library handles.

It depends on the software stack and the card, not on the model, and cannot be derived offline: it is an interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memsize.errors import InputError
from memsize.records.gpu import Card, Interval
from memsize.spec.stack import release
from memsize.units import MiB


@dataclass(frozen=True, slots=True)
class ModuleLoading:
    """When CUDA loads its kernels, the size of the CUDA context that follows, and where the figures come from."""

    name: str
    context: Interval
    source: str


LAZY: Final = ModuleLoading(
    "CUDA 11.7 or newer, kernels loaded when first used",
    Interval(300 * MiB, 650 * MiB),
    "measured 274 MiB with one tensor (pytorch/pytorch#86509), about 300 MiB (#107667), about 400 MiB (#109888), "
    "426 MiB before any op with CUDA 13.0 (unslothai/unsloth-zoo#1053); cuBLAS, cuDNN and the kernels add to it",
)
EAGER: Final = ModuleLoading(
    "CUDA before 11.7, or CUDA_MODULE_LOADING=EAGER: every kernel loaded at start",
    Interval(1_000 * MiB, 1_450 * MiB),
    "more than 1,000 MB before CUDA 11.7 (pytorch/pytorch#107667); 1,429 MiB fits 200 training runs on an A100",
)
_LAZY_SINCE: Final = (11, 7)


def context(cuda: str | None = None, module_loading: str | None = None) -> Interval:
    """Bytes that a process holds outside the caching allocator with CUDA `cuda` (``"12.8"``; None: a current version).

    `module_loading` is the value of `CUDA_MODULE_LOADING`, which overrides the version's default. Raises `InputError`
    when the version cannot be read.
    """
    if (module_loading or "").upper() == "EAGER":
        return EAGER.context
    version = _LAZY_SINCE if cuda is None else release(cuda)
    if version is None:
        raise InputError(f"cannot read {cuda!r} as a CUDA version: write it like 12.8")
    return (LAZY if version >= _LAZY_SINCE else EAGER).context


def context_on(where: Card, cuda: str | None = None, module_loading: str | None = None) -> Interval:
    """The `context` that comes out of a card's memory. Metal's recommendation for a process leaves its own out."""
    return Interval(0, 0) if where.platform == "MPS" else context(cuda, module_loading)
