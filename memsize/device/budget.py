"""The memory budget of a run: a card or a number of bytes, less the CUDA context and a margin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product, starmap
from typing import Final

from memsize.device.cards import CARDS, LOCAL_SUFFIX, card
from memsize.device.cuda_context import cuda_context
from memsize.errors import InputError, first_line
from memsize.records.fit import Budget
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.spec.parallel import Parallel
from memsize.spec.stack import INSTALLED, Stack
from memsize.units import format_bytes, parse_bytes

ALL: Final = "all"
"""The name that stands for all cards of the table whose kernels are known."""
LOCAL = "local"
"""The name that stands for the GPU of this machine."""
_ASKED: Final = "torch.cuda.mem_get_info"


def budgets(
    gpu: str | Iterable[str] | None = None,
    budget: str | int | None = None,
    margin: str | int = 0,
    stack: Stack = INSTALLED,
    fraction: float = 1.0,
    beside: str | None = None,
) -> tuple[Budget, ...]:
    """The budgets of cards by name (one, a comma-separated list, or several), or of a number of bytes on one of them.

    With neither, the budget is that of the default card. `stack` decides how much the CUDA context takes, `fraction` is
    the allocator's `memory_fraction`, and `beside` names a server on the same GPU with its share. Raises `InputError`
    for an unknown card, for a number of bytes on several cards, and where nothing is left for the allocator.
    """
    server = _share_of(beside) if beside else 0.0
    parts = gpu.split(",") if isinstance(gpu, str) else gpu or (DEFAULT_GPU,)
    names = [name.strip() for name in parts if name.strip()]
    if names == [ALL]:
        names = [card.name for card in _cuda_cards()]
    named = [local_card() if name.lower() == LOCAL else card(name) for name in names]
    cards = tuple({card.name: card for card in named}.values())
    if budget is None:
        return tuple(budget_of(gpu, stack, fraction, margin=margin, server=server) for gpu in cards)
    if len(cards) != 1:
        raise InputError("a budget is that of one GPU: name one, or leave the budget out")
    device = parse_bytes(budget) if isinstance(budget, str) else budget
    return (budget_of(cards[0], stack, fraction, device=device, margin=margin, server=server),)


def budget_of(
    where: Card,
    stack: Stack = INSTALLED,
    fraction: float = 1.0,
    *,
    device: int | None = None,
    margin: str | int = 0,
    server: float = 0.0,
) -> Budget:
    """The budget of a card, or of a part of `device` bytes of it. Raises `InputError` where nothing is left for the
    allocator.
    """
    name = where.name if device is None else f"a GPU of {format_bytes(device)}"
    device = where.bytes if device is None else device
    taken = cuda_context(where, stack).high
    percent = None if isinstance(margin, int) else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", margin)
    if percent:
        margin = round(device * float(percent[1]) / 100)
    budget = Budget(
        name=name,
        card=where,
        device=device,
        context=taken,
        margin=margin if isinstance(margin, int) else parse_bytes(margin),
        notes=tuple(_notes(where)),
        fraction=fraction,
        server=server,
    )
    if budget.margin < 0 or budget.allocator <= 0:
        parts = [f"{format_bytes(taken)} for the CUDA context"] if taken else []
        parts += [f"the {1 - fraction:.0%} that the allocator may not take"] if fraction < 1 else []
        parts += [f"{format_bytes(budget.beside)} for the server beside it"] if server else []
        parts += [f"a margin of {format_bytes(budget.margin)}"] if budget.margin else []
        raise InputError(f"{name} has {format_bytes(device)}: nothing is left after {' and '.join(parts)}")
    return budget


def _share_of(text: str) -> float:
    """The share of a server, from ``serve:0.3``: what vLLM calls `gpu_memory_utilization`."""
    share = re.fullmatch(r"serve:(0?\.\d+)", text.strip())
    if share is None:
        number = re.search(r"(\d+(?:\.\d+)?)\s*(%?)", text)
        value = float(number[1]) / (100 if number[2] or float(number[1]) >= 5 else 1) if number else 0.3
        nearest = f"serve:{value:g}" if 0 < value < 1 else "serve:0.3"
        raise InputError(f"{text!r} is not a server and its share of the GPU's memory, such as {nearest}")
    return float(share[1])


def _notes(where: Card) -> Iterator[str]:
    """The card's own remark, and one where more of a local GPU is taken than this process's context accounts for."""
    if where.note:
        yield where.note
    if where.source == _ASKED:
        import torch

        free, total = torch.cuda.mem_get_info()
        if total - free > cuda_context(where).high:
            taken = format_bytes(total - free)
            yield f"{taken} of {where.name} are in use right now: --margin leaves room for them"


def larger_budgets(than: Budget, stack: Stack = INSTALLED) -> tuple[Budget, ...]:
    """The budgets of the cards that have more memory, ascending: of those whose kernels are known."""
    larger = [card for card in _cuda_cards() if card.bytes > than.device]
    return tuple(budget_of(card, stack, than.fraction, margin=than.margin, server=than.server) for card in larger)


def _cuda_cards() -> list[Card]:
    """The cards of the table whose kernels are known, by their memory."""
    return sorted((card for card in CARDS.values() if card.platform == "CUDA"), key=lambda card: card.bytes)


def spread_over(budgets: Iterable[Budget], parallels: Sequence[Parallel | None]) -> tuple[Budget, ...]:
    """The budgets of one GPU each, where a training is spread over several such GPUs in some ways: by one strategy on
    several numbers of them, or by several strategies, which the budgets' names then tell apart.
    """
    spread = [parallel for parallel in parallels if parallel is not None]
    kinds = {(parallel.kind, parallel.offload, parallel.views) for parallel in spread}
    named = len(kinds) > 1 or len({parallel.size for parallel in spread}) < len(spread)

    def several(budget: Budget, parallel: Parallel | None) -> Budget:
        if parallel is None:
            return budget
        gpus = f"{parallel.size} x {budget.name.removeprefix('a ')}"
        name = f"{gpus} ({parallel})" if named else gpus
        return replace(budget, name=name, parallel=str(parallel), gpus=parallel.size)

    return tuple(starmap(several, product(budgets, parallels)))


def local_card() -> Card:
    """The GPU of this machine that PyTorch uses; raises `InputError` where there is none or it does not answer."""
    import torch

    if torch.backends.mps.is_available():
        recommended = torch.mps.recommended_max_memory()
        return Card(
            "the Apple GPU here", card(DEFAULT_GPU).capability, recommended, "Metal's own answer", platform="MPS"
        )
    if not torch.cuda.is_available():
        raise InputError("this machine has no GPU that PyTorch can use: name one, such as t4 or a100")
    try:
        _, total = torch.cuda.mem_get_info()
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except RuntimeError as error:
        raise InputError(f"the GPU of this machine does not answer: {first_line(error)}") from None
    if torch.version.hip:
        return Card(name + LOCAL_SUFFIX, card(DEFAULT_GPU).capability, total, _ASKED, platform="ROCm")
    return Card(name + LOCAL_SUFFIX, capability, total, _ASKED)
