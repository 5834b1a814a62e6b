"""The one table of limits: what a model may need at most (or, of a batch, what has to fit), and how limits are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from memsize.errors import InputError, UnknownInputError, quoted
from memsize.units import parse_bytes

Unit = Literal["bytes", "elements", "samples"]


class Meaning(NamedTuple):
    """The quantity that a limit bounds, in the units that its value may have; plain numbers are in the first."""

    title: str
    units: tuple[Unit, ...]
    of_peak: Literal["", "inference", "training", "either"] = ""
    """Whether it needs the peak of a run on a GPU."""


LIMITS: Final[dict[str, Meaning]] = {
    "parameters": Meaning("parameters, tied ones once", ("elements", "bytes")),
    "trainable": Meaning("parameters that require a gradient", ("elements",)),
    "buffers": Meaning("registered buffers", ("bytes",)),
    "stored": Meaning("all that the model holds: parameters, buffers, and tensors that are not registered", ("bytes",)),
    "activations": Meaning("what one forward keeps for backward, parameters apart", ("bytes",)),
    "inference_peak": Meaning("`max_memory_allocated` of a forward without gradients", ("bytes",), "inference"),
    "training_peak": Meaning("`max_memory_allocated` of training steps; needs `train`", ("bytes",), "training"),
    "reserved": Meaning("`max_memory_reserved` of training with `train`, else of inference", ("bytes",), "either"),
    "device": Meaning("the most that `nvidia-smi` may show for the process, of the same run", ("bytes",), "either"),
    "fits_batch": Meaning("a batch that has to fit the GPU, in training with `train`, else in inference", ("samples",)),
}  # fmt: skip
"""Every limit by the name that people give it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit: `amount` of `unit`, at most; of ``fits_batch`` the batch that has to fit."""

    name: str
    amount: int
    unit: Unit


def parse_limits(values: Mapping[str, object]) -> tuple[Bound, ...]:
    """The bounds that ``{"parameters": "40 MiB", "fits_batch": 16}`` names; raises `InputError` for anything else.

    A plain number of parameters counts elements, a size such as ``"40 MiB"`` their bytes.
    """
    return tuple(_bound(name, value) for name, value in values.items())


def _bound(name: str, value: object) -> Bound:
    if name not in LIMITS:
        raise UnknownInputError("limit", name, LIMITS)
    units = LIMITS[name].units
    if isinstance(value, str) and "bytes" in units and not value.strip().isdecimal():
        return Bound(name, _size(name, value), "bytes")
    amount = int(value.replace("_", "")) if isinstance(value, str) and re.fullmatch("[0-9_]+", value) else value
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < (units[0] == "samples"):
        example = "'40 MiB'" if "bytes" in units else "16" if units[0] == "samples" else "10_000_000"
        raise InputError(f"the limit {name} is {quoted(str(value))}: write it like {example}")
    return Bound(name, amount, units[0])


def _size(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(f"the limit {name}: {error}") from None


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a figure may exceed its baseline: by a `share` of it, and by `amount` bytes."""

    share: float = 0.0
    amount: int = 0

    @classmethod
    def parse(cls, value: object) -> Growth:
        """``"1%"``, a size such as ``"2 MiB"``, or bytes; raises `InputError` for anything else."""
        text = str(value).strip()
        if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text):
            return cls(share=float(match[1]) / 100)
        try:
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise InputError(text)
            return cls(amount=parse_bytes(text))
        except InputError:
            raise InputError(f"max_growth is {quoted(text)}: write it like '1%' or '2 MiB'") from None

    def most(self, baseline: int) -> int:
        """The most that a figure may be."""
        return baseline + int(baseline * self.share) + self.amount
