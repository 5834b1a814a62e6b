"""Batch, layer, group, RMS and weight norms, and their gradients: the statistics that CUDA's kernels keep, and what
they take meanwhile.

Statistics of half-precision inputs are float32. Running statistics are written in place and need no answer.
`memsize.cuda.kernel_choice` says whether cuDNN computes a batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memsize.kernels.reduction_scratch import power_of_two
from memsize.kernels.registry import (
    Copies,
    Temporary,
    copies_of,
    copy_unless_contiguous,
    same_dtype,
    shape_rule,
    temporaries_of,
)
from memsize.kernels.strides import Shape
from memsize.kernels.tensors import (
    Tensor,
    accumulation,
    are_plain,
    empty,
    formatted,
    has_inner_channels,
    is_channels_last,
    like,
)

_INDEXED = 2**31 - 1
_THREADS, _TILE, _ROWS_OF_THREAD = 512, 32, 16
_LEAST_BLOCKS, _MOST_BLOCKS = 8, 128
_aten = torch.ops.aten

same_dtype(slice(0, 4), _aten.native_layer_norm.default)  # cuda/layer_norm_kernel.cu
# cuda/layer_norm_kernel.cu `layer_norm_cuda`: expect_contiguous; group_norm.cpp `native_group_norm` (until PyTorch 2.13
# `group_norm` itself has done so before)
copies_of(_aten.native_layer_norm.default, _aten.native_group_norm.default)(copy_unless_contiguous)


@copies_of(
    _aten.native_layer_norm_backward.default,
    *(getattr(_aten, name).default for name in ("_fused_rms_norm_backward",) if hasattr(_aten, name)),
)
def _backward_copies(args: Any, _: Any) -> Copies:
    """The input and the gradient, row by row (cuda/layer_norm_kernel.cu `LayerNormBackwardKernelImpl`): the gradient of
    a sum right after the norm is expanded."""
    for tensor in (args[1], args[0]):
        if not tensor.is_contiguous():
            yield tensor, "row-major"


def _gradients(mask: Any, tensor: Tensor, shape: Shape, dtype: torch.dtype, row_major: bool = True) -> Any:
    """The gradients of input and parameters, these of one `shape` and `dtype`; None for those that `mask` omits."""
    gradient = None if not mask[0] else empty(tensor.shape, tensor.dtype) if row_major else like(tensor)
    return gradient, *(empty(shape, dtype) if wanted else None for wanted in mask[1:])


# -- batch norm -------------------------------------------------------------------------------------------------------


def _fits_channels(tensor: Any, *per_channel: Any) -> bool:
    """Whether `tensor` is a batch of floating values and each of the others None or one value per channel."""
    if not are_plain(tensor, *per_channel) or not tensor.is_floating_point() or tensor.dim() < 2:
        return False
    channels = tensor.shape[1:2]
    return bool(tensor.numel()) and all(values is None or values.shape == channels for values in per_channel)


@shape_rule("aten::native_batch_norm", "aten::_native_batch_norm_legit")
def _batch_norm(
    tensor: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, _momentum: float, _eps: float
) -> Any:
    """In evaluation too, CUDA keeps the statistics it used, in copies of its own (cuda/Normalization.cu,
    `batch_norm_cuda`)."""
    if not _fits_channels(tensor, weight, bias, mean, variance):
        return NotImplemented
    if not training and (mean is None or variance is None):
        return NotImplemented
    channels, dtype = tensor.shape[1:2], accumulation(tensor.dtype)
    return like(tensor), empty(channels, dtype), empty(channels, dtype)


@shape_rule("aten::_native_batch_norm_legit.no_stats")
def _batch_norm_without_running(tensor: Any, weight: Any, bias: Any, *options: Any) -> Any:
    return _batch_norm(tensor, weight, bias, None, None, *options)


@shape_rule("aten::native_batch_norm_backward")
def _batch_norm_backward(
    grad: Any, tensor: Any, weight: Any, _mean: Any, _variance: Any, _save_mean: Any, _save_invstd: Any, _train: bool,
    _eps: float, mask: Any,
) -> Any:  # fmt: skip
    """The gradients of weight and bias have the weight's dtype, without one the statistics'."""
    if not _fits_channels(tensor, weight) or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    dtype = accumulation(tensor.dtype) if weight is None else weight.dtype
    return _gradients(mask, tensor, tensor.shape[1:2], dtype, row_major=False)


@shape_rule("aten::cudnn_batch_norm")
def _cudnn_batch_norm(
    tensor: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, _momentum: float, _eps: float
) -> Any:
    """cuDNN (cudnn/BatchNorm.cpp) keeps statistics in training only.

    The reserve space has the size that cuDNN asks for: nothing in the spatial mode, which row-major inputs use; for
    channels last in half precision the persistent kernels may ask for one bit per element. It is taken for empty.
    """
    if weight is None or not _fits_channels(tensor, weight, bias, mean, variance):
        return NotImplemented
    shape = tensor.shape[1:2] if training else (0,)
    statistics = empty(shape, weight.dtype), empty(shape, weight.dtype)
    return formatted(tensor.shape, tensor.dtype, is_channels_last(tensor)), *statistics, empty((0,), torch.uint8)


@shape_rule("aten::cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(
    tensor: Any, grad: Any, weight: Any, _mean: Any, _variance: Any, _save_mean: Any, _save_var: Any, _eps: float,
    _reserve: Any,
) -> Any:  # fmt: skip
    if weight is None or not _fits_channels(tensor, weight) or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    result = formatted(tensor.shape, tensor.dtype, is_channels_last(tensor))
    return result, empty(weight.shape, weight.dtype), empty(weight.shape, weight.dtype)


# -- batch norm over several processes, for `nn.SyncBatchNorm` (cuda/Normalization.cu and its header) -----------------


@shape_rule("aten::batch_norm_stats")
def _statistics(tensor: Any, _eps: float) -> Any:
    if not _fits_channels(tensor):
        return NotImplemented
    dtype = accumulation(tensor.dtype)
    return empty(tensor.shape[1:2], dtype), empty(tensor.shape[1:2], dtype)


@shape_rule("aten::batch_norm_gather_stats_with_counts")
def _gathered_statistics(
    tensor: Any, means: Any, invstds: Any, mean: Any, variance: Any, _momentum: float, _eps: float, _counts: Any
) -> Any:
    """`means` and `invstds` have a row for each process, and decide the dtype: the batch of this one may be empty."""
    if not are_plain(tensor, means, invstds, mean, variance) or tensor.dim() < 2 or means.dim() != 2:
        return NotImplemented
    channels, dtype = means.shape[1:], accumulation(means.dtype)
    return empty(channels, dtype), empty(channels, dtype)


@shape_rule("aten::batch_norm_elemt")
def _normalized(tensor: Any, weight: Any, bias: Any, mean: Any, invstd: Any, _eps: float) -> Any:
    return like(tensor) if _fits_channels(tensor, weight, bias, mean, invstd) else NotImplemented


@shape_rule("aten::batch_norm_backward_reduce")
def _reduced_gradients(
    grad: Any, tensor: Any, mean: Any, invstd: Any, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> Any:
    """Two sums for each channel, with the dtype of the statistics, then the gradients of weight and bias. The kernel
    for innermost channels makes all four, whatever is asked for, and empty ones where there is no weight.
    """
    if not _fits_channels(tensor, mean, invstd, weight) or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    if has_inner_channels(grad) and has_inner_channels(tensor):
        like_weight = mean.new_empty(0) if weight is None else weight
        return tuple(empty(source.shape, source.dtype) for source in (mean, mean, like_weight, like_weight))
    if weight is None and (weight_g or bias_g):
        return NotImplemented
    wanted = ((input_g, mean), (input_g, mean), (weight_g, weight), (bias_g, weight))
    return tuple(empty(mean.shape, source.dtype) if is_wanted else None for is_wanted, source in wanted)


@shape_rule("aten::batch_norm_backward_elemt")
def _normalized_backward(
    grad: Any, tensor: Any, mean: Any, invstd: Any, weight: Any, sums: Any, products: Any, _count: Any
) -> Any:
    """Row-major, unless channels lie innermost in both the gradient and the input."""
    fits = _fits_channels(tensor, mean, invstd, weight, sums, products)
    if not fits or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    if has_inner_channels(grad) and has_inner_channels(tensor):
        return like(tensor)
    return empty(tensor.shape, tensor.dtype)


# -- what batch norm's kernels take -----------------------------------------------------------------------------------


@temporaries_of(_aten.native_batch_norm_backward.default)
def _batch_norm_sums(_grad: Tensor, tensor: Tensor, *more: Any) -> Iterator[Temporary]:
    """Two sums for each channel, of PyTorch's own kernels where channels lie innermost, as in two dimensions: elsewhere
    one kernel keeps them to itself (cuda/Normalization.cu, `batch_norm_backward_cuda`).
    """
    *_, training, _eps, mask = more
    if has_inner_channels(tensor) and mask[0] and (training or mask[1] or mask[2]):
        yield from [Temporary((tensor.shape[1],), accumulation(tensor.dtype))] * 2


_legit = _aten._native_batch_norm_legit


@temporaries_of(_aten.native_batch_norm.default, _legit.default, _legit.no_stats)
def _trained_parts(tensor: Tensor, *more: Any) -> Iterator[Temporary]:
    """In training, as the first flag says. Volumes with inner channels use other kernels (`batch_norm_choose_impl`)."""
    training = next(argument for argument in more if isinstance(argument, bool))
    if training and tensor.dim() < 5:
        yield from _parts(4, tensor)


temporaries_of(_aten.batch_norm_stats.default)(lambda tensor, _eps: _parts(4, tensor))
temporaries_of(_aten.batch_norm_backward_reduce.default)(lambda grad, tensor, *_: _parts(2, grad, tensor))


def _parts(numbers: int, *tensors: Tensor) -> Iterator[Temporary]:
    """Yield the staging memory of a reduction over innermost channels where eight or more blocks of threads share a
    channel: `numbers` of each block for each channel, and one counter for each column of blocks.

    Source: cuda/Normalization.cuh (`flexible_launch_configs`, `batch_norm_stats_channels_last_cuda_template`,
    `batch_norm_backward_reduce_cuda_channels_last_template`).
    """
    tensor = tensors[0]
    if not all(map(has_inner_channels, tensors)) or not 0 < tensor.numel() < _INDEXED:
        return
    channels = tensor.shape[1]
    rows = tensor.numel() // channels
    high = min(power_of_two(-(-rows // _ROWS_OF_THREAD)), _THREADS // min(power_of_two(channels), _TILE))
    wide = min(power_of_two(channels), _THREADS // high)
    blocks = min(-(-rows // (high * _ROWS_OF_THREAD)), _MOST_BLOCKS)
    if blocks >= _LEAST_BLOCKS:
        yield Temporary((numbers * channels * blocks,), accumulation(tensor.dtype))
        yield Temporary((-(-channels // wide),), torch.int32)


# -- layer norm and RMS norm ------------------------------------------------------------------------------------------


def statistics_shape(shape: Shape, normalized: Shape) -> tuple[int, ...] | None:
    """One value per row: the sizes before the normalized ones, then ones. None when the last sizes are others."""
    outer = len(shape) - len(normalized)
    if not normalized or outer < 0 or tuple(shape[outer:]) != tuple(normalized):
        return None
    return (*shape[:outer], *(1 for _ in normalized))


def _fits_rows(tensor: Any, normalized: Shape, *parameters: Any) -> bool:
    if not are_plain(tensor, *parameters) or not tensor.is_floating_point():
        return False
    return all(p is None or tuple(p.shape) == tuple(normalized) for p in parameters)


@shape_rule("aten::native_layer_norm")
def _layer_norm(tensor: Any, normalized: Any, weight: Any, bias: Any, _eps: float) -> Any:
    """A row-major output, whatever the input's strides (cuda/layer_norm_kernel.cu)."""
    rows = statistics_shape(tensor.shape, normalized) if _fits_rows(tensor, normalized, weight, bias) else None
    if rows is None:
        return NotImplemented
    dtype = accumulation(tensor.dtype)
    return empty(tensor.shape, tensor.dtype), empty(rows, dtype), empty(rows, dtype)


