"""What an answer's figures were made with: PyTorch's releases, and what is known of the cards that were simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memsize.documents.sections import Phrase
from memsize.units import Bytes

if TYPE_CHECKING:
    from memsize.records.gpu import Card
    from memsize.records.timeline import Timeline
    from memsize.records.trace import Trace


def versions(runs: Iterable[Trace | Timeline], cards: Iterable[Card] = ()) -> tuple[Phrase, ...]:
    """A line for each release of PyTorch that ran something, for each stack that was simulated, and for each card."""
    runs = tuple(runs)
    return (
        *((f"PyTorch {release}",) for release in dict.fromkeys(run.torch for run in runs) if release),
        *((f"simulated: {stack}",) for stack in dict.fromkeys(run.stack for run in runs) if stack),
        *map(_card, dict.fromkeys(cards)),
    )


def _card(card: Card) -> Phrase:
    major, minor = card.capability
    kernels = f"compute capability {major}.{minor}" + ("" if card.platform == "CUDA" else ", which stands in")
    return (f"{card.name}:", Bytes(card.bytes), f"of memory ({card.source});", kernels)
