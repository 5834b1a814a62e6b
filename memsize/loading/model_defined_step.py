"""Training steps that models define themselves: a LightningModule, and the model of a Hugging Face `Trainer`.

Their step takes the place of the model's forward: it is called with a batch and returns the loss, and the modules in it
are called from there. That is how Lightning itself puts a training step behind a wrapper such as DDP
(lightning/pytorch/strategies/strategy.py, `_ForwardRedirection`).
"""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memsize.errors import InputError, TargetError, message_of
from memsize.spec.inputs import InputMaker, InputRequest

if TYPE_CHECKING:
    import torch
    from torch import nn


class ModelDefinedStep(ABC):
    """A forward of `model` that is a whole training step up to the loss; `optimizer` makes its optimizer."""

    name: str
    """The methods that run, in the words of the library."""
    autocast: str | None = None
    """The lower precision of the autocast region that its trainer opens."""
    accumulate: int = 1
    """Batches whose gradients make a step."""
    clip: float = 0
    """The norm to which gradients are clipped; 0: they are not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.__signature__ = inspect.signature(model.forward)  # by which a Trainer chooses columns of its data

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # which holds this
        return model

    @property
    def note(self) -> str:
        """A note for readers of the report: whose training step it is."""
        return f"the training step is the target's own, {self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        attributes = vars(self.model)
        del attributes["forward"]
        try:
            return {"loss": self.loss(kwargs or (args[0] if len(args) == 1 else args))}
        finally:
            attributes["forward"] = self

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a batch; raises `InputError` where none is returned."""
        result = self.result(batch)
        loss: torch.Tensor | None = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            raise InputError(f"{self.name}: no loss was returned")
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelDefinedStep:
        copied = copy.copy(self)
        copied._model = weakref.ref(copy.deepcopy(self.model, memo))
        return copied

    @abstractmethod
    def result(self, batch: Any) -> Any:
        """The loss of a batch, or a mapping that holds it."""

    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """A new optimizer of the model's parameters."""

    @abstractmethod
    def batches(self) -> Any:
        """An iterable of the model's training batches."""

    def inputs(self) -> InputMaker:
        """A maker of inputs that returns the first batch."""

        def make(request: InputRequest) -> Any:
            try:
                return next(iter(self.batches()))
            except Exception as error:
                why = f"{type(error).__name__}: {message_of(error)}"
                raise InputError(f"the target has no batch of its own, give one with --inputs ({why})") from error

        return InputMaker(make, resizable=False, untyped=False)


class LightningStep(ModelDefinedStep):
    """`training_step` and `configure_optimizers` of a LightningModule."""

    name = "training_step with configure_optimizers"

    @property
    def note(self) -> str:
        """The base class's note, with what stays unknown: the Trainer's settings."""
        return f"{super().note}: how gradients are accumulated and clipped, and the precision, are not known from it"

    def result(self, batch: Any) -> Any:
        model: Any = self.model
        if not model.automatic_optimization:
            raise InputError("the module optimizes by itself (automatic_optimization): memsize run shows its script")
        arguments = (batch, 0, 0)  # batch, batch_idx, dataloader_idx
        return model.training_step(*arguments[: len(inspect.signature(model.training_step).parameters)])

    def optimizer(self) -> torch.optim.Optimizer:
        result: Any = self.model.configure_optimizers()  # type: ignore[operator]
        while not hasattr(result, "step"):
            result = result.get("optimizer") if isinstance(result, Mapping) else result[0] if result else None
            if result is None:
                raise InputError("configure_optimizers returned no optimizer")
        optimizer: torch.optim.Optimizer = result
        return optimizer

    def batches(self) -> Any:
        return self.model.train_dataloader()  # type: ignore[operator]


class TrainerStep(ModelDefinedStep):
    """`compute_loss` and `create_optimizer` of a Hugging Face `Trainer`, with the settings in its arguments.

    Source: `_inner_training_loop` and `training_step` of transformers/trainer.py; `prepare_model` of
    accelerate/accelerator.py.
    """

    name = "the Trainer's compute_loss with create_optimizer"

    def __init__(self, model: nn.Module, trainer: Any) -> None:
        super().__init__(model)
        self._trainer, arguments = trainer, trainer.args
        self.autocast = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else None
        self.accumulate, self.clip = arguments.gradient_accumulation_steps, arguments.max_grad_norm or 0
        if arguments.gradient_checkpointing:
            options = dict(arguments.gradient_checkpointing_kwargs or {})
            # transformers renamed the method.
            enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            apart = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
            enable(options or None, **apart)

    @property
    def note(self) -> str:
        """The base class's note, with the settings taken from the Trainer's arguments."""
        autocast = f", under autocast to {self.autocast}" if self.autocast else ""
        accumulate = f", {self.accumulate} batches a step" if self.accumulate > 1 else ""
        clip = f", gradients clipped to a norm of {self.clip:g}" if self.clip else ""
        return f"{super().note}{autocast}{accumulate}{clip}"

    def result(self, batch: Any) -> Any:
        """The loss; where autocast is on, it is on in the model's forward alone, whose results are then float32."""
        import torch

        if not torch.is_autocast_enabled("cuda"):
            return self._trainer.compute_loss(self.model, dict(batch))
        from accelerate.utils import convert_outputs_to_fp32

        region = torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"))
        vars(self.model)["forward"] = convert_outputs_to_fp32(region(self.model.forward))
        with torch.autocast("cuda", enabled=False):
            return self._trainer.compute_loss(self.model, dict(batch))

    def optimizer(self) -> torch.optim.Optimizer:
        other = copy.copy(self._trainer)
        other.model = other.model_wrapped = self.model
        other.optimizer = None
        other.create_optimizer()
        optimizer: torch.optim.Optimizer = other.optimizer
        return optimizer

    def batches(self) -> Any:
        return self._trainer.get_train_dataloader()


def model_defined_step_of(model: nn.Module) -> ModelDefinedStep | None:
    """The step that `load` has made the forward of `model`; None if its forward is its own."""
    step = vars(model).get("forward")
    return step if isinstance(step, ModelDefinedStep) else None


def is_trainer(value: Any) -> bool:
    """Whether `value` is a Hugging Face `Trainer`, or of a class derived from it."""
    kinds = type(value).__mro__
    return any(kind.__name__ == "Trainer" and kind.__module__.startswith("transformers.") for kind in kinds)


def model_defined_step(model: nn.Module, trainer: Any = None) -> ModelDefinedStep:
    """The training step of `model`, by `trainer` if there is one. Raises `TargetError` if the model defines no step."""
    if trainer is not None:
        return TrainerStep(model, trainer)
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        return LightningStep(model)
    raise TargetError(
        f"{type(model).__name__} has no training step of its own, as a LightningModule or a Hugging Face Trainer has: "
        "name an optimizer, such as --train adamw"
    )
