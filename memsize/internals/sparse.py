"""Sparse tensors and the plain ones that they are made of: indices and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

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
    held = getattr(tensor, PARTS[tensor.layout][-1])() if tensor.layout in PARTS else tensor
    return int(held.numel())


def with_parts(
    original: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], shape: torch.Size | None = None
) -> torch.Tensor:
    """`original`, in another `shape` if one is given, rebuilt of what `function` makes of each of its parts.

    Moved to `meta` as a whole, a sparse tensor would forget how many elements it has.
    """
    shape = original.shape if shape is None else shape
    parts = [function(getattr(original, name)()) for name in PARTS[original.layout]]
    options: dict[str, Any] = {"device": parts[-1].device, "check_invariants": False}
    make: Any = torch.sparse_coo_tensor if original.layout is torch.sparse_coo else torch.sparse_compressed_tensor
    if original.layout is torch.sparse_coo:
        options["is_coalesced"] = original.is_coalesced()
    else:
        options["layout"] = original.layout
    rebuilt: torch.Tensor = make(*parts, shape, **options)
    return rebuilt
