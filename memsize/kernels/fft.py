"""Copies and buffers of Fourier transforms on a GPU.

cuFFT transforms up to three dimensions at a time of tensors whose other dimensions are one: where strides don't allow
that, the input is copied. To real numbers it writes over its input, of which there is always a copy
(aten/src/ATen/native/cuda/SpectralOps.cpp: `_exec_fft`, `_fft_r2c_cufft`, `_fft_c2r_cufft`, `_fft_c2c_cufft`).

Known limit: cuFFT's own work area, and the copy of strides that it cannot embed, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from memsize.kernels.registry import Temporary, temporaries_of
from memsize.kernels.strides import Shape, contiguous

_aten = torch.ops.aten
_AT_ONCE: Final = 3
"""The most dimensions of one transform (`cufft_max_ndim`)."""


@temporaries_of(_aten._fft_c2c.default)
def _complex(tensor: Tensor, dim: Sequence[int], *_: object) -> Iterator[Temporary]:
    if len(dim) > _AT_ONCE:
        yield _like(tensor)  # the result of the first dimensions
    if not _is_batch(tensor.shape, tensor.stride(), dim[-_AT_ONCE:]):
        yield _like(tensor)


@temporaries_of(_aten._fft_r2c.default)
def _from_real(tensor: Tensor, dim: Sequence[int], _normalization: int, onesided: bool) -> Iterator[Temporary]:
    at_once = _are_at_once(dim)
    if not at_once:
        last, shape = dim[-1], list(tensor.shape)
        shape[last] = shape[last] // 2 + 1 if onesided else shape[last]
        yield Temporary(tuple(shape), tensor.dtype.to_complex())
    if not _is_batch(tensor.shape, tensor.stride(), dim if at_once else dim[-1:]):
        yield _like(tensor)


@temporaries_of(_aten._fft_c2r.default)
def _to_real(tensor: Tensor, dim: Sequence[int], *_: object) -> Iterator[Temporary]:
    yield _like(tensor)
    if not _is_batch(tensor.shape, contiguous(tensor.shape), dim if _are_at_once(dim) else dim[-1:]):
        yield _like(tensor)


def _are_at_once(dim: Sequence[int]) -> bool:
    """Whether cuFFT also does the step between real and complex numbers (`use_optimized_cufft_path`)."""
    return len(dim) <= _AT_ONCE and tuple(dim[:2]) != (0, 1)


def _is_batch(shape: Shape, strides: Shape, dim: Sequence[int]) -> bool:
    """Whether the dimensions that are not transformed can be viewed as one."""
    rest = [(strides[d], size) for d, size in enumerate(shape) if d not in dim and size != 1]
    return all(outer == stride * size for (outer, _), (stride, size) in pairwise(sorted(rest, reverse=True)))


def _like(tensor: Tensor) -> Temporary:
    return Temporary(tuple(tensor.shape), tensor.dtype)
