"""Matrices that are known by their diagonals, at any size: the masks of attention.

`triu` and `tril` of one number make a matrix that is constant along each diagonal (a Toeplitz matrix), and elementwise
ops make others of it. A causal mask of 4,096 positions has 16,777,216 elements and 8,191 diagonals. The last two
dimensions are the matrix; in all others, it repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsize.known_values.op_traits import OpTraits
from memsize.known_values.values import (
    ConstantState,
    constant_of,
    differ,
    entry_of,
    is_large,
    is_small,
    is_uniform,
    set_constant,
    state_of,
)
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import map_tensors, tensors_in


class Toeplitz(NamedTuple):
    """A matrix of `rows` rows: the numbers along its diagonals, from the lower left corner to the upper right."""

    diagonals: Tensor
    rows: int


def diagonals_of(tensor: Tensor) -> Tensor | None:
    """The numbers along the diagonals of a meta `tensor`, in its dtype; None where it is not known by them."""
    entry = entry_of(tensor)
    if entry is None or not isinstance(entry[0], Toeplitz) or not entry[1].valid:
        return None
    diagonals, rows = entry[0]
    if tensor.dim() < 2 or (rows, len(diagonals)) != (tensor.shape[-2], sum(tensor.shape[-2:]) - 1):
        return None  # its data was replaced or resized
    return diagonals.to(tensor.dtype)


def set_diagonals(tensor: Tensor, diagonals: Tensor, state: ConstantState) -> Tensor:
    """Keep the diagonals beside the meta `tensor`, which is returned; of a small one, every element."""
    if is_small(tensor):
        return set_constant(tensor, filled(diagonals, tensor.shape), state)
    return set_constant(tensor, Toeplitz(diagonals, tensor.shape[-2]), state)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, with its constant or its diagonals."""
    result = tensor.to(dtype)
    if result is tensor or not is_meta(tensor):
        return result
    value, diagonals, state = constant_of(tensor), diagonals_of(tensor), state_of(tensor)
    if state is None or (value is None and diagonals is None):
        return result
    own = ConstantState(state.assumption, state.uniform)
    matrix = Toeplitz(diagonals.to(dtype), tensor.shape[-2]) if diagonals is not None else None
    return set_constant(result, matrix if value is None else value.to(dtype), own)


def filled(diagonals: Tensor, shape: torch.Size) -> Tensor:
    """The real tensor of this shape that has these diagonals."""
    return diagonals.unfold(0, shape[-1], 1).flip(0).expand(shape).contiguous()


def diagonals_in(matrix: Tensor) -> Tensor | None:
    """The diagonals of a real matrix (leading dimensions of one element aside); None where one of them varies."""
    if matrix.dim() < 2 or not matrix.numel() or matrix.numel() != matrix.shape[-1] * matrix.shape[-2]:
        return None
    if is_large(matrix):
        return None
    matrix = matrix.reshape(matrix.shape[-2:])
    # Most matrices are no such ones, which their first rows tell.
    for rows in (2, len(matrix)):
        if differ(matrix[1:rows, 1:], matrix[: rows - 1, :-1]):
            return None
    return torch.cat([matrix[:, 0].flip(0), matrix[0, 1:]])


def follow(op: OpTraits, func: Any, args: Any, kwargs: Any, result: Any, state: ConstantState) -> bool:
    """Keep the diagonals of `result`, whose arguments have constants or diagonals; returns whether any follow."""
    if not isinstance(result, Tensor) or not is_meta(result):
        return False
    if op.name in _REDUCTIONS and len(args) == 1:
        diagonals = diagonals_of(args[0])
        if diagonals is not None:
            set_constant(result, func(diagonals), state)
        return diagonals is not None
    diagonals = _followed(op, func, args, kwargs, result) if result.dim() > 1 and result.numel() else None
    if diagonals is not None:
        set_diagonals(result, diagonals, state.for_view() if op.aliases and is_small(result) else state)
    return diagonals is not None


def write(op: OpTraits, func: Any, args: Any, kwargs: Any, state: ConstantState) -> bool:
    """Follow an elementwise write to a large tensor that is one number or has diagonals; returns whether it was such.

    `state` is that of the tensor's memory, of which nothing else is known from here on.
    """
    target = args[0]
    if target.dim() < 2 or is_small(target) or not (op.pointwise or op.name in _WRITTEN_EACH or op.name in _CUTS):
        return False
    diagonals = _followed(op, func, args, kwargs, target)
    state.invalidate()
    if diagonals is not None:
        set_diagonals(target, diagonals, state.for_view())
    return True


