"""Which kernel CUDA would run for `batch_norm` and `rms_norm`, and so which statistics are kept.

cuDNN's batch norm keeps its statistics in training only, PyTorch's own kernel in evaluation too. RMS norm is one kernel
that keeps one number per row, where other devices run, and keep, each step of the formula.

Source: aten/src/ATen/native/Normalization.cpp (`_select_batch_norm_backend`, `_batch_norm_impl_index`), layer_norm.cpp
(`rms_norm_symint`). cuDNN's reserve space is taken for empty (`memsize.meta_kernels.norms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memsize.cuda.registry import Temporary, copies_of, copy_unless_contiguous, same_dtype, temporaries_of
from memsize.cuda.semantics import current
from memsize.meta_kernels.tensors import accumulation, has_inner_channels
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload
from memsize.torch_internals.meta import is_meta

_TRAINING_BATCH, _EVALUATION_BATCH = 880_801, 65_535
_INDEXED = 2**31 - 1
_THREADS, _TILE, _ROWS_OF_THREAD = 512, 32, 16
_LEAST_BLOCKS, _MOST_BLOCKS = 8, 128
_aten = torch.ops.aten

same_dtype(slice(0, 4), _aten.native_layer_norm.default)  # cuda/layer_norm_kernel.cu
# cuda/layer_norm_kernel.cu `layer_norm_cuda`: expect_contiguous; group_norm.cpp `native_group_norm` (until PyTorch 2.13
# `group_norm` itself has done so before)
copies_of(_aten.native_layer_norm.default, _aten.native_group_norm.default)(copy_unless_contiguous)


def kernels() -> Mapping[str, Kernel]:
    """The kernels of `batch_norm` and `rms_norm`."""
    return {"batch_norm": _batch_norm, "rms_norm": _rms_norm}


# -- batch norm -------------------------------------------------------------------------------------------------------


def takes_cudnn(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Whether CUDA gives this batch norm to cuDNN: not for bfloat16, not for half parameters of a half input, not for
    two dimensions, not without weight and bias."""
    if weight is None or bias is None or torch.bfloat16 in (tensor.dtype, weight.dtype):
        return False
    if tensor.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    if (mean is None) is not (variance is None) or (mean is None and not training):
        return False
    batch = _TRAINING_BATCH if training else _EVALUATION_BATCH
    fits = tensor.dim() >= 3 and tensor.shape[0] <= batch and tensor.numel() < _INDEXED
    return fits and eps >= 0 and torch._C._get_cudnn_enabled()


def _batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    # The flag given is not read: the global one is.
    with key_excluded:
        parameters = (weight, bias, mean, variance)
        if _stands_in(tensor) and tensor.numel() and takes_cudnn(tensor, *parameters, training, eps):
            dense = (tensor.contiguous(memory_format=_format(tensor)), *map(_contiguous, parameters))
            return overload("cudnn_batch_norm")(*dense, training, momentum, eps)[0]  # type: ignore[no-any-return]
        plain = overload("batch_norm")
        return plain(tensor, *parameters, training, momentum, eps, cudnn_enabled)  # type: ignore[no-any-return]


