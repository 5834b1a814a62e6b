"""Choices by activations, such as a router's of experts: their indices, by how evenly they are taken to fall.

Unless a run says otherwise (`imbalanced`), every choice is equally frequent. An imbalance of 1.5 sends the busiest
expert 1.5 times the mean number of tokens, and where experts are divided over GPUs, each expert of the busiest GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

import torch

from memsize.known_values.values import MAX_ASSUMED_ELEMENTS, ConstantState, set_constant

BALANCED: Final = "choices by activations (top-k, argmax, sort) fall evenly: a router sends every expert the same share"


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
        """The assumption in words."""
        if self.imbalance == 1:
            return BALANCED
        busiest = "each expert of the busiest GPU" if self.groups else "the busiest expert"
        return (
            f"choices by activations (top-k, argmax, sort) fall unevenly: a router sends {busiest} "
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


_routing: ContextVar[Routing] = ContextVar("_routing", default=Routing())  # noqa: B039 - frozen


@contextmanager
def imbalanced(imbalance: float | None = None, groups: int | None = None, position: int = 0) -> Iterator[None]:
    """While open, choices fall by this `imbalance` (None: as before), within these groups."""
    changed = replace(_routing.get(), groups=groups, position=position)
    token = _routing.set(changed if imbalance is None else replace(changed, imbalance=imbalance))
    try:
        yield
    finally:
        _routing.reset(token)


def spread_choices(indices: torch.Tensor, dim: int | None, choices: int) -> None:
    """Set the unknown `indices` of `choices` along `dim` (None: one in each row), distinct within a row.

    Evenly, row ``r`` takes ``r·k, r·k + 1, …, r·k + k - 1`` modulo `choices`.
    """
    if not 0 < indices.numel() <= MAX_ASSUMED_ELEMENTS or not choices:
        return
    routing = _routing.get()
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
