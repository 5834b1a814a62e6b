"""How a model is trained: adapters beside its weights, a quantized base, frozen parts. Parsed and checked once."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final

from memsize.errors import InputError, UnknownInputError

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
RANK: Final = 16
_OWN: Final = ("r", "alpha", "dropout", "targets", "train")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapters of one kind beside the layers that match one of `targets` (empty: every linear layer but the head).

    `rank` is the inner width, `dropout` the probability on the adapter's input. Modules that match `train` are trained
    as they are, as peft's `modules_to_save`. `options` go to the configuration of peft.
    """

    kind: str = "lora"
    rank: int = RANK
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    train: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        rank = "" if self.kind in ("ia3", "oft") else f" of rank {self.rank}"
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
    for option in filter(None, map(str.strip, text.split(","))):
        name, equals, value = map(str.strip, option.partition("="))
        if not equals or not value:
            raise InputError(f"cannot read the option {option!r} of {kind}: write it like r=16,targets=q_proj;v_proj")
        adapter = _with(adapter, name, value)
    return adapter


def _with(adapter: Adapter, name: str, value: str) -> Adapter:
    patterns = tuple(filter(None, map(str.strip, value.split(";"))))
    if name == "targets":
        return replace(adapter, targets=patterns)
    if name == "train":
        return replace(adapter, train=patterns)
    if name == "r":
        if not value.isdecimal() or not int(value):
            raise InputError(f"r is {value}: it should be a whole number from 1")
        return replace(adapter, rank=int(value))
    if name == "dropout":
        try:
            probability = float(value)
        except ValueError:
            probability = -1.0
        if not 0 <= probability < 1:
            raise InputError(f"dropout is {value}: it should be a number from 0 to below 1")
        return replace(adapter, dropout=probability)
    if adapter.kind == "lora" and name not in _OWN:
        raise UnknownInputError("option", name, _OWN, problem=f"lora has no option {name!r}")
    try:
        literal: object = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        literal = value
    return replace(adapter, options=(*adapter.options, (name, literal)))


def parse_base(name: str) -> str:
    """The scenario whose layout a frozen base in the format `name` has."""
    if name not in BASES:
        raise UnknownInputError("base", name, BASES)
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
