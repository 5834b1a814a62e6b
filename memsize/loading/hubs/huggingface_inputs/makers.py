"""The functions that make arguments, by the name of the argument in the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsize.loading.hubs.huggingface_inputs.need import Need

Maker = Callable[["Need"], Any]

MAKERS: dict[str, Maker] = {}
"""What makes each argument; None from it says that this model does without."""


def makes(*names: str) -> Callable[[Maker], Maker]:
    """Register what makes the arguments `names`; one that has a maker already raises ValueError."""

    def register(maker: Maker) -> Maker:
        for name in names:
            if name in MAKERS:
                raise ValueError(f"{name} has two makers")
            MAKERS[name] = maker
        return maker

    return register
