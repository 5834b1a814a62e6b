"""CUDA's softmax of half-precision scores in float32: one kernel that widens as it reads, without a float32 copy.

Only float16 has it; bfloat16 scores are copied first on CUDA too. The kernels make their argument contiguous.

Source: aten/src/ATen/native/SoftMax.cpp, cuda/SoftMax.cu (`host_softmax`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from memsize.cuda.registry import Temporary, copies_of, copy_unless_contiguous, result_first, temporaries_of
from memsize.cuda.semantics import current
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload
from memsize.torch_internals.meta import is_meta

_aten = torch.ops.aten

copies_of(_aten._softmax.default, _aten._log_softmax.default)(copy_unless_contiguous)
result_first(_aten._softmax.default, _aten._log_softmax.default)


@temporaries_of(_aten._softmax_backward_data.default)
def _products(grad: Tensor, *_: Any) -> Iterator[Temporary]:
    """The gradient times the result, made before the kernel runs; the logarithm's kernel needs none.
    Source: cuda/SoftMax.cu `softmax_backward_cuda_out`.
    """
    yield Temporary(tuple(grad.shape), grad.dtype)


def kernels() -> Mapping[str, Kernel]:
    """The kernels of `softmax` and `log_softmax`."""
    return {f"{name}.int": _widening(name) for name in ("softmax", "log_softmax")}


def _widening(name: str) -> Kernel:
    plain: Any = None
    fused: Any = None

    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        nonlocal plain, fused
        plain, fused = plain or overload(f"{name}.int"), fused or overload(f"_{name}")
        semantics = current()
        is_stand_in = semantics is not None and semantics.meta and is_meta(tensor)
        with key_excluded:
            widens = is_stand_in and tensor.dtype is torch.float16 and dtype is torch.float32
            result: Tensor = fused(tensor, dim, True) if widens else plain(tensor, dim, dtype)
            return result

    return kernel
