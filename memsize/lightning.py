"""`MemoryCheck` for Lightning: the predicted peak before the first batch, and beside CUDA's at the end.

trainer = lightning.Trainer(callbacks=[memsize.lightning.MemoryCheck(on_excess="raise")])
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from memsize import api
from memsize.analysis.step import Guard
from memsize.api.models import budget_of, remade
from memsize.errors import BudgetError, MemsizeError
from memsize.loading.model_defined_step import LightningStep
from memsize.spec.requests import OnExcess

_LOG = logging.getLogger(__name__)


class MemoryCheck(Callback):  # type: ignore[misc]
    """Predicts the peak of a `training_step` on the first batch, and warns or stops where the memory isn't there.

    `budget` and `on_excess` are those of `memsize.guard`. `guard` holds the prediction, `measured` what CUDA measured;
    both go to the trainer's loggers as hyperparameters. The module has to be one of automatic optimization; one whose
    step cannot be predicted is trained all the same, with a warning.
    """

    def __init__(self, *, budget: str | int | None = None, on_excess: OnExcess = "warn") -> None:
        self._budget, self._on_excess = budget, on_excess
        self.guard: Guard | None = None
        self.measured: dict[str, int] | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Predict before the first batch, and warn or stop, also before a later one that won't fit."""
        if self.guard is not None:
            self.guard.check()
        if self.guard is not None or batch_idx:
            return
        try:
            step = api.trace(
                pl_module,
                args=(batch,),
                step=_loop(pl_module, trainer.optimizers, trainer.accumulate_grad_batches),
                scenario=_SCENARIOS.get(str(trainer.precision), "as-given"),
            )
            self.guard = Guard(step, budget_of(self._budget), self._on_excess)
            if self.guard.fits is False:
                self.guard.exceed(self.guard.text())
        except BudgetError:
            raise
        except MemsizeError as error:
            if self._on_excess == "raise":
                raise
            _LOG.warning("memsize: the step cannot be predicted: %s", error)
        else:
            _log(trainer, "predicted", self.guard.predicted)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what CUDA measured beside the prediction."""
        if self.guard is not None and (measured := self.guard.measured()) is not None:
            self.measured = measured
            _log(trainer, "measured", measured)


_SCENARIOS = {"bf16-mixed": "amp-bf16", "16-mixed": "amp-fp16"}


def _loop(module: Any, optimizers: list[Any], accumulate: int) -> Callable[[Any], Callable[[Any], None]]:
    """The loop of automatic optimization, for a copy of the module; an update after `accumulate` created."""
    makers = [remade(module, optimizer) for optimizer in optimizers]

    def begin(copy: Any) -> Callable[[Any], None]:
        trained = [parameter for parameter in copy.parameters() if parameter.requires_grad]
        created = [make(trained) for make in makers]
        own = LightningStep(copy)

        def step(batch: Any) -> None:
            for number in range(accumulate):
                loss = own.loss(batch)
                for optimizer in created if number == 0 else ():
                    optimizer.zero_grad()
                loss.backward()
            for optimizer in created:
                optimizer.step()

        return step

    return begin


def _log(trainer: Any, kind: str, figures: dict[str, int]) -> None:
    """Log `figures` as hyperparameters, since they are of the run and not of a step."""
    for logger in trainer.loggers:
        logger.log_hyperparams({f"memsize/{kind}/{name}": value for name, value in figures.items()})