@shape_rule("aten::native_layer_norm_backward")
def _layer_norm_backward(
    grad: Any, tensor: Any, normalized: Any, _mean: Any, _rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    if not _fits_rows(tensor, normalized, weight, bias) or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    if weight is None and any(mask[1:]):
        return NotImplemented
    return _gradients(mask, tensor, normalized, (tensor if weight is None else weight).dtype)


@shape_rule("aten::_fused_rms_norm")
def _rms_norm(tensor: Any, normalized: Any, weight: Any, _eps: float | None) -> Any:
    rows = statistics_shape(tensor.shape, normalized) if _fits_rows(tensor, normalized, weight) else None
    if rows is None or (weight is not None and weight.dtype is not tensor.dtype):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype), empty(rows, accumulation(tensor.dtype))


@shape_rule("aten::_fused_rms_norm_backward")
def _rms_norm_backward(grad: Any, tensor: Any, normalized: Any, _rstd: Any, weight: Any, mask: Any) -> Any:
    if not _fits_rows(tensor, normalized, weight) or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    if weight is None:
        return _gradients((mask[0], False), tensor, normalized, tensor.dtype)
    return _gradients(mask, tensor, normalized, weight.dtype)


# -- group norm and weight norm ---------------------------------------------------------------------------------------


@shape_rule("aten::native_group_norm")
def _group_norm(
    tensor: Any, weight: Any, bias: Any, batch: int, channels: int, pixels: int, groups: int, _eps: float
) -> Any:
    """Row-major on CUDA. Statistics per sample and group, float32 only where the parameters are and the input is not
    (group_norm.cpp, mixed_data_type.h)."""
    if not _fits_channels(tensor, weight, bias) or groups < 1 or channels % groups:
        return NotImplemented
    if tensor.numel() != batch * channels * pixels:
        return NotImplemented
    mixed = any(p is not None and p.dtype is not tensor.dtype for p in (weight, bias))
    dtype = torch.float32 if mixed else tensor.dtype
    return empty(tensor.shape, tensor.dtype), empty((batch, groups), dtype), empty((batch, groups), dtype)


