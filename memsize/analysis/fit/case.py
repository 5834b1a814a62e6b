"""One way to run a model whose memory is asked for, as a value: every remedy turns a case into another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memsize.device.config import AllocatorConfig
from memsize.records.gpu import Card
from memsize.spec.scenario import Scenario
from memsize.spec.training import Training

if TYPE_CHECKING:
    from memsize.tracing.run import Setup

Edit = Callable[["Setup"], "Setup"]
"""Changes a twin that is ready to run; raises `NotApplicable` where there is nothing to change."""


class NotApplicable(Exception):  # noqa: N818
    """Why a remedy has no meaning for a model. It never leaves the search for remedies."""


@dataclass(frozen=True)
class Case:
    """A scenario on a card, trained (None: inference), with the allocator's settings and edits of the twin.

    `split` is into how many parts a batch is cut, one after the other; `applied` names the remedies in it.
    """

    scenario: Scenario
    card: Card
    training: Training | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    edits: tuple[Edit, ...] = ()
    split: int = 1
    applied: tuple[str, ...] = ()

    def edited(self, edit: Edit) -> Case:
        """The case with one more edit."""
        return replace(self, edits=(*self.edits, edit))

    @property
    def key(self) -> tuple[object, ...]:
        """What decides the events: cards of one generation run the same kernels."""
        return self.scenario.name, self.card.kernels, self.training, self.edits, self.split
