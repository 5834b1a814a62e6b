"""Decompositions as they are on CUDA, for graphs that are traced with fakes on the CPU.

Some of PyTorch's ask for the device: norms keep their statistics in the input's dtype on the CPU, and in float32 on
CUDA; products with a row or column of one element become sums on the CPU, and outer products on CUDA.

Source: torch/_refs/__init__.py (`native_layer_norm`), torch/_decomp/decompositions.py (`native_batch_norm_helper`),
torch/_inductor/decomposition.py (`mm`, `addmm`, `bmm`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table

_aten = torch.ops.aten


def cuda_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions with those of CUDA."""
    table = dict(select_decomp_table())
    table.update({norm: partial(_in_float32, table[norm]) for norm in _NORMS if norm in table})
    table.update({_aten.mm.default: _mm, _aten.addmm.default: _addmm})
    table.pop(_aten.bmm.default, None)
    return table


_NORMS: Final = (
    _aten.native_layer_norm.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
)


def _in_float32(norm: Callable[..., Any], tensor: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """A norm computes in float32 in any case."""
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    result, *statistics = norm(tensor.to(wide), *args)
    return (result.to(tensor.dtype), *statistics)


def _is_outer(one: Tensor, other: Tensor) -> bool:
    return bool(one.shape[-1] == 1 and one.shape[0] != 1 and other.shape[1] != 1)


def _mm(one: Tensor, other: Tensor, out_dtype: torch.dtype | None = None) -> Any:
    return one * other if out_dtype is None and _is_outer(one, other) else NotImplemented


def _addmm(start: Tensor, one: Tensor, other: Tensor, out_dtype: Any = None, beta: Any = 1, alpha: Any = 1) -> Any:
    if out_dtype is not None or not _is_outer(one, other):
        return NotImplemented
    return alpha * (one * other) + beta * start
