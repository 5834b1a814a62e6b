"""Values of gathered, exchanged or reduced tensors, if each rank sends the same as this one.

Code reads some of them. How many tokens each expert gets of each rank is exchanged before the tokens are, and decides
how large they are; whether any rank found an infinite gradient decides whether a step is made.
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
"""The collectives of which each rank gets its part of what the others send."""
_REDUCING: Final = ("all-reduce", "reduce", "reduce-scatter")
_OF_EQUALS: Final = ("min", "max", "avg", "band", "bor")
"""The reductions whose result is what each rank sent, where they all sent the same."""


def received(
    kind: CollectiveKind | None,
    written: Sequence[Tensor],
    sent: Sequence[Tensor],
    splits: Any,
    reduction: str,
    group: dist.ProcessGroup,
) -> Iterator[tuple[Tensor, _Value]]:
    """Each of the tensors that a collective writes, with its values; None where they are not known.

    `sent` is what this rank gives, `splits` may have lists of the rows that go to each rank, and `reduction` is what
    PyTorch calls the operation by which a collective reduces, if it does.
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
    """Of several that are gathered at once, each rank's are listed together."""
    return _repeated(constant_of(sent[position % len(sent)]), output)


def _part(position: int, output: Tensor, sent: Sequence[Tensor], splits: Any, group: dist.ProcessGroup) -> _Value:
    """The part of this rank: a tensor of its own, or an equal share of one's rows."""
    rank, size = group.rank(), group.size()
    whole = sent[position % len(sent)]
    if len(sent) > 1 and whole.numel() != size * output.numel():
        return _repeated(constant_of(sent[rank]) if len(sent) == size else None, output)
    rows, sizes = constant_of(whole), [lengths for lengths in splits if isinstance(lengths, (list, tuple))]
    if rows is None or not rows.dim() or len(rows) % size or any(len(set(lengths)) > 1 for lengths in sizes):
        return None
    return _repeated(rows.chunk(size)[rank], output)


def _repeated(value: _Value, output: Tensor) -> _Value:
    """`value` as often as fills `output`; None where that leaves a rest."""
    if value is None or not value.numel() or output.numel() % value.numel():
        return None
    return value.reshape(-1).repeat(output.numel() // value.numel()).reshape(output.shape)
