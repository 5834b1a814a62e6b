"""How much memory there is: a card or a number of bytes, less the CUDA context and a margin."""

from __future__ import annotations

import re
from collections.abc import Iterable
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

    `card` decides which kernels run.
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


def budgets(
    gpu: str | Iterable[str] | None = None, budget: str | int | None = None, margin: str | int = 0
) -> tuple[Budget, ...]:
    """The budgets of cards by name (one, a comma list, several), or of a number of bytes on one of them.

    Without either it is the usual card's. Raises `InputError` for an unknown card, for bytes on several, and where
    nothing is left for the allocator.
    """
    parts = gpu.split(",") if isinstance(gpu, str) else gpu or (DEFAULT,)
    names = [name.strip() for name in parts if name.strip()]
    cards = tuple({found.name: found for found in map(_card, names)}.values())
    if budget is None:
        return tuple(_budget(where.name, where, where.bytes, margin) for where in cards)
    if len(cards) != 1:
        raise InputError("a budget is that of one GPU: name one, or leave the budget out")
    device = parse_bytes(budget) if isinstance(budget, str) else budget
    return (_budget(f"a GPU of {format_bytes(device)}", cards[0], device, margin),)


def _card(name: str) -> Card:
    return local_card() if name.lower() == LOCAL else card(name)


def local_card() -> Card:
    """The first GPU of this machine; raises `InputError` where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise InputError("this machine has no GPU that PyTorch can use: name one, such as t4 or a100")
    _, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return Card(f"{name} (local)", torch.cuda.get_device_capability(), total, "torch.cuda.mem_get_info")


def _budget(name: str, where: Card, device: int, margin: str | int) -> Budget:
    budget = Budget(name, where, device, context().high, _margin(margin, device))
    if budget.allocator <= 0:
        taken = f"{format_bytes(budget.context)} for the CUDA context"
        spare = f" and a margin of {format_bytes(budget.margin)}" if budget.margin else ""
        raise InputError(f"{name} has {format_bytes(device)}: nothing is left after {taken}{spare}")
    return budget


def _margin(margin: str | int, device: int) -> int:
    if isinstance(margin, int):
        return margin
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", margin)
    return round(device * float(percent[1]) / 100) if percent else parse_bytes(margin)
