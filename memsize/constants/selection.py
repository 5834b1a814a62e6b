"""Ops whose output's shape depends on values: exact where these are known, as large as it can be where not.

The upper bound is what a detector's thresholds and a model's own masks amount to at worst; the assumption is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memsize.constants.assumptions import EVEN, KEEPS, assumed_of, even_counts
from memsize.constants.known import ASSUMED_ELEMENTS, Cell, cell_of, is_small, is_uniform, known, remember, share_of

_aten = torch.ops.aten
_TRUTH = (torch.bool, torch.uint8)
Rely = Callable[[str | None], None]
"""Told of each assumption that an answer rests on."""
Selection = Callable[..., Any]
"""Takes `Rely` and an op's own arguments; returns what the op would, or NotImplemented where it can't tell."""


def selections() -> Mapping[str, Selection]:
    """Every such op by the name of its overload."""
    return {
        "aten::nonzero": _nonzero,
        "aten::index.Tensor": _index,
        "aten::masked_select": _masked_select,
        "aten::_unique2": _unique,
        "aten::unique_dim": _unique_dim,
        "aten::unique_consecutive": _unique_consecutive,
        "aten::bincount": _bincount,
        "torchvision::nms": _nms,
    }


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _count(rely: Rely, mask: torch.Tensor) -> int | None:
    """How many elements of a large mask are true, None where its values should be looked at one by one."""
    real, share = known(mask), share_of(mask)
    if real is None and share is None:
        rely(KEEPS)
        return mask.numel()
    rely(assumed_of([cell_of(mask)]))
    if real is None or share is not None:
        return round(mask.numel() * (share or 0))
    if is_uniform(real) and real.numel():
        return real.numel() if bool(real.flatten()[0]) else 0
    return None


def _nonzero(rely: Rely, mask: torch.Tensor) -> torch.Tensor:
    """Column by column, as CUDA's kernel writes it (cuda/Nonzero.cu)."""
    count = _count(rely, mask)
    real = known(mask)
    assumed = KEEPS if real is None else assumed_of([cell_of(mask)])
    if count is None or (count == mask.numel() and is_small(mask)):
        places = (torch.ones(mask.shape, dtype=torch.bool) if real is None else real).nonzero()
        return remember(_meta(mask.dim(), len(places)).t(), places, Cell(assumed))
    return _meta(mask.dim(), count).t()


def _index(rely: Rely, tensor: torch.Tensor, indices: Any) -> Any:
    """Truth values select like the places where they are true."""
    if not any(index is not None and index.dtype in _TRUTH for index in indices):
        return NotImplemented
    places: list[Any] = []
    for index in indices:
        truth = index is not None and index.dtype in _TRUTH
        places += [_column(rows) for rows in _nonzero(rely, index).unbind(1)] if truth else [index]
    return _aten.index.Tensor(tensor, places)


def _column(places: torch.Tensor) -> torch.Tensor:
    return torch.empty(places.shape, dtype=places.dtype, device="meta")


def _masked_select(rely: Rely, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    count = _count(rely, mask)
    repeats = math.prod(shape) // max(mask.numel(), 1)
    if count is None:
        count = int(_real(mask).count_nonzero())
    return _meta(count * repeats, dtype=tensor.dtype)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    real = known(tensor)
    assert real is not None  # asked only of what is known
    return real


def _unknown(rely: Rely, tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` are unknown; then every one is taken for another."""
    if known(tensor) is not None:
        return False
    rely(KEEPS)
    return True


def _unique(rely: Rely, tensor: torch.Tensor, _sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    if not _unknown(rely, tensor):
        return NotImplemented
    size = tensor.numel()
    places = torch.empty(tensor.shape if inverse else (0,), dtype=torch.int64, device="meta")
    return _meta(size, dtype=tensor.dtype), places, _meta(size if counts else 0)


def _unique_dim(
    rely: Rely, tensor: torch.Tensor, dim: int, _sorted: bool = True, inverse: bool = False, counts: bool = False
) -> Any:
    if not _unknown(rely, tensor):
        return NotImplemented
    size = tensor.shape[dim]
    return torch.empty_like(tensor), _meta(size if inverse else 0), _meta(size if counts else 0)


def _unique_consecutive(
    rely: Rely, tensor: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> Any:
    if dim is None:
        return _unique(rely, tensor, True, inverse, counts)
    return _unique_dim(rely, tensor, dim, True, inverse, counts)


def _bincount(rely: Rely, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Without their values the whole numbers are taken to lie below `minlength`, equally often each."""
    if known(tensor) is not None or not minlength:
        return NotImplemented
    counts = _meta(minlength, dtype=torch.int64 if weights is None else torch.float64)
    if weights is None and minlength <= ASSUMED_ELEMENTS:
        remember(counts, even_counts(tensor.numel(), minlength), Cell(EVEN))
    rely(EVEN)
    return counts


def _nms(rely: Rely, boxes: torch.Tensor, scores: torch.Tensor, _threshold: float) -> Any:
    """Non-maximum suppression (torchvision) of boxes that do not overlap: none is suppressed."""
    if known(boxes) is not None and known(scores) is not None:
        return NotImplemented
    rely(KEEPS)
    kept = _meta(len(boxes))
    return remember(kept, torch.arange(len(boxes)), Cell(KEEPS)) if is_small(kept) else kept
