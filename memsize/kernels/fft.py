"""Results, copies and buffers of Fourier transforms on a GPU.

cuFFT transforms up to three dimensions at a time of tensors whose other dimensions are one: where strides don't allow
that, the input is copied, and also where cuFFT cannot follow them in the dimensions that it transforms. The result lies
in the order of the input's other dimensions, with the transformed ones innermost. To real numbers cuFFT writes over its
input, of which there is always a copy.

Source: aten/src/ATen/native/cuda/SpectralOps.cpp (`_exec_fft`, `_fft_r2c_cufft`, `_fft_c2r_cufft`, `_fft_c2c_cufft`)
and CuFFTPlanCache.h (`as_cufft_embed`). Known limits: cuFFT's own work area is not counted, nor what bfloat16 takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple

import torch

from memsize.kernels.registry import Temporary, shape_rule, temporaries_of
from memsize.kernels.strides import Shape, contiguous, permuted
from memsize.kernels.tensors import Tensor, strided
from memsize.torch_internals.meta import is_meta

_aten = torch.ops.aten
_AT_ONCE: Final = 3
"""The most dimensions of one transform (`cufft_max_ndim`)."""


class _Chain(NamedTuple):
    """The transforms of one call: the strides of the last result, and whether each of them copies its input."""

    strides: tuple[int, ...]
    copies: list[bool]


def _complex(shape: Shape, strides: Shape, dim: Sequence[int]) -> _Chain:
    """Between complex numbers: three dimensions at a time, the innermost first."""
    left, copies = list(dim), []
    while left:
        left.sort(key=lambda d: -strides[d])
        dims, left = left[-_AT_ONCE:], left[:-_AT_ONCE]
        copies.append(_copies(shape, strides, dims))
        strides = _transformed(shape, shape, strides, dims)
    return _Chain(tuple(strides), copies)


def _from_real(shape: Shape, onesided: Shape, out: Shape, strides: Shape, dim: Sequence[int]) -> _Chain:
    """From real numbers: at once, or the last dimension first."""
    if _are_at_once(dim):
        return _Chain(_transformed(shape, out, strides, dim), [_copies(shape, strides, dim)])
    last = dim[-1:]
    after = _complex(onesided, _transformed(shape, onesided, strides, last), dim[:-1])
    result = contiguous(out) if out != onesided else after.strides
    return _Chain(result, [_copies(shape, strides, last), *after.copies])


def _to_real(shape: Shape, out: Shape, strides: Shape, dim: Sequence[int]) -> _Chain:
    """To real numbers: from a copy at once, or from the result of the other dimensions."""
    at_once = _are_at_once(dim)
    before = _Chain(contiguous(shape), []) if at_once or len(dim) == 1 else _complex(shape, strides, dim[:-1])
    last = dim if at_once else dim[-1:]
    result = _transformed(shape, out, before.strides, last)
    return _Chain(result, [*before.copies, _copies(shape, before.strides, last)])


# -- results ----------------------------------------------------------------------------------------------------------


def _is_known(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and is_meta(tensor) and tensor.layout is torch.strided and not tensor.is_conj()


@shape_rule("aten::_fft_c2c")
def _complex_result(tensor: Any, dim: Any, _normalization: int, _forward: bool) -> Any:
    if not _is_known(tensor) or not tensor.is_complex() or not dim:
        return NotImplemented
    return strided(tensor.shape, _complex(tensor.shape, tensor.stride(), _inside(dim, tensor)).strides, tensor.dtype)


@shape_rule("aten::_fft_r2c")
def _result_of_real(tensor: Any, dim: Any, _normalization: int, onesided: bool) -> Any:
    if not _is_known(tensor) or not tensor.is_floating_point() or tensor.dtype is torch.bfloat16:
        return NotImplemented
    dims, half = _inside(dim, tensor), _halved(tensor, dim)
    shape = half if onesided else tuple(tensor.shape)
    chain = _from_real(tensor.shape, half, shape, tensor.stride(), dims)
    return strided(shape, chain.strides, tensor.dtype.to_complex())


@shape_rule("aten::_fft_c2r")
def _real_result(tensor: Any, dim: Any, _normalization: int, last: int) -> Any:
    if not _is_known(tensor) or not tensor.is_complex():
        return NotImplemented
    dims, shape = _inside(dim, tensor), list(tensor.shape)
    shape[dims[-1]] = last
    return strided(shape, _to_real(tensor.shape, shape, tensor.stride(), dims).strides, tensor.dtype.to_real())


def _inside(dim: Sequence[int], tensor: Tensor) -> list[int]:
    return [d % tensor.dim() for d in dim]


def _halved(tensor: Tensor, dim: Sequence[int]) -> tuple[int, ...]:
    """The shape of the frequencies that real numbers have."""
    shape = list(tensor.shape)
    shape[dim[-1]] = shape[dim[-1]] // 2 + 1
    return tuple(shape)


def _transformed(shape: Shape, out: Shape, strides: Shape, dim: Sequence[int]) -> tuple[int, ...]:
    rest = sorted((d for d in range(len(shape)) if d not in dim), key=lambda d: -strides[d])
    return permuted(out, reversed([*rest, *dim]))


# -- what the kernels take inside -------------------------------------------------------------------------------------


@temporaries_of(_aten._fft_c2c.default)
def _complex_temporaries(tensor: Tensor, dim: Sequence[int], *_: object) -> Iterator[Temporary]:
    """From the second transform on, the result before it is there too."""
    copies = _complex(tensor.shape, tensor.stride(), _inside(dim, tensor)).copies
    yield from [_like(tensor)] * max((position > 0) + copy for position, copy in enumerate(copies))


@temporaries_of(_aten._fft_r2c.default)
def _temporaries_from_real(
    tensor: Tensor, dim: Sequence[int], _normalization: int, onesided: bool
) -> Iterator[Temporary]:
    dims, half = _inside(dim, tensor), _halved(tensor, dim)
    shape = half if onesided else tuple(tensor.shape)
    first, *later = _from_real(tensor.shape, half, shape, tensor.stride(), dims).copies
    before = [_like(tensor)] if first else []
    after = [Temporary(shape, tensor.dtype.to_complex())] * (1 + any(later)) if later else []
    yield from max(after, before, key=lambda alive: sum(temporary.bytes for temporary in alive))


@temporaries_of(_aten._fft_c2r.default)
def _temporaries_to_real(tensor: Tensor, dim: Sequence[int], _normalization: int, last: int) -> Iterator[Temporary]:
    dims, shape = _inside(dim, tensor), list(tensor.shape)
    shape[dims[-1]] = last
    yield from [_like(tensor)] * (1 + any(_to_real(tensor.shape, shape, tensor.stride(), dims).copies))


def _are_at_once(dim: Sequence[int]) -> bool:
    """Whether cuFFT also does the step between real and complex numbers (`use_optimized_cufft_path`)."""
    return len(dim) <= _AT_ONCE and tuple(dim[:2]) != (0, 1)


def _copies(shape: Shape, strides: Shape, dim: Sequence[int]) -> bool:
    """Whether a transform of `dim` copies its input."""
    return not _is_batch(shape, strides, dim) or not _is_embedded(shape, strides, dim)


def _is_batch(shape: Shape, strides: Shape, dim: Sequence[int]) -> bool:
    """Whether the dimensions that are not transformed can be viewed as one."""
    rest = [(strides[d], size) for d, size in enumerate(shape) if d not in dim and size != 1]
    return all(outer == stride * size for (outer, _), (stride, size) in pairwise(sorted(rest, reverse=True)))


def _is_embedded(shape: Shape, strides: Shape, dim: Sequence[int]) -> bool:
    """Whether the transformed dimensions are part of a row-major tensor, as far as cuFFT can follow them."""
    batch = [(strides[d], shape[d]) for d in range(len(shape)) if d not in dim and shape[d] != 1]
    step = strides[dim[-1]]
    if step <= 0 or (prod(size for _, size in batch) > 1 and min(batch)[0] == 0):
        return False
    for d in reversed(dim[:-1]):
        if shape[d] == 1:
            continue
        if strides[d] <= 0 or strides[d] % step:
            return False
        step = strides[d]
    return True


def _like(tensor: Tensor) -> Temporary:
    return Temporary(tuple(tensor.shape), tensor.dtype)
