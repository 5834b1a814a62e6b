"""Autocast's casts and its cache of weight copies: which tensors are cast, and how long the copies of weights live.

A weight's copy lives until PyTorch clears its cache at the end of the outermost region, or `cuda_semantics` ends.

Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp (`cached_cast`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memsize.kernels.semantics import Semantics, current

_is_enabled = torch._C.is_autocast_enabled
_lower_dtype = torch._C.get_autocast_dtype
_is_cache_enabled = torch._C.is_autocast_cache_enabled


class _Region(threading.local):
    is_inference = False
    """Whether this thread is in a region that stands in for an inference mode."""


region = _Region()


def active() -> Semantics | None:
    """Return this thread's semantics if a CUDA autocast region is open in it."""
    return current() if _is_enabled("cuda") else None


def region_dtype() -> torch.dtype:
    """Return the lower precision of the open region."""
    return _lower_dtype("cuda")


def cast_arguments(values: Sequence[Any], dtype: torch.dtype, semantics: Semantics) -> list[Any]:
    """Return `values` with every eligible tensor in `dtype`, also inside lists of tensors.

    The last argument is cast first: autocast's wrappers are C++ calls of casts, and gcc evaluates those from the right.
    """
    last_first = [
        cast(value, dtype, semantics)
        if isinstance(value, Tensor)
        else [cast(tensor, dtype, semantics) for tensor in value]
        if type(value) is list and value and isinstance(value[0], Tensor)
        else value
        for value in reversed(values)
    ]
    return last_first[::-1]


def cast(tensor: Tensor, dtype: torch.dtype, semantics: Semantics) -> Tensor:
    """Return `tensor` in `dtype`: itself where autocast leaves it alone, else a copy, the cached one of a weight."""
    own = tensor.dtype
    if own is dtype or not is_eligible(tensor, semantics):
        return tensor
    if own is torch.float32 and _is_cached(tensor) and dtype is region_dtype():
        return _cached_copy(tensor, dtype, semantics)
    copy = tensor.to(dtype)
    if semantics.observer is not None and _is_parameter(tensor):
        semantics.observer(tensor, copy)
    return copy


def is_eligible(tensor: Tensor, semantics: Semantics) -> bool:
    """Whether autocast may cast `tensor`: on the GPU, floating, not double."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64 and semantics.stands_for_cuda(tensor)


def _is_cached(tensor: Tensor) -> bool:
    """Whether PyTorch would keep the copy: of leaves that want a gradient, and never in inference mode."""
    is_weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    is_inference = region.is_inference or torch.is_inference_mode_enabled()
    return is_weight and _is_cache_enabled() and not is_inference


def _is_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, or a view of one."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _cached_copy(tensor: Tensor, dtype: torch.dtype, semantics: Semantics) -> Tensor:
    """Return the one copy of a weight in this region.

    As in PyTorch, the dtype is not part of the cache's key, and a copy made under `no_grad` passes gradients on to
    whoever uses it later.
    """
    entry = semantics.copies.get(id(tensor))
    if entry is not None and entry[0]() is tensor:
        return entry[1]
    with torch.enable_grad():
        copy = tensor.to(dtype)
    semantics.copies[id(tensor)] = (weakref.ref(tensor), copy)
    if semantics.observer is not None:
        semantics.observer(tensor, copy)
    return copy
