"""Ops with a data-dependent output shape: exact where their argument is a constant, an upper bound where it is data.

The bound is the worst case of a detector's thresholds and a model's masks; the assumption behind it is shown.

Assumptions stand where only real data could tell, in the words that a report shows. Each is the least surprising one
for memory: finite numbers, balanced routing, conditions that hold. It is shown only when a decision of the model relied
on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch

from memsize.known_values.values import (
    MAX_ASSUMED_ELEMENTS,
    ConstantState,
    constant_of,
    is_small,
    is_uniform,
    set_constant,
    state_of,
    true_share_of,
)
from memsize.processes.simulation import open_simulation, running_part
from memsize.processes.user_code import running_line
from memsize.torch_internals.sparse_tensors import in_coordinates, is_in_coordinates, places

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
Rely = Callable[[str | None], None]
"""Called with each assumption on which a result rests."""
DataDependentOp = Callable[..., Any]
"""Takes `Rely` and an op's own arguments; returns the op's result on `meta`, or NotImplemented to leave the op to
PyTorch.
"""


@cache
def data_dependent_ops() -> Mapping[str, DataDependentOp]:
    """The ops by the name of their overload: by name, since torchvision may not be installed."""
    return {
        "aten::nonzero": _nonzero,
        "aten::index.Tensor": _index,
        "aten::masked_select": _masked_select,
        "aten::_unique2": lambda rely, tensor, _sorted=True, *flags: _unique(rely, tensor, *flags),
        "aten::unique_dim": lambda rely, tensor, dim, _sorted=True, inverse=False, counts=False: _unique(
            rely, tensor, inverse, counts, dim
        ),
        "aten::unique_consecutive": _unique,
        "aten::bincount": _bincount,
        "torchvision::nms": _nms,
    }


@cache
def sparse_ops() -> Mapping[str, DataDependentOp]:
    """Ops where only the number of elements of a sparse tensor depends on the data; the rest is left to PyTorch."""
    return {
        "aten::_coalesce": _coalesce,
        "aten::norm.ScalarOpt_dim": _norm,
        "aten::_embedding_bag_backward": _embedding_bag_backward,
    }


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _count(rely: Rely, mask: torch.Tensor) -> int | None:
    """How many elements of a mask are True; None where the constant has to be looked at element by element."""
    real, share = constant_of(mask), true_share_of(mask)
    if real is None and share is None:
        rely(ALL_SELECTED)
        return mask.numel()
    rely(first_assumption([state_of(mask)]))
    if real is None or share is not None:
        return round(mask.numel() * (share or 0))
    if is_uniform(real) and real.numel():
        return real.numel() if bool(real.flatten()[0]) else 0
    return None


def _nonzero(rely: Rely, mask: torch.Tensor) -> torch.Tensor:
    """Column by column, as CUDA's kernel writes it (cuda/Nonzero.cu)."""
    count = _count(rely, mask)
    real = constant_of(mask)
    assumed = ALL_SELECTED if real is None else first_assumption([state_of(mask)])
    if count is None or (count == mask.numel() and is_small(mask)):
        places = (torch.ones(mask.shape, dtype=torch.bool) if real is None else real).nonzero()
        return set_constant(_meta(mask.dim(), len(places)).t(), places, ConstantState(assumed))
    return _meta(mask.dim(), count).t()


def _index(rely: Rely, tensor: torch.Tensor, indices: Any) -> Any:
    """A mask selects like the indices of its True elements."""
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return NotImplemented
    places: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        places += [_meta(len(column)) for column in _nonzero(rely, index).unbind(1)] if is_mask else [index]
    return _aten.index.Tensor(tensor, places)


