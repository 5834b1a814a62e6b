"""`MemoryCheck` for Trainers of transformers: the predicted peak before the first step, and beside CUDA's at the end.

trainer = Trainer(model, args, train_dataset=data, callbacks=[memsize.hf.MemoryCheck(on_excess="raise")])
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from memsize.analysis.step import Guard
from memsize.api.models import guard
from memsize.errors import MemsizeError
from memsize.spec.requests import OnExcess

_LOG = logging.getLogger(__name__)


class MemoryCheck(TrainerCallback):
    """Predicts the peak of a Trainer's steps when the training begins, and warns or stops where the memory isn't there.

    The batch is the first samples of the training data set, or `batch` where it is given, as it has to be for a stream.
    `budget` and `on_excess` are those of `memsize.guard`. `guard` holds the prediction, `measured` what CUDA measured;
    both are logged once, at the end. A model whose step cannot be predicted is trained all the same, with a warning.
    """

    def __init__(self, *, batch: Any = None, budget: str | int | None = None, on_excess: OnExcess = "warn") -> None:
        self._batch, self._budget, self._on_excess = batch, budget, on_excess
        self.guard: Guard | None = None
        self.measured: dict[str, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Predict, and warn or stop."""
        from memsize.torch_internals.isolation import isolated

        with isolated():  # reading a sample may draw random numbers
            batch = self._batch if self._batch is not None else _first_batch(kwargs["train_dataloader"], args)
        if batch is None:
            _LOG.warning("memsize: the training data is a stream, which is not read twice: give MemoryCheck a batch")
            return
        scenario = "amp-bf16" if args.bf16 else "amp-fp16" if args.fp16 else "as-given"
        try:
            self.guard = guard(
                kwargs["model"],
                kwargs["optimizer"],
                batch,
                budget=self._budget,
                on_excess=self._on_excess,
                scenario=scenario,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
            )
        except MemsizeError as error:
            if self._on_excess == "raise":
                raise
            _LOG.warning("memsize: the step cannot be predicted: %s", error)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn or stop before a step that won't fit."""
        if self.guard is not None:
            self.guard.check()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what CUDA measured beside the prediction."""
        if self.guard is not None:
            self.measured = self.guard.measured()
            _LOG.info("memsize: predicted %s, measured %s", self.guard.predicted, self.measured)


def _first_batch(loader: Any, args: Any) -> Any:
    """The first samples of a data set that can be indexed, put together as the Trainer does; None for a stream."""
    loader = getattr(loader, "base_dataloader", loader)
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return None
    samples = [data[index] for index in range(min(args.train_batch_size, len(data)))]
    return loader.collate_fn(samples)
