"""CUDA's dropout: one fused kernel that keeps a boolean mask, where the CPU multiplies by floating noise.

Source: aten/src/ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`). In-place, feature and alpha dropout have no
fused kernel on CUDA either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from memsize.cuda.semantics import current
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload


def kernels() -> Mapping[str, Kernel]:
    """The kernel of `dropout`."""
    return {"dropout": _dropout()}


def _dropout() -> Kernel:
    plain: Any = None
    fused: Any = None

    def kernel(tensor: Tensor, p: float, train: bool) -> Tensor:
        nonlocal plain, fused
        plain, fused = plain or overload("dropout"), fused or overload("native_dropout")
        semantics = current()
        is_fused = train and 0 < p < 1 and semantics is not None and semantics.stands_for_cuda(tensor)
        with key_excluded:
            result: Tensor = fused(tensor, p, train)[0] if is_fused and tensor.numel() else plain(tensor, p, train)
            return result

    return kernel