def _masked_select(rely: Rely, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    count = _count(rely, mask)
    repeats = math.prod(shape) // max(mask.numel(), 1)
    if count is None:
        real = constant_of(mask)
        assert real is not None  # else `_count` is not None
        count = int(real.count_nonzero())
    return _meta(count * repeats, dtype=tensor.dtype)


def _unique(
    rely: Rely, tensor: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> Any:
    """The values of data are assumed to be all different."""
    if constant_of(tensor) is not None:
        return NotImplemented
    rely(ALL_SELECTED)
    size = tensor.numel() if dim is None else tensor.shape[dim]
    values = _meta(size, dtype=tensor.dtype) if dim is None else torch.empty_like(tensor)
    inverses = _meta(*(tensor.shape if dim is None else (size,))) if inverse else _meta(0)
    return values, inverses, _meta(size if counts else 0)


def _bincount(rely: Rely, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Each number below `minlength` is assumed to occur equally often in data."""
    if constant_of(tensor) is not None or not minlength:
        return NotImplemented
    counts = _meta(minlength, dtype=torch.int64 if weights is None else torch.float64)
    if weights is None and minlength <= MAX_ASSUMED_ELEMENTS:
        few, more = divmod(tensor.numel(), minlength)
        even = torch.tensor([few + (index < more) for index in range(minlength)], device="cpu")
        set_constant(counts, even, ConstantState(BALANCED))
    rely(BALANCED)
    return counts


def _coalesce(rely: Rely, tensor: torch.Tensor) -> torch.Tensor:
    """Elements with equal indices are added up. CUDA sorts a copy of the indices and then shortens it, and makes the
    values when it knows how many there are (sparse/cuda/SparseCUDATensor.cu)."""
    elements = tensor._nnz()
    count = min(elements, places(tensor))
    if elements > 1:
        rely(ALL_DISTINCT)
    dims, values = tensor.sparse_dim(), tensor._values()
    indices = _meta(1, elements)[:, :count] if dims == 1 else _meta(dims, count)
    return in_coordinates(indices, _meta(count, *values.shape[1:], dtype=values.dtype), tensor.shape, is_coalesced=True)


def _norm(rely: Rely, tensor: torch.Tensor, _order: Any, dims: Any, keepdim: bool = False) -> Any:
    """The norm is that of all values, equal indices added up before (sparse/SparseTensorMath.cpp, `norm_sparse`)."""
    whole = not dims or sorted(dim % tensor.dim() for dim in dims) == list(range(tensor.dim()))
    if not is_in_coordinates(tensor) or keepdim or not whole:
        return NotImplemented
    if not tensor.is_coalesced() and tensor._nnz() > 1:
        rely(ALL_DISTINCT)
    return _meta(dtype=tensor.dtype)


def _embedding_bag_backward(
    rely: Rely, grad: torch.Tensor, indices: torch.Tensor, _offsets: Any, _places: Any, _sizes: Any, _largest: Any,
    rows: int, by_frequency: bool, _mode: int, sparse: bool, _weights: Any, padding: int = -1,
) -> Any:  # fmt: skip
    """A sparse gradient leaves the padding out (aten/src/ATen/native/Embedding.cpp, `embedding_sparse_backward`)."""
    if not sparse or by_frequency or padding == -1:
        return NotImplemented
    real = constant_of(indices)
    rely(ALL_SELECTED if real is None else first_assumption([state_of(indices)]))
    count = indices.numel() if real is None else int((real != padding).count_nonzero())
    width = grad.shape[1]
    return in_coordinates(_meta(1, count), _meta(count, width, dtype=grad.dtype), torch.Size((rows, width)))


def _nms(rely: Rely, boxes: torch.Tensor, scores: torch.Tensor, _threshold: float) -> Any:
    """No box is suppressed, since they do not overlap. Known boxes need torchvision's compiled part."""
    is_constant = constant_of(boxes) is not None and constant_of(scores) is not None
    if is_constant and torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU"):
        return NotImplemented
    rely(ALL_SELECTED)
    chosen = _meta(len(boxes))
    if not is_small(chosen):
        return chosen
    return set_constant(chosen, torch.arange(len(boxes)), ConstantState(ALL_SELECTED))


ALL_FINITE = "every value is finite (isnan and isinf are False)"
NOT_EQUAL = "no data-dependent value equals a given number (x == 0 is False): nothing is padded with it"
ALL_SELECTED = (
    "a selection by data-dependent values (a boolean index, nonzero, nms) keeps every element, the worst case"
)
ALL_DISTINCT = (
    "the indices of a sparse tensor, such as the rows of a table that get a gradient, are all different, the worst case"
)
MASKS_COVER_IMAGE = "masks that a detector pastes cover the whole image, the worst case"
COMPARED_EQUAL = "two tensors that the model compares as a whole (torch.equal, torch.allclose) are equal"
CHECKS_PASS = "PyTorch's own checks pass (such as that istft's windows add up to something)"
FIXED_DRAW = "random numbers that decide the model's path are one fixed draw"
ITEM_IS_ONE = "a number read from an activation (.item()) is assumed to be 1.0"
REDUCED_IS_ONE = "a number that ranks reduce or exchange on the GPU is assumed to be 1.0 where the program reads it"
EXCHANGED_ARE_ALIKE = "other ranks are assumed to send what this rank sends"
PADDING_COMPUTED = "the encoder also computes padding: PyTorch's nested tensors, which skip it, are not simulated"
COPIED_VALUES = "values that the model copies to the CPU are assumed to be 1.0, integers 0, conditions true"

MIXED_DEVICES = "the forward makes a tensor on the CPU and mixes it with the model's; on a GPU that line fails"
CPU_AUTOCAST = 'the model opens torch.autocast("cpu"), which casts nothing on a GPU: dtypes inside it stay as they are'
UNCOMPILED = "torch.compile is ignored for some code, which runs eagerly: compiled, it may need less memory, or more"
"""Not assumptions but notes."""


def mixed_devices() -> str:
    """The note, with the line, on what runs here and on a CPU but would not run as it is on a GPU."""
    line = running_line()
    return f"{MIXED_DEVICES}: {line}" if line else MIXED_DEVICES


def first_assumption(states: Sequence[ConstantState | None]) -> str | None:
    return next((state.assumption for state in states if state is not None and state.assumption), None)


def compared_with_number(op: str, number: Any) -> tuple[bool, str] | None:
    """How data compares with a number, and the assumption behind the answer; None where nothing is assumed."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if isinstance(number, float) and math.isinf(number):
        is_less = op in ("lt", "le")
        return (op == "ne" if op in ("eq", "ne") else is_less is (number > 0)), ALL_FINITE
    return (op == "ne", NOT_EQUAL) if op in ("eq", "ne") else None


def compared_with_zero(op: str, number: Any) -> bool | None:
    """How one number of the data, which is taken to be 1.0 where it is read, compares with 0; None for any other."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number:
        return None
    return {"lt": False, "le": False, "gt": True, "ge": True}.get(op)


# -- choices by activations, such as a router's of experts -------------------------------------------------------------


BALANCED: Final = (
    "choices by activations (top-k, argmax, sort) are assumed balanced: a router sends every expert the same share"
)


@dataclass(frozen=True, slots=True)
class Routing:
    """How unevenly choices fall. The busiest of `groups` of equal size is the one at `position`; without a number of
    groups, each choice is one.
    """

    imbalance: float = 1.0
    groups: int | None = None
    position: int = 0

    @property
    def assumption(self) -> str:
        if self.imbalance == 1:
            return BALANCED
        busiest = "each expert of the busiest GPU" if self.groups else "the busiest expert"
        return (
            f"choices by activations (top-k, argmax, sort) are assumed imbalanced: a router sends {busiest} "
            f"{self.imbalance:g} times the mean, if there are that many tokens"
        )

    def counts(self, rows: int, each_row: int, choices: int) -> torch.Tensor:
        """How often each of `choices` is made in `rows` rows, each of which makes `each_row` different choices."""
        groups = self.groups if self.groups and choices % self.groups == 0 else choices
        size = choices // groups
        factor = min(self.imbalance, choices / each_row, groups)  # a row makes a choice at most once
        busy = min(int(factor * rows * each_row / choices), rows)
        rest = rows * each_row - busy * size
        few, more = divmod(rest, max(choices - size, 1))
        others = torch.full((choices - size,), few, device="cpu")
        others[:more] += 1
        start = self.position % groups * size
        return torch.cat((others[:start], torch.full((size,), busy, device="cpu"), others[start:]))


@contextmanager
def imbalanced(imbalance: float | None = None, groups: int | None = None, position: int = 0) -> Iterator[None]:
    """While open, choices fall by this `imbalance` (None: as before), within these groups."""
    with open_simulation() as simulation:
        changed = replace(running_part(Routing), groups=groups, position=position)
        with simulation.with_part(Routing, changed if imbalance is None else replace(changed, imbalance=imbalance)):
            yield


def spread_choices(indices: torch.Tensor, dim: int | None, choices: int) -> None:
    """Set the unknown `indices` of `choices` along `dim` (None: one in each row), distinct within a row.

    Evenly, row ``r`` takes ``r·k, r·k + 1, …, r·k + k - 1`` modulo `choices`.
    """
    if not 0 < indices.numel() <= MAX_ASSUMED_ELEMENTS or not choices:
        return
    routing = running_part(Routing)
    each_row = indices.shape[dim] if dim is not None and indices.dim() else 1
    rows = indices.numel() // each_row
    if routing.imbalance == 1 or each_row >= choices or routing.groups == 1:
        flat = torch.arange(indices.numel(), dtype=indices.dtype, device="cpu") % choices
    else:  # a choice that is made at most once a row is made in rows that follow each other
        counts = routing.counts(rows, each_row, choices)
        by_choice = torch.arange(choices, dtype=indices.dtype, device="cpu").repeat_interleave(counts)
        flat = by_choice.view(each_row, rows).t().reshape(-1)
    if dim is None or not indices.dim():
        values = flat.view(indices.shape)
    else:
        dim %= indices.dim()
        others = [size for position, size in enumerate(indices.shape) if position != dim]
        values = flat.view(*others, indices.shape[dim]).movedim(-1, dim).contiguous()
    set_constant(indices, values, ConstantState(routing.assumption))
