"""The list kernels of gradient clipping on CUDA: what the norms of many tensors take beside their results.

One kernel computes the norms of all tensors chunk by chunk, the next those of tensors from those of their chunks, for
which every tensor has as much room as the largest needs. Other list kernels take nothing.

Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (`foreach_tensor_norm_cuda`), MultiTensorApply.cuh (`kChunkSize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memsize.cuda.registry import Temporary, temporaries_of
from memsize.meta_kernels.tensors import accumulation

_CHUNK = 65_536
_FAST = (1, 2, float("inf"))


@temporaries_of(torch.ops.aten._foreach_norm.Scalar)
def _norm_temporaries(tensors: Any, order: Any = 2, dtype: torch.dtype | None = None) -> Iterator[Temporary]:
    """The norms of the chunks. Other orders, and lists of several dtypes, are computed tensor by tensor."""
    alike = all(tensor.dtype is tensors[0].dtype for tensor in tensors)
    if order in _FAST and alike and tensors[0].is_floating_point():
        chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
        yield Temporary((len(tensors) * chunks,), accumulation(dtype or tensors[0].dtype))
