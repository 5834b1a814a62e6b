"""Values of gathered, exchanged or reduced tensors, if each rank sends the same as this one.

Programs read some of these values. Mixture-of-experts layers first exchange the number of tokens for each expert, which
decides the size of the tensors exchanged next. Whether any rank has an infinite gradient decides whether the optimizer
makes a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from memsize.known_values.values import constant_of, is_small
from memsize.records.world import CollectiveKind
from memsize.torch_internals.meta import is_meta

_Value = Tensor | None
_PARTED: Final = ("all-to-all", "scatter", "reduce-scatter")
"""Collectives that give each rank only its own part of the tensors sent."""
_REDUCING: Final = ("all-reduce", "reduce", "reduce-scatter")
_OF_EQUALS: Final = ("min", "max", "avg", "band", "bor")
"""Reductions whose result equals the input if all ranks send the same."""


def received(
    kind: CollectiveKind | None,
    written: Sequence[Tensor],
    sent: Sequence[Tensor],
    splits: Any,
    reduction: str,
    group: dist.ProcessGroup,
) -> Iterator[tuple[Tensor, _Value]]:
    """Yield each tensor that a collective writes with its values, or with `None` if they are unknown.

    `sent` are the tensors that this rank sends. `splits` may contain lists with the number of rows for each rank.
    `reduction` is PyTorch's name of the reduction, for collectives that reduce.
    """
    values = _values(kind)
    for position, output in enumerate(written):
        is_read = bool(sent) and (not is_meta(output) or is_small(output))
        value = values(position, output, sent, splits, group) if is_read else None
        yield output, _reduced(value, reduction, group.size()) if kind in _REDUCING and value is not None else value


def _values(kind: CollectiveKind | None) -> Callable[..., _Value]:
    if kind in ("all-gather", "gather"):
        return _gathered
    if kind in ("all-reduce", "reduce", "broadcast"):
        return _same
    return _part if kind in _PARTED else lambda *_: None


def _same(position: int, output: Tensor, sent: Sequence[Tensor], *_: Any) -> _Value:
    return constant_of(sent[position])


def _reduced(value: Tensor, reduction: str, size: int) -> _Value:
    """Reduce a `value` that each of `size` ranks has."""
    if reduction in _OF_EQUALS:
        return value
    if reduction == "bxor":
        return value if size % 2 else torch.zeros_like(value)
    if reduction not in ("sum", "product") or (value.dtype.itemsize == 1 and value.is_floating_point()):
        return None  # one that multiplies before, or a dtype that the CPU cannot reckon with
    return (value * size if reduction == "sum" else value**size).to(value.dtype)


def _gathered(position: int, output: Tensor, sent: Sequence[Tensor], *_: Any) -> _Value:
    """Return the values of a gathered tensor. If several are gathered at once, `position` counts rank by rank."""
    return _repeated(constant_of(sent[position % len(sent)]), output)


def _part(position: int, output: Tensor, sent: Sequence[Tensor], splits: Any, group: dist.ProcessGroup) -> _Value:
    """Return this rank's part: a tensor of its own, or an equal share of one's rows; `None` if unknown or unequal."""
    rank, size = group.rank(), group.size()
    whole = sent[position % len(sent)]
    if len(sent) > 1 and whole.numel() != size * output.numel():
        return _repeated(constant_of(sent[rank]) if len(sent) == size else None, output)
    rows, sizes = constant_of(whole), [lengths for lengths in splits if isinstance(lengths, (list, tuple))]
    if rows is None or not rows.dim() or len(rows) % size or any(len(set(lengths)) > 1 for lengths in sizes):
        return None
    return _repeated(rows.chunk(size)[rank], output)


def _repeated(value: _Value, output: Tensor) -> _Value:
    """Repeat `value` to fill `output`; `None` if `value` is unknown or `output` is no multiple of its size."""
    if value is None or not value.numel() or output.numel() % value.numel():
        return None
    return value.reshape(-1).repeat(output.numel() // value.numel()).reshape(output.shape)
