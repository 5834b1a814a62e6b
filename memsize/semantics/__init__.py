"""What CUDA would do, on any build of torch: autocast, the choice of attention kernel, fused dropout."""

from memsize.semantics.autocast import autocast_region, unknown_operators
from memsize.semantics.key import CUDNN, CastObserver, Semantics, current, suspended
from memsize.semantics.region import cuda_semantics

__all__ = [
    "CUDNN",
    "CastObserver",
    "Semantics",
    "autocast_region",
    "cuda_semantics",
    "current",
    "suspended",
    "unknown_operators",
]
