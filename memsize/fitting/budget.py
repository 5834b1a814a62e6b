"""How much memory there is: a card or a number of bytes, less the CUDA context and a margin."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memsize.device.cards import DEFAULT, Card, card
from memsize.device.context import context
from memsize.errors import InputError
from memsize.units import format_bytes, parse_bytes

LOCAL = "local"
"""The name that means the GPU of this machine."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a process may take on a GPU. `device` is all of it, `context` what CUDA takes of that at most.

    `card` decides which kernels run; its own size counts only where `name` is its name.
    """

    name: str
    card: Card
    device: int
    context: int
    margin: int = 0

    @property
    def allocator(self) -> int:
        """The bytes that are left for PyTorch's caching allocator."""
        return self.device - self.context - self.margin


def card_budget(where: Card, *, margin: str | int = 0, cuda: str | None = None) -> Budget:
    """The budget of a whole card. `margin` is bytes, or text such as ``"500MiB"`` or ``"5%"`` of the card."""
    return _checked(Budget(where.name, where, where.bytes, context(cuda).high, _margin(margin, where.bytes)))


def bytes_budget(
    size: str | int, *, where: str | None = None, margin: str | int = 0, cuda: str | None = None
) -> Budget:
    """A budget of `size` bytes on the device, on a card called `where` (None: the usual one).

    Raises `InputError` where nothing is left for the allocator.
    """
    device = parse_bytes(size) if isinstance(size, str) else size
    return _checked(Budget("the budget", card(where or DEFAULT), device, context(cuda).high, _margin(margin, device)))


def _checked(budget: Budget) -> Budget:
    if budget.allocator <= 0:
        taken = f"{format_bytes(budget.context)} for the CUDA context and {format_bytes(budget.margin)} of margin"
        raise InputError(f"{budget.name} has {format_bytes(budget.device)}: nothing is left after {taken}")
    return budget


def _margin(margin: str | int, device: int) -> int:
    if isinstance(margin, int):
        return margin
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", margin)
    return round(device * float(percent[1]) / 100) if percent else parse_bytes(margin)
