"""One model of the zoo and what came of it, and both as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

BATCH = 2
"""Of one image, a batch norm over one value cannot be trained."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model by the target that a user would type, and the arguments that make it small enough to build."""

    library: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"{self.library}:{self.name}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trace: the bytes that a GPU would hand out at its peak, or the reason why there is none.

    `seconds` are those of the processor: what else the machine does meanwhile does not count.
    """

    peak: int | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def succeeded(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case. Parameter counts are memsize's and the library's own; None for unknown."""

    case: Case
    inference: Attempt
    training: Attempt
    ours: int | None = None
    theirs: int | None = None
    uncounted: str = ""
    """Why the library's own count is not known."""
    refused: str = ""
    """What the library itself says to it, where it cannot build or run it either."""

    @property
    def counts_agree(self) -> bool:
        return self.ours is not None and self.ours == self.theirs

    @property
    def succeeded(self) -> bool:
        return self.inference.succeeded and self.training.succeeded and self.counts_agree


def encode(outcome: Outcome) -> dict[str, Any]:
    """`outcome` as what JSON can hold."""
    return asdict(outcome)


def decode(data: Mapping[str, Any]) -> Outcome:
    """The outcome that `encode` took apart."""
    parts = {"case": Case(**data["case"]), **{part: Attempt(**data[part]) for part in ("inference", "training")}}
    return Outcome(**{**data, **parts})
