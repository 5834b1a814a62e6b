"""Losses and their gradients.

A reduced loss is one number, for some losses at the start of the memory that its terms would take; an unreduced one is
elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memsize.kernels.registry import Temporary, overloads, shape_rule, temporaries_of
from memsize.kernels.strides import broadcast
from memsize.kernels.tensors import are_alike, are_plain, elementwise, empty

_UNREDUCED = 0
_aten = torch.ops.aten

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


@shape_rule(*overloads("mse_loss smooth_l1_loss"))
def _reduced_in_place(tensor: Any, target: Any, reduction: int = 1, *_: Any) -> Any:
    """The result is made for the terms, and then resized to one number, which frees nothing (native/Loss.cpp)."""
    terms = _difference(tensor, target, _UNREDUCED)
    return terms if terms is NotImplemented or reduction == _UNREDUCED else terms.resize_(())


@shape_rule("aten::soft_margin_loss")
def _soft_margin_loss(tensor: Any, target: Any, reduction: int = 1) -> Any:
    """As above; the terms are like the input, into which the target is multiplied."""
    fits = are_plain(tensor, target) and broadcast((tensor.shape, target.shape)) == tuple(tensor.shape)
    return _reduced_in_place(tensor, tensor, reduction) if fits and are_alike(tensor, target) else NotImplemented


@shape_rule(*overloads("huber_loss"))
def _difference(tensor: Any, target: Any, reduction: int = 1, *_: Any) -> Any:
    if not are_plain(tensor, target) or not are_alike(tensor, target) or not tensor.is_floating_point():
        return NotImplemented
    if reduction == _UNREDUCED:
        return elementwise(tensor.dtype, tensor, target)
    fits = broadcast((tensor.shape, target.shape)) is not None
    return empty((), tensor.dtype) if fits else NotImplemented


@shape_rule(*overloads("mse_loss smooth_l1_loss huber_loss", "_backward"))
def _difference_backward(grad: Any, tensor: Any, target: Any, *_: Any) -> Any:
    if not are_plain(grad, tensor, target) or not are_alike(grad, tensor, target):
        return NotImplemented
    return elementwise(tensor.dtype, tensor, target, grad)


@shape_rule("aten::binary_cross_entropy")
def _binary_cross_entropy_of_shares(tensor: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """As above (cuda/Loss.cu: `loss.resize_as_(loss_reduced)`)."""
    fits = are_plain(weight) and tensor.shape == target.shape
    return _reduced_in_place(tensor, target, reduction) if fits else NotImplemented


@shape_rule("aten::binary_cross_entropy_with_logits")
def _binary_cross_entropy(tensor: Any, target: Any, *options: Any) -> Any:
    """`options` are one or two tensors of weights, and the reduction at the end if it isn't the mean."""
    *weights, reduction = options if options and isinstance(options[-1], int) else (*options, 1)
    if not are_plain(*weights) or tensor.shape != target.shape:
        return NotImplemented
    return _difference(tensor, target, reduction)


@shape_rule("aten::binary_cross_entropy_backward")
def _binary_cross_entropy_backward(grad: Any, tensor: Any, target: Any, weight: Any = None, _reduction: int = 1) -> Any:
    """Like the input (cuda/Loss.cu: `at::empty_like(input)`)."""
    if not are_plain(grad, tensor, target, weight) or not are_alike(grad, tensor) or tensor.shape != target.shape:
        return NotImplemented
    return elementwise(tensor.dtype, tensor)


@temporaries_of(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default)
def terms(tensor: Tensor, target: Tensor, reduction: int = 1, *_: Any) -> Iterator[Temporary]:
    """One for each element, in the dtype of the inputs; unreduced, they are the result itself."""
    if reduction:
        yield Temporary(tuple(torch.broadcast_shapes(tensor.shape, target.shape)), tensor.dtype)
