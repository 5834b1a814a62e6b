"""Softmax, the losses, and their gradients. A reduced loss is one number; an unreduced one is elementwise."""

from __future__ import annotations

from typing import Any

import torch

from memsize.meta_kernels import strides as layout
from memsize.meta_kernels.registry import overloads, shape_rule
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, elementwise, empty

_UNREDUCED = 0

# -- softmax ----------------------------------------------------------------------------------------------------------


@shape_rule("aten::_softmax", "aten::_log_softmax")
def _softmax(tensor: Any, dim: int, half_to_float: bool) -> Any:
    """A row-major output (SoftMax.cpp); `half_to_float` widens it."""
    if not are_plain(tensor) or not tensor.is_floating_point() or not _has_dim(tensor, dim):
        return NotImplemented
    if half_to_float and tensor.dtype is not torch.float16:
        return NotImplemented
    return empty(tensor.shape, torch.float32 if half_to_float else tensor.dtype)


@shape_rule("aten::_safe_softmax")
def _safe_softmax(tensor: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """The result only: on its way CUDA also makes a softmax, a comparison and its reduction."""
    if not are_plain(tensor) or not tensor.is_floating_point() or not _has_dim(tensor, dim):
        return NotImplemented
    return empty(tensor.shape, dtype or tensor.dtype)


@shape_rule("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    if not are_plain(grad, output) or grad.shape != output.shape or not _has_dim(grad, dim):
        return NotImplemented
    return empty(grad.shape, dtype)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    rank = tensor.dim() or 1
    return -rank <= dim < rank


# -- negative log-likelihood ------------------------------------------------------------------------------------------


def _fits_classes(tensor: Any, target: Any, weight: Any) -> bool:
    """Whether class scores ``(C)``, ``(N, C)`` or ``(N, C, H, W)`` meet a class per sample or pixel."""
    if not are_plain(tensor, target, weight) or not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    if target.dtype not in (torch.int64, torch.uint8) or tensor.dim() not in (1, 2, 4):
        return False
    classes = tensor.shape[1] if tensor.dim() > 1 else tensor.shape[0]
    samples = (*tensor.shape[:1], *tensor.shape[2:]) if tensor.dim() > 1 else ()
    return target.shape == samples and (weight is None or weight.numel() == classes)


@shape_rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def _nll_loss(tensor: Any, target: Any, weight: Any, reduction: int, _ignored: int) -> Any:
    """The loss and the sum of weights that divides it."""
    if not _fits_classes(tensor, target, weight):
        return NotImplemented
    shape = target.shape if reduction == _UNREDUCED else ()
    return empty(shape, tensor.dtype), empty((), tensor.dtype)


@shape_rule("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def _nll_loss_backward(
    grad: Any, tensor: Any, target: Any, weight: Any, _reduction: int, _ignored: int, _total: Any
) -> Any:
    if not _fits_classes(tensor, target, weight) or not are_plain(grad):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype)


# -- differences ------------------------------------------------------------------------------------------------------


@shape_rule(*overloads("mse_loss smooth_l1_loss huber_loss"))
def _difference(tensor: Any, target: Any, reduction: int = 1, *_: Any) -> Any:
    if not are_plain(tensor, target) or not are_alike(tensor, target) or not tensor.is_floating_point():
        return NotImplemented
    return _reduced(reduction, tensor, target)


@shape_rule(*overloads("mse_loss smooth_l1_loss huber_loss", "_backward"))
def _difference_backward(grad: Any, tensor: Any, target: Any, *_: Any) -> Any:
    if not are_plain(grad, tensor, target) or not are_alike(grad, tensor, target):
        return NotImplemented
    result = elementwise(tensor.dtype, tensor, target, grad)
    return NotImplemented if result is None else result


def _reduced(reduction: int, *tensors: Tensor) -> Any:
    if reduction != _UNREDUCED:
        fits = layout.broadcast([t.shape for t in tensors]) is not None
        return empty((), tensors[0].dtype) if fits else NotImplemented
    result = elementwise(tensors[0].dtype, *tensors)
    return NotImplemented if result is None else result


@shape_rule("aten::binary_cross_entropy")
def _binary_cross_entropy(tensor: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    if not are_plain(weight) or tensor.shape != target.shape:
        return NotImplemented
    return _difference(tensor, target, reduction)


@shape_rule("aten::binary_cross_entropy_backward")
def _binary_cross_entropy_backward(grad: Any, tensor: Any, target: Any, weight: Any = None, _reduction: int = 1) -> Any:
    """Like the input (cuda/Loss.cu: `at::empty_like(input)`)."""
    if not are_plain(grad, tensor, target, weight) or not are_alike(grad, tensor) or tensor.shape != target.shape:
        return NotImplemented
    return elementwise(tensor.dtype, tensor)


@shape_rule("aten::binary_cross_entropy_with_logits")
def _logits_cross_entropy(
    tensor: Any, target: Any, weight: Any = None, positive: Any = None, reduction: int = 1
) -> Any:
    if not are_plain(weight, positive) or tensor.shape != target.shape:
        return NotImplemented
    return _difference(tensor, target, reduction)
