"""What a remedy is: a step from one case to another, with its cost in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from memsize.fitting.case import Case

Changes = Literal["nothing", "speed", "numbers", "training"]
"""What a remedy changes beside memory: nothing that matters, the speed, the rounding, or what is learnt."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to need less memory.

    `apply` turns a case into the case with it; it raises `NotApplicable` with the reason where that means nothing.
    `cost` is what one pays. Of remedies that share a group only one is taken at a time.
    """

    name: str
    title: str
    cost: str
    changes: Changes
    groups: frozenset[str]
    apply: Callable[[Case], Case]
