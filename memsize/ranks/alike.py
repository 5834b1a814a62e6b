"""What this rank gets where each rank sends what this one sends: the values of tensors that are gathered or exchanged.

Code reads some of them. How many tokens each expert gets of each rank is exchanged before the tokens are, and decides
how large they are. What is reduced would have to be computed: on the CPU each rank keeps its own part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from memsize.constants.values import constant_of, is_small
from memsize.internals.meta import is_meta
from memsize.records.world import CollectiveKind

_Value = Tensor | None
_PARTED: Final = ("all-to-all", "scatter", "reduce-scatter")
"""The collectives of which each rank gets its part of what the others send."""


def received(
    kind: CollectiveKind | None,
    written: Sequence[Tensor],
    sent: Sequence[Tensor],
    splits: Any,
    group: dist.ProcessGroup,
) -> Iterator[tuple[Tensor, _Value]]:
    """Each of the tensors that a collective writes, with its values; None where they are not known.

    `sent` is what this rank gives, and `splits` may have lists of the rows that go to each rank.
    """
    values = _values(kind)
    for place, output in enumerate(written):
        is_read = bool(sent) and (not is_meta(output) or is_small(output))
        yield output, values(place, output, sent, splits, group) if is_read else None


def _values(kind: CollectiveKind | None) -> Callable[..., _Value]:
    if kind in ("all-gather", "gather"):
        return _gathered
    return _part if kind in _PARTED else lambda *_: None


def _gathered(place: int, output: Tensor, sent: Sequence[Tensor], *_: Any) -> _Value:
    """Of several that are gathered at once, each rank's are listed together."""
    return _repeated(constant_of(sent[place % len(sent)]), output)


def _part(place: int, output: Tensor, sent: Sequence[Tensor], splits: Any, group: dist.ProcessGroup) -> _Value:
    """The part of this rank: a tensor of its own, or an equal share of one's rows."""
    rank, size = group.rank(), group.size()
    whole = sent[place % len(sent)]
    if len(sent) > 1 and whole.numel() != size * output.numel():
        return _repeated(constant_of(sent[rank]) if len(sent) == size else None, output)
    rows, sizes = constant_of(whole), [each for each in splits if isinstance(each, (list, tuple))]
    if rows is None or not rows.dim() or len(rows) % size or any(len(set(each)) > 1 for each in sizes):
        return None
    return _repeated(rows.chunk(size)[rank], output)


def _repeated(value: _Value, output: Tensor) -> _Value:
    """`value` as often as fills `output`; None where that leaves a rest."""
    if value is None or not value.numel() or output.numel() % value.numel():
        return None
    return value.reshape(-1).repeat(output.numel() // value.numel()).reshape(output.shape)
