"""The parts of a training step beside the model's own forward: options as one value, parsed and checked once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from memsize.errors import InputError, UnknownInputError
from memsize.spec.options import check_fields, option

OPTIMIZERS: dict[str, tuple[str, Mapping[str, object]]] = {
    "sgd": ("SGD", {"lr": 0.01}),
    "sgd-momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
}
"""Names of optimizers: the class in `torch.optim` and what is passed to it beside the parameters."""

USUAL_STEPS = 3
"""How many steps are run unless another number is asked for: the first makes state, the third has settled."""

OWN = "own"
"""The optimizer's name that asks for the step that the target itself describes."""

LOSSES = ("own", "cross_entropy", "mse", "bce", "mean", "sum")
"""Names of losses; what each computes stands in `memsize.workloads.losses`."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training step.

    `optimizer` is a name of `OPTIMIZERS` with options after a colon (``"adamw:fused"``, ``"sgd:momentum=0.9"``), or a
    function from parameters to an optimizer; ``"own"`` is the step that a LightningModule or a Hugging Face `Trainer`
    describes, its loss included. `loss` is a name of `LOSSES`, a function of the model's output, or None
    for the one that the output suggests. `steps` steps are run: state is created in the first, so that the second is
    the first ordinary one. `gradient_accumulation_steps` forwards and backwards are made per step. `set_to_none` is
    `zero_grad`'s. `ema` keeps an averaged copy of the parameters. `scaler` uses a GradScaler (None: under float16
    autocast).
    """

    optimizer: str | Callable[[Any], Any] = option(
        "adamw",
        "Run training steps with this optimizer: adamw, adamw:fused, sgd:momentum=0.9 …; own: the step of a "
        "LightningModule or a Hugging Face Trainer.",
        key="train",
        metavar="OPTIMIZER",
    )
    _: KW_ONLY
    steps: int = option(USUAL_STEPS, "Training steps to run.", least=1)
    loss: str | Callable[[Any], Any] | None = option(
        None, f"Loss: {', '.join(LOSSES)}.", shown="one that suits the output", metavar="NAME"
    )
    gradient_accumulation_steps: int = option(1, "Backward passes per training step.", least=1)
    ema: bool = option(False, "Keep an averaged copy of the parameters during training.")
    set_to_none: bool = option(True, "Free the gradients in zero_grad.", written=False)
    scaler: bool | None = option(None, "Use a GradScaler.", shown="under float16 autocast", written=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.optimizer, str) and not self.is_own:
            parse_optimizer(self.optimizer)
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise UnknownInputError("loss", self.loss, LOSSES)

    @property
    def is_own(self) -> bool:
        """Whether the step is the target's own."""
        return self.optimizer == OWN

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name, for titles and sentences."""
        kind = self.optimizer
        return kind if isinstance(kind, str) else getattr(kind, "__name__", "the given optimizer")


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer by name: the class in `torch.optim`, and the options that it is made with."""

    name: str
    cls: str
    options: Mapping[str, object] = field(default_factory=dict)


def parse_optimizer(text: str) -> OptimizerSpec:
    """``adamw``, ``adamw:fused``, ``sgd:momentum=0.9,nesterov``: options are Python literals, a bare one is True.

    Raises `InputError` for an unknown name or an option that cannot be read.
    """
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    if name not in OPTIMIZERS:
        raise UnknownInputError("optimizer", name, OPTIMIZERS)
    cls, defaults = OPTIMIZERS[name]
    options = dict(defaults)
    for text in filter(None, rest.split(",")):
        key, equals, value = map(str.strip, text.partition("="))
        try:
            options[key] = ast.literal_eval(value) if equals else True
        except (ValueError, SyntaxError):
            key = ""
        if not key.isidentifier():
            raise InputError(f"cannot read the optimizer option {text!r}: write it like momentum=0.9")
    return OptimizerSpec(name, cls, options)
