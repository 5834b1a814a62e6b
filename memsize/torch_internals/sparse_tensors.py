"""Sparse tensors and the plain ones that they are made of: indices and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch

from memsize.torch_internals.meta import is_meta

PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Sparse layouts, and the methods that return their component tensors; the last one is that of the values."""


def stored_elements(tensor: torch.Tensor) -> int:
    """How many elements `tensor` holds, with the zeros that it holds."""
    part = getattr(tensor, PARTS[tensor.layout][-1])() if tensor.layout in PARTS else tensor
    return int(part.numel())


def is_in_coordinates(value: Any) -> bool:
    """Whether `value` is a sparse `meta` tensor in coordinates (COO), as sparse gradients are."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and is_meta(value)


def parts_of(args: Sequence[Any]) -> list[torch.Tensor]:
    """The indices and values of what an op may write to: its first argument, or each of a list."""
    parts: list[torch.Tensor] = []
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
            parts += (tensor._indices(), tensor._values())
    return parts


def places(tensor: torch.Tensor) -> int:
    """How many different indices a tensor in coordinates can have."""
    return prod(tensor.shape[: tensor.sparse_dim()])


def in_coordinates(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool = False
) -> torch.Tensor:
    """The tensor of these parts, which it shares; nothing is checked."""
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=is_coalesced, check_invariants=False
    )


def with_parts(
    original: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], shape: torch.Size | None = None
) -> torch.Tensor:
    """`original`, in another `shape` on demand, rebuilt of what `function` makes of each of its parts."""
    shape = original.shape if shape is None else shape
    parts = [function(getattr(original, name)()) for name in PARTS[original.layout]]
    if original.layout is torch.sparse_coo:
        return in_coordinates(parts[0], parts[1], shape, original.is_coalesced())
    make: Any = torch.sparse_compressed_tensor
    rebuilt: torch.Tensor = make(*parts, shape, device=parts[-1].device, layout=original.layout, check_invariants=False)
    return rebuilt


def zeros_in_coordinates(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU, as many and as wide as the elements of `tensor`, at indices that differ as far as they can."""
    values = torch.zeros(tensor._values().shape, dtype=tensor.dtype, device="cpu")
    flat = torch.arange(len(values), device="cpu") % max(places(tensor), 1)
    indices = torch.stack(torch.unravel_index(flat, tensor.shape[: tensor.sparse_dim()]))
    return in_coordinates(indices, values, tensor.shape, tensor.is_coalesced())
