"""How a model is trained: the parts of a step beside its own forward, and adapters, a quantized base and frozen parts.

Options are values, parsed and checked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from memsize.errors import InputError, UnknownInputError
from memsize.spec.options import check_fields, option, parse_value

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
        options[key] = parse_value(value) if equals else True
        if options[key] == value or not key.isidentifier():  # a word is no option's value
            raise InputError(f"cannot read the optimizer option {text!r}: write it like momentum=0.9")
    return OptimizerSpec(name, cls, options)


# -- what is trained ---------------------------------------------------------------------------------------------------

PEFT_CONFIGS: Final = {
    "lora": "LoraConfig",
    "dora": "LoraConfig",
    "ia3": "IA3Config",
    "oft": "OFTConfig",
    "vera": "VeraConfig",
}
"""Kinds of adapters, and the class of peft that configures each."""
BASES: Final = ("nf4", "nf4-double", "fp4", "int8", "fp8", "mxfp4", "nvfp4")
"""Formats of a frozen base. Each is the scenario of this name; fp8 is `fp8-weight`."""
_BASE_NAMES: Final = {
    **dict.fromkeys(("4bit", "int4", "qlora", "bnb", "bitsandbytes"), ("nf4",)),
    **dict.fromkeys(("8bit", "int8weight"), ("int8",)),
    "float8": ("fp8",),
}
"""What others call formats of a base."""
RANK: Final = 16
ADAPTER_OPTIONS: Final = ("r", "alpha", "dropout", "targets", "train")
"""The options of LoRA; those of other kinds are also named as peft's configuration names them."""
_PEFT_NAMES: Final = {
    "rank": "r",
    "lora_r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "modules_to_save": "train",
}
"""What peft and others call options of LoRA."""
_UNRANKED: Final = ("ia3", "oft")
"""Kinds whose `r` and `dropout` mean something else to peft, or nothing."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapters of one kind beside the layers that match one of `targets` (empty: every linear layer but the head).

    `rank` is the inner width, `dropout` the probability on the adapter's input. Copies of the modules
    that match `train` are trained in full, as peft's `modules_to_save`. `options` go to the configuration of peft.
    """

    kind: str = "lora"
    rank: int = RANK
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    train: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        rank = "" if self.kind in _UNRANKED else f" of rank {self.rank}"
        targets = f" beside {', '.join(self.targets)}" if self.targets else ""
        return f"{self.kind}{rank}{targets}"


def parse_adapter(text: str) -> Adapter:
    """``lora``, ``dora:r=8,targets=q_proj;v_proj``: a kind, and options after a colon.

    Raises `InputError` for an unknown kind, and for an option that cannot be read.
    """
    kind, _, rest = text.partition(":")
    kind = kind.strip().lower()
    if kind not in PEFT_CONFIGS:
        raise UnknownInputError("adapter", kind, PEFT_CONFIGS)
    return parse_lora(rest, kind)


def parse_lora(text: str, kind: str = "lora") -> Adapter:
    """``r=16,targets=q_proj;v_proj``: the options of an adapter of this `kind`."""
    adapter = Adapter(kind)
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals or not value:
            raise InputError(f"cannot read the option {part!r} of {kind}: write it like r=16,targets=q_proj;v_proj")
        if name in ("targets", "train"):
            patterns = tuple(filter(None, map(str.strip, value.split(";"))))
            adapter = replace(adapter, targets=patterns) if name == "targets" else replace(adapter, train=patterns)
        elif name == "r" and kind not in _UNRANKED:
            if not value.isdecimal() or not int(value):
                raise InputError(f"r is {value}: it should be a whole number from 1")
            adapter = replace(adapter, rank=int(value))
        elif name == "dropout" and kind not in _UNRANKED:
            try:
                probability = float(value)
            except ValueError:
                probability = -1.0
            if not 0 <= probability < 1:
                raise InputError(f"dropout is {value}: it should be a number from 0 to below 1")
            adapter = replace(adapter, dropout=probability)
        elif kind == "lora" and name not in ADAPTER_OPTIONS:
            near = (_PEFT_NAMES[name],) if name in _PEFT_NAMES else None
            raise UnknownInputError("option", name, ADAPTER_OPTIONS, near=near, problem=f"lora has no option {name!r}")
        else:
            adapter = replace(adapter, options=(*adapter.options, (name, parse_value(value))))
    return adapter


def parse_base(name: str) -> str:
    """The scenario whose layout a frozen base in the format `name` has."""
    if name not in BASES:
        raise UnknownInputError("base", name, BASES, near=_BASE_NAMES.get(name.lower().replace("-", "")))
    return "fp8-weight" if name == "fp8" else name


def matches(path: str, pattern: str) -> bool:
    """Whether `pattern`, in which ``*`` stands for anything, is `path`, or its end after a dot."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """The trained parts of a model: an `adapter` beside a frozen `base`, without what matches a pattern of `freeze`."""

    adapter: Adapter | None = None
    base: str | None = None
    freeze: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return self != TrainedParts()
