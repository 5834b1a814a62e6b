"""Ops that refuse two dtypes on a GPU, and that PyTorch's `meta` kernels let through.

Without this check a model of which only part was cast would seem to run. Source: the checks at the head of the CUDA
kernels (in aten/src/ATen/native: cuda/Blas.cpp, Convolution.cpp, cuda/layer_norm_kernel.cu), in their words.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_OPERANDS: dict[Any, slice] = {
    _aten.mm.default: slice(0, 2),
    _aten.bmm.default: slice(0, 2),
    _aten.mv.default: slice(0, 2),
    _aten.dot.default: slice(0, 2),
    _aten.addmm.default: slice(0, 3),
    _aten.addmv.default: slice(0, 3),
    _aten.baddbmm.default: slice(0, 3),
    _aten.convolution.default: slice(0, 3),
    _aten.native_layer_norm.default: slice(0, 4),
}
"""Which positional arguments of an op must share their dtype."""


def refuse_mixed(func: Any, args: tuple[Any, ...]) -> None:
    """Raise the RuntimeError that the op's CUDA kernel raises when its operands' dtypes differ."""
    operands = _OPERANDS.get(func)
    if operands is None:
        return
    dtypes = [operand.dtype for operand in args[operands] if isinstance(operand, torch.Tensor)]
    if any(dtype is not dtypes[0] for dtype in dtypes):
        names = " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RuntimeError(f"{func._overloadpacket.__name__}: its operands must have the same dtype, but got {names}")
