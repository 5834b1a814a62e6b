"""Matrix products on CUDA: which ops cuBLAS computes, and that they take operands of one dtype only.

Source: aten/src/ATen/native/cuda/Blas.cpp, whose checks raise in the words of `kernels.refuse_mixed`.
"""

from __future__ import annotations

import torch

from memsize.cuda.registry import same_dtype

_aten = torch.ops.aten

CUBLAS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._addmm_activation.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.addbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
    }
)
"""Ops that cuBLAS computes: a thread's first one makes a handle with a workspace."""
CUBLASLT = _aten.addmm.default
"""A product with a bias, which cuBLASLt computes."""

same_dtype(slice(0, 2), _aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default)
same_dtype(slice(0, 3), _aten.addmm.default, _aten.addmv.default, _aten.baddbmm.default)
