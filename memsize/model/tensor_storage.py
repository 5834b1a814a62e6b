"""One tensor taken apart: its plain pieces, and the bytes that they span.

A tensor is taken apart until plain memory is left: a wrapper subclass into its inner tensors, a sparse tensor into
indices and values, a quantized one into data, scales and zero points.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memsize.records.byte_ownership import Extent, strided_extent
from memsize.records.trace import TensorSpec
from memsize.torch_internals.sparse_tensors import PARTS

PLAIN_TYPES = (torch.Tensor, nn.Parameter)
"""The classes of tensors that wrap no others."""
_BITSANDBYTES = ("quant_state", "CB", "SCB")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without the prefix, as records have it: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The dtype and shape of a tensor, as records have them."""
    sizes = tuple(_size(tensor, dim) for dim in range(tensor.dim())) if tensor.is_nested else tuple(tensor.shape)
    return TensorSpec(dtype_name(tensor.dtype), sizes)


def _size(nested: torch.Tensor, dim: int) -> int | None:
    """None where the parts differ: a symbol in the jagged layout, and an error in the strided one."""
    try:
        size = nested.size(dim)
    except RuntimeError:
        return None
    return size if isinstance(size, int) else None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor as its storage's record has it: of a nested one the number of elements."""
    return (int(tensor.numel()),) if tensor.is_nested else tuple(tensor.shape)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes that `tensor` keeps in memory: its whole storages, each counted once, whatever its dtype says."""
    return sum({extent.storage: extent.total for extent in map(extent_of, plain_tensors(tensor))}.values())


def storage_key(tensor: torch.Tensor) -> Hashable:
    """The identity of `tensor`'s memory: equal for tensors that share it, while one of them is alive.

    The storage's `_cdata` for a plain tensor, on `meta` too; a tuple of those for a tensor made of several.
    """
    keys = tuple(extent.storage for extent in map(extent_of, plain_tensors(tensor)))
    return keys[0] if len(keys) == 1 else keys


def wrapper_name(tensor: torch.Tensor) -> str | None:
    """``"torchao Int8Tensor"`` for a tensor that keeps its values in other tensors, None for any other."""
    if type(tensor) in PLAIN_TYPES:
        return None
    if not (is_wrapper(tensor) or any(vars(tensor).get(name) is not None for name in _BITSANDBYTES)):
        return None
    return f"{type(tensor).__module__.split('.')[0]} {type(tensor).__name__}"


# Taking a tensor apart


def pieces(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold `tensor`'s memory, by name; a plain tensor is its own single piece.

    Nothing for a lazy parameter that is not initialised. A nested tensor counts as its buffer.
    """
    if is_simple(tensor):
        yield name, tensor
        return
    if is_lazy(tensor):
        return
    for inner, value in _inner(tensor):
        full = f"{name}.{inner}" if name and inner else name or inner
        if value is tensor:
            yield full, tensor
        else:
            yield from pieces(value, full)
    yield from _bitsandbytes(tensor, name)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`pieces` without their names."""
    return [tensor] if is_simple(tensor) else [piece for _, piece in pieces(tensor)]


def is_simple(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is its own single piece, as nearly all are; decided cheaply."""
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


def _inner(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if is_wrapper(tensor):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        values = ((name, getattr(tensor, name)) for name in names)
        yield from ((name, value) for name, value in values if isinstance(value, torch.Tensor))  # not DTensor's mesh
    elif tensor.layout in PARTS:
        yield from ((name.removeprefix("_"), getattr(tensor, name)()) for name in PARTS[tensor.layout])
    elif tensor.is_quantized and tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield "", tensor
        yield "scales", tensor.q_per_channel_scales()
        yield "zero_points", tensor.q_per_channel_zero_points()
    else:
        yield "", tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the class of `tensor` keeps its values in other tensors."""
    return type(tensor) not in PLAIN_TYPES and hasattr(tensor, "__tensor_flatten__")


def _bitsandbytes(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that bitsandbytes attaches: `SCB`, `CB` unless it is the data, parts of its `quant_state`."""
    if type(tensor) in PLAIN_TYPES:
        return
    for key in _BITSANDBYTES:
        for full, value in _state_tensors(vars(tensor).get(key), f"{name}.{key}" if name else key):
            if key != "CB" or extent_of(value) != extent_of(tensor):
                yield full, value


def _state_tensors(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif state is not None:
        for key in ("absmax", "code", "offset", "state2"):
            yield from _state_tensors(getattr(state, key, None), f"{name}.{key}")


# Extents of memory


def extent_of(tensor: torch.Tensor) -> Extent:
    """The bytes that a plain tensor spans of its storage. Bytes in the gaps between its elements count as needed."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque memory, such as MKL-DNN's: PyTorch shows no storage
        return _whole(("opaque", id(tensor)), tensor.numel() * tensor.element_size())
    total, item = storage.nbytes(), tensor.element_size()
    fills = total == tensor.numel() * item > 0 and tensor.is_contiguous()
    if tensor.is_nested or tensor.is_quantized or fills:
        return _whole(storage._cdata, total)
    span, _ = strided_extent(tensor.shape, tensor.stride(), 8 * item)
    start = int(tensor.storage_offset()) * item if span else 0
    end = min(start + int(span), total)
    return Extent(storage._cdata, start, end, total, end - start)


def _whole(storage: Hashable, total: int) -> Extent:
    return Extent(storage, 0, total, total, total)
