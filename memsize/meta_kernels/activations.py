"""Activation functions, their gradients, and dropout. All are elementwise except `glu`, which halves a dimension."""

from __future__ import annotations

from typing import Any

import torch

from memsize.meta_kernels.registry import overloads, shape_rule
from memsize.meta_kernels.tensors import Tensor, are_alike, are_plain, elementwise, empty, like, mapped, overlaps

_IN_PLACE = "gelu silu mish elu celu selu hardswish hardsigmoid hardtanh leaky_relu threshold"
_GRADIENTS = "gelu mish hardswish hardsigmoid hardtanh softplus sigmoid tanh"


@shape_rule(*overloads(_IN_PLACE + " softplus softshrink hardshrink"))
def _activation(tensor: Any, *_: Any, **__: Any) -> Any:
    if not are_plain(tensor) or not tensor.is_floating_point():
        return NotImplemented
    return mapped(tensor)


@shape_rule(*overloads(_IN_PLACE, "_"))
def _activation_in_place(tensor: Any, *_: Any, **__: Any) -> Any:
    if not are_plain(tensor) or not tensor.is_floating_point() or overlaps(tensor):
        return NotImplemented
    return tensor


@shape_rule(*overloads(_GRADIENTS, "_backward"))
def _gradient(grad: Any, tensor: Any, *_: Any, **__: Any) -> Any:
    if not are_plain(grad, tensor) or not are_alike(grad, tensor) or not grad.is_floating_point():
        return NotImplemented
    return _or_not(elementwise(grad.dtype, grad, tensor))


def _or_not(tensor: Tensor | None) -> Any:
    return NotImplemented if tensor is None else tensor


@shape_rule("aten::threshold_backward", "aten::leaky_relu_backward")
def _gradient_by_input(grad: Any, tensor: Any, *_: Any) -> Any:
    """These kernels read the input before the gradient, so that the input's strides decide (Activation.cpp)."""
    return _gradient(tensor, grad)


@shape_rule("aten::elu_backward")
def _elu_backward(grad: Any, _alpha: Any, _scale: Any, _input_scale: Any, _is_result: Any, tensor: Any) -> Any:
    return _gradient(grad, tensor)


@shape_rule("aten::log_sigmoid_forward")
def _log_sigmoid(tensor: Any) -> Any:
    """CUDA keeps no buffer (Activation.cpp: an empty one)."""
    if not are_plain(tensor) or not tensor.is_floating_point():
        return NotImplemented
    return like(tensor), empty((0,), tensor.dtype)


@shape_rule("aten::log_sigmoid_backward")
def _log_sigmoid_backward(grad: Any, tensor: Any, _buffer: Any) -> Any:
    return _gradient(grad, tensor)


@shape_rule("aten::glu")
def _glu(tensor: Any, dim: int = -1) -> Any:
    if not are_plain(tensor) or not tensor.is_floating_point() or not -tensor.dim() <= dim < tensor.dim():
        return NotImplemented
    if tensor.shape[dim] % 2 or not tensor.is_contiguous():
        return NotImplemented
    shape = list(tensor.shape)
    shape[dim] //= 2
    return empty(shape, tensor.dtype)


@shape_rule("aten::glu_backward")
def _glu_backward(grad: Any, tensor: Any, _dim: int) -> Any:
    """Row-major, whatever the input's layout (cuda/GatedLinearUnit.cpp resizes a new tensor)."""
    if not are_plain(grad, tensor) or not are_alike(grad, tensor):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype) if grad.numel() * 2 == tensor.numel() else NotImplemented


@shape_rule("aten::_prelu_kernel")
def _prelu(tensor: Any, weight: Any) -> Any:
    return _gradient(tensor, weight)


@shape_rule("aten::_prelu_kernel_backward")
def _prelu_backward(grad: Any, tensor: Any, weight: Any) -> Any:
    if not are_plain(grad, tensor, weight) or not are_alike(grad, tensor, weight):
        return NotImplemented
    results = [elementwise(grad.dtype, tensor, weight, grad) for _ in range(2)]
    return NotImplemented if None in results else tuple(results)


@shape_rule("aten::rrelu_with_noise")
def _rrelu(tensor: Any, noise: Any, *_: Any, **__: Any) -> Any:
    return _gradient(tensor, noise)


@shape_rule("aten::rrelu_with_noise_backward")
def _rrelu_backward(grad: Any, tensor: Any, noise: Any, *_: Any, **__: Any) -> Any:
    return _gradient(grad, tensor) if are_plain(noise) and are_alike(grad, noise) else NotImplemented


@shape_rule("aten::native_dropout")
def _dropout(tensor: Any, _probability: float, _train: bool | None) -> Any:
    """The result and a mask of one byte per element (cuda/Dropout.cu)."""
    if not are_plain(tensor) or not tensor.is_floating_point():
        return NotImplemented
    return like(tensor), like(tensor, torch.bool)


@shape_rule("aten::native_dropout_backward")
def _dropout_backward(grad: Any, mask: Any, _scale: float) -> Any:
    if not are_plain(grad, mask) or mask.dtype is not torch.bool or grad.shape != mask.shape:
        return NotImplemented
    return like(grad)
