"""New tensors like others, copies, ranges, and tensors of zeros that a backward fills in part."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from memsize.meta_kernels.registry import overloads, shape_rule
from memsize.meta_kernels.tensors import META, Tensor, are_plain, empty, formatted, like, overlaps


@shape_rule(*overloads("empty_like zeros_like ones_like full_like rand_like randn_like randint_like bernoulli"))
def _made_like(
    tensor: Any, *_: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None, generator: Any = None,
) -> Any:  # fmt: skip
    if not are_plain(tensor) or (layout, pin_memory) not in ((None, None), (torch.strided, None), (None, False)):
        return NotImplemented
    if device is not None and torch.device(device) != META:
        return NotImplemented
    return _in_format(tensor, dtype or tensor.dtype, memory_format)


def _in_format(tensor: Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None) -> Any:
    if dtype.is_complex:
        return NotImplemented
    if memory_format is None or memory_format is torch.preserve_format:
        return like(tensor, dtype)
    if memory_format is torch.contiguous_format:
        return empty(tensor.shape, dtype)
    rank = 4 if memory_format is torch.channels_last else 5
    return formatted(tensor.shape, dtype, channels_last=True) if tensor.dim() == rank else NotImplemented


@shape_rule("aten::clone")
def _clone(tensor: Any, *, memory_format: Any = None) -> Any:
    return _in_format(tensor, tensor.dtype, memory_format) if are_plain(tensor) else NotImplemented


@shape_rule("aten::_to_copy")
def _to_copy(
    tensor: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Any:  # fmt: skip
    return _made_like(
        tensor, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory, memory_format=memory_format
    )


@shape_rule(*overloads("normal_ uniform_ exponential_"))
def _filled_with_chance(tensor: Any, *_: Any, **__: Any) -> Any:
    """In place, without drawing: initialisers run on `meta` parameters too."""
    return tensor if are_plain(tensor) and tensor.is_floating_point() and not overlaps(tensor) else NotImplemented


@shape_rule("aten::slice_backward", "aten::select_backward", "aten::diagonal_backward", "aten::unfold_backward")
def _padded_gradient(grad: Any, shape: Any, *_: Any) -> Any:
    """Row-major zeros of the whole input, of which the gradient fills a part (FunctionsManual.cpp)."""
    return empty(shape, grad.dtype) if are_plain(grad) else NotImplemented


@shape_rule("aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty")
def _new(
    tensor: Any, shape: Any, *_: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    dtype = dtype or tensor.dtype
    if not are_plain(tensor) or dtype.is_complex or layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    if min(shape, default=0) < 0 or (device is not None and torch.device(device) != META):
        return NotImplemented
    return empty(shape, dtype)


def range_length(start: float, end: float, step: float) -> int | None:
    """How many values ``start, start + step, …`` lie before `end`; None where the step leads away from it."""
    if step == 0 or (end - start) / step < 0:
        return None
    return ceil((end - start) / step)


@shape_rule("aten::arange")
def _arange(end: Any, **options: Any) -> Any:
    return _arange_step(0, end, 1, **options)


@shape_rule("aten::arange.start")
def _arange_start(start: Any, end: Any, **options: Any) -> Any:
    return _arange_step(start, end, 1, **options)


@shape_rule("aten::arange.start_step")
def _arange_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Whole numbers only: floating ranges round, and PyTorch's kernel knows how."""
    if device is None or torch.device(device) != META or not all(isinstance(n, int) for n in (start, end, step)):
        return NotImplemented
    length = range_length(start, end, step)
    return NotImplemented if length is None else empty((length,), dtype or torch.int64)


@shape_rule("aten::repeat")
def _repeat(tensor: Any, times: Any) -> Any:
    """Row-major; extra counts come in front."""
    extra = len(times) - tensor.dim()
    if not are_plain(tensor) or extra < 0 or min(times, default=0) < 0:
        return NotImplemented
    sizes = (*(1 for _ in range(extra)), *tensor.shape)
    return empty([size * count for size, count in zip(sizes, times, strict=True)], tensor.dtype)


@shape_rule("aten::flip", "aten::roll")
def _moved(tensor: Any, *dims: Any) -> Any:
    """Like the input (TensorTransformations.cpp: `at::empty_like`)."""
    listed = dims[-1] if dims else ()
    if not are_plain(tensor) or not all(-tensor.dim() <= dim < tensor.dim() for dim in listed):
        return NotImplemented
    if len(dims) == 2 and len(dims[0]) != len(listed) and (listed or len(dims[0]) != 1):
        return NotImplemented
    return like(tensor)


@shape_rule("aten::tril", "aten::triu")
def _triangle(tensor: Any, _diagonal: int = 0) -> Any:
    """Row-major (structured kernel, TriangularOps.cpp)."""
    return empty(tensor.shape, tensor.dtype) if are_plain(tensor) and tensor.dim() >= 2 else NotImplemented