def _followed(op: OpTraits, func: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor | None:
    if op.name in _CUTS:
        result_diagonals = _cut(op.name, *args)
    elif op.random:
        return None
    elif op.pointwise or op.name in _EACH or op.name in _WRITTEN_EACH:
        result_diagonals = _elementwise(op, func, args, kwargs, result)
    else:
        move = _MOVES.get(op.name)
        diagonals = None if move is None else diagonals_of(args[0])
        result_diagonals = None if move is None or diagonals is None else move(diagonals, result, *args)
    return None if result_diagonals is None else result_diagonals.to(result.dtype)


def _along(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """`tensor` along the diagonals of a result of this shape: one number for each, or a single one."""
    diagonals = diagonals_of(tensor) if is_meta(tensor) else None
    real = constant_of(tensor) if diagonals is None else None
    if real is not None and real.numel() and is_uniform(real):
        return real.as_strided((1,) * min(real.dim(), 1), (1,) * min(real.dim(), 1), real.storage_offset())
    if tensor.dim() < 2 or tensor.shape[-2:] != shape[-2:]:
        return None
    return diagonals_in(real) if real is not None else diagonals


def _elementwise(op: OpTraits, func: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor | None:
    along: dict[int, Tensor] = {}
    for tensor in tensors_in((args, kwargs)):
        value = _along(tensor, result.shape)
        if value is None:
            return None
        along[id(tensor)] = value
    args, kwargs = map_tensors(lambda tensor: along[id(tensor)], (args, kwargs))
    count = sum(result.shape[-2:]) - 1
    if op.mutates:
        args = (args[0].expand(count).clone(), *args[1:])
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("cpu")}
    with suppress(Exception):  # the CPU's kernel may refuse these values: they are unknown then
        values: Tensor = func(*args, **kwargs)
        return values.expand(count)
    return None


def _cut(name: str, tensor: Tensor, diagonal: int = 0) -> Tensor | None:
    """`triu` keeps the diagonals from this one on, `tril` those up to it; the main diagonal is 0."""
    along = _along(tensor, tensor.shape)
    if along is None:
        return None
    rows, columns = tensor.shape[-2:]
    numbers = torch.arange(1 - rows, columns, device="cpu")
    is_inside = numbers >= diagonal if "triu" in name else numbers <= diagonal
    return torch.where(is_inside, along, torch.zeros((), dtype=along.dtype, device="cpu"))


# -- the same matrices, seen otherwise --------------------------------------------------------------------------------


def _turn(diagonals: Tensor, _: Tensor, source: Tensor, one: int = 0, other: int = 1) -> Tensor | None:
    """`transpose` of both matrix dimensions, or of none."""
    rank = source.dim()
    matrix = {one % rank, other % rank} & {rank - 2, rank - 1}
    return {0: diagonals, 2: diagonals.flip(0)}.get(len(matrix), diagonals if one % rank == other % rank else None)


def _permute(diagonals: Tensor, _: Tensor, source: Tensor, dims: Any) -> Tensor | None:
    last = tuple(dim % source.dim() - source.dim() for dim in dims[-2:])
    return {(-2, -1): diagonals, (-1, -2): diagonals.flip(0)}.get(last)


def _slice(
    diagonals: Tensor, result: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: Any = None,
    step: int = 1,
) -> Tensor | None:  # fmt: skip
    """Neighbouring rows or columns: their diagonals are neighbours too."""
    dim, (rows, columns) = dim % source.dim(), result.shape[-2:]
    if dim < source.dim() - 2:
        return diagonals
    if step != 1:
        return None
    begin = slice(start, end).indices(source.shape[dim])[0]
    first = begin if dim == source.dim() - 1 else source.shape[dim] - rows - begin
    return diagonals[first : first + rows + columns - 1]


_CUTS = frozenset({"aten::triu", "aten::tril", "aten::triu_", "aten::tril_"})
_EACH = frozenset({"aten::_to_copy", "aten::clone"})
_WRITTEN_EACH = frozenset({"aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor", "aten::copy_"})
"""Elementwise ops that PyTorch doesn't tag as such."""
_REDUCTIONS = frozenset({"aten::all", "aten::any", "aten::max", "aten::min"})
_MOVES: dict[str, Callable[..., Tensor | None]] = {
    **dict.fromkeys(
        (
            "aten::alias aten::detach aten::expand aten::lift_fresh aten::repeat aten::squeeze aten::squeeze.dim"
            " aten::squeeze.dims aten::unsqueeze aten::view aten::_unsafe_view"
        ).split(),
        lambda diagonals, result, source, *_: diagonals if result.shape[-2:] == source.shape[-2:] else None,
    ),
    "aten::t": _turn,
    "aten::transpose.int": _turn,
    "aten::permute": _permute,
    "aten::slice.Tensor": _slice,
    "aten::select.int": lambda diagonals, _, source, dim, *__: (
        diagonals if dim % source.dim() < source.dim() - 2 else None
    ),
}
"""Ops that move matrices as wholes, or turn or cut them; what they make of the diagonals."""