@shape_rule("aten::native_group_norm_backward")
def _group_norm_backward(
    grad: Any, tensor: Any, _mean: Any, _rstd: Any, weight: Any, _batch: int, channels: int, _pixels: int, _groups: int,
    mask: Any,
) -> Any:  # fmt: skip
    """Row-major too, where PyTorch's `meta` kernel fails for strides neither row-major nor channels last."""
    if not _fits_channels(tensor, weight) or not are_plain(grad) or grad.shape != tensor.shape:
        return NotImplemented
    if weight is None and any(mask[1:]):
        return NotImplemented
    return _gradients(mask, tensor, (channels,), (tensor if weight is None else weight).dtype)


@shape_rule("aten::_weight_norm_interface")
def _weight_norm(direction: Any, length: Any, dim: int = 0) -> Any:
    """The weight, and the norms that backward needs, in the accumulation's dtype (cuda/WeightNorm.cu); PyTorch's `meta`
    kernel says the same of bfloat16 alone."""
    if not are_plain(direction, length) or dim not in (0, direction.dim() - 1):
        return NotImplemented
    if length.numel() != direction.shape[dim] or not direction.is_contiguous() or not direction.numel():
        return NotImplemented
    return empty(direction.shape, direction.dtype), empty(length.shape, accumulation(length.dtype))