def _stands_in(tensor: Tensor) -> bool:
    """Whether CUDA's kernel can be called for its result on `tensor`; on the CPU it could not run."""
    semantics = current()
    return semantics is not None and semantics.meta and is_meta(tensor)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _format(tensor: Tensor) -> torch.memory_format:
    """The layout that cuDNN is given: the input's own if it is channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
    return last if is_last and last is not None else torch.contiguous_format


@temporaries_of(_aten.native_batch_norm_backward.default)
def _batch_norm_sums(_grad: Tensor, tensor: Tensor, *more: Any) -> Iterator[Temporary]:
    """Two sums for each channel, of PyTorch's own kernels where channels lie innermost, as in two dimensions: elsewhere
    one kernel keeps them to itself (cuda/Normalization.cu, `batch_norm_backward_cuda`).
    """
    *_, training, _eps, mask = more
    if has_inner_channels(tensor) and mask[0] and (training or mask[1] or mask[2]):
        yield from [Temporary((tensor.shape[1],), accumulation(tensor.dtype))] * 2


@temporaries_of(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def _trained_parts(tensor: Tensor, _weight: Any, _bias: Any, _mean: Any, _variance: Any, *more: Any) -> Iterator[Any]:
    if more[0]:
        yield from _parts_unless_volume(tensor)


@temporaries_of(_aten._native_batch_norm_legit.no_stats)
def _trained_parts_without_running(tensor: Tensor, _weight: Any, _bias: Any, training: bool, *_: Any) -> Iterator[Any]:
    if training:
        yield from _parts_unless_volume(tensor)


def _parts_unless_volume(tensor: Tensor) -> Iterator[Temporary]:
    """A volume whose channels lie innermost is reduced by another kernel (`batch_norm_choose_impl`)."""
    if tensor.dim() < 5:
        yield from _parts(4, tensor)


@temporaries_of(_aten.batch_norm_stats.default)
def _statistics_parts(tensor: Tensor, _eps: float) -> Iterator[Temporary]:
    return _parts(4, tensor)


@temporaries_of(_aten.batch_norm_backward_reduce.default)
def _gradient_parts(grad: Tensor, tensor: Tensor, *_: Any) -> Iterator[Temporary]:
    return _parts(2, grad, tensor)


def _parts(numbers: int, *tensors: Tensor) -> Iterator[Temporary]:
    """What a reduction over innermost channels stages where eight or more blocks of threads share a channel: `numbers`
    of each block for each channel, and one counter for each column of blocks.

    Source: cuda/Normalization.cuh (`flexible_launch_configs`, `batch_norm_stats_channels_last_cuda_template`,
    `batch_norm_backward_reduce_cuda_channels_last_template`).
    """
    tensor = tensors[0]
    if not all(map(has_inner_channels, tensors)) or not 0 < tensor.numel() < _INDEXED:
        return
    channels = tensor.shape[1]
    rows = tensor.numel() // channels
    high = min(_power(-(-rows // _ROWS_OF_THREAD)), _THREADS // min(_power(channels), _TILE))
    wide = min(_power(channels), _THREADS // high)
    blocks = min(-(-rows // (high * _ROWS_OF_THREAD)), _MOST_BLOCKS)
    if blocks >= _LEAST_BLOCKS:
        yield Temporary((numbers * channels * blocks,), accumulation(tensor.dtype))
        yield Temporary((-(-channels // wide),), torch.int32)


def _power(number: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << number.bit_length() - 1


# -- RMS norm ---------------------------------------------------------------------------------------------------------


def _rms_norm(tensor: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel, unless the weight has another dtype than the input: then the formula, step by step."""
    with key_excluded:
        is_alike = weight is None or weight.dtype is tensor.dtype
        if not (_stands_in(tensor) and is_alike and tensor.is_floating_point() and _fits(tensor, shape, weight)):
            return overload("rms_norm")(tensor, shape, weight, eps)  # type: ignore[no-any-return]
        return _FusedRMSNorm.apply(tensor, weight, list(shape), eps)  # type: ignore[no-any-return,no-untyped-call]


def _fits(tensor: Tensor, shape: Sequence[int], weight: Tensor | None) -> bool:
    """Whether the last sizes are the normalised ones; errors about others are PyTorch's own."""
    is_suffix = len(shape) > 0 and list(tensor.shape[-len(shape) :]) == list(shape)
    return is_suffix and (weight is None or list(weight.shape) == list(shape))


class _FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` with the gradient that it has on CUDA.

    On `meta` PyTorch would run the formula instead, because that is how the operator is written for other devices.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, rstd = overload("_fused_rms_norm")(tensor, shape, weight, eps)
        ctx.save_for_backward(tensor, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensor, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(grads[0], tensor, weight, ctx), None, None
        mask = list(ctx.needs_input_grad[:2])
        found = overload("_fused_rms_norm_backward")(grads[0], tensor, ctx.shape, rstd, weight, mask)
        return *found, None, None


def _differentiable(grad: Tensor, tensor: Tensor, weight: Tensor | None, ctx: Any) -> tuple[Tensor | None, ...]:
    """The gradients by the formula, so that they have gradients themselves (`create_graph`)."""
    wanted = [
        t for t, needed in zip((tensor, weight), ctx.needs_input_grad[:2], strict=True) if needed and t is not None
    ]
    result = overload("_fused_rms_norm")(tensor, ctx.shape, weight, ctx.eps)[0]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:2])
