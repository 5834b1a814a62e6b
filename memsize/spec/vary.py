"""The size that a search varies: the batch, input dimensions that grow together, a generation's context, or a number
among a script's own arguments.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

from memsize.errors import InputError, UnknownInputError, first_line, quoted, suggestion
from memsize.records.trace import InputTensor

BATCH: Final = "batch"
CONTEXT: Final = "context"
_BOTH: Final = ("context,batch", "batch,context")
_HOW: Final = (
    "vary batch, context, context,batch, seq_len, image, or dimensions such as 0:1 or input_ids:1,attention_mask:1"
)
_SEQUENCE: Final = ("seq_len", "length")
_IMAGE: Final = ("image", "size")
UNITS: Final = {BATCH: "sample", CONTEXT: "token", "seq_len": "position", "image": "pixel"}
"""What one more of that which varies is."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of one input, counted as PyTorch does: 0 is the batch."""

    name: str
    dim: int


@dataclass(frozen=True, slots=True)
class Vary:
    """The dimensions that take the size that is searched for; none stands for the batch.

    `text` is what was asked for: ``"batch"``; ``"context"``, the tokens of a prompt and those generated after it;
    ``"seq_len"``, the first dimension after the batch; ``"image"``, the last two together; or dimensions such as
    ``"0:1"``, an input's name or position and a dimension. With `frontier`, the context is searched for at one batch
    after another.
    """

    text: str = BATCH
    named: tuple[Dimension, ...] = ()
    frontier: bool = False

    @property
    def batch(self) -> bool:
        """Whether the batch is what varies."""
        return self.text == BATCH

    @property
    def context(self) -> bool:
        """True for the tokens of a generation."""
        return self.text == CONTEXT

    def dimensions(self, inputs: Sequence[InputTensor]) -> tuple[Dimension, ...]:
        """The dimensions of `inputs` (with their batch) that vary; raises `InputError` where there are none such."""
        if self.batch or self.context:
            return ()
        several = [tensor for tensor in inputs if len(tensor.spec.shape) > (1 if self.text == "seq_len" else 3)]
        if self.named:
            dimensions = self.named
        elif self.text == "seq_len":
            length = several[0].spec.shape[1] if several else None
            dimensions = tuple(Dimension(tensor.name, 1) for tensor in several if tensor.spec.shape[1] == length)
        else:
            backs = ((tensor, back) for tensor in several for back in (2, 1))
            dimensions = tuple(Dimension(tensor.name, len(tensor.spec.shape) - back) for tensor, back in backs)
        sizes = {_size(dimension, inputs) for dimension in dimensions}
        if len(sizes) != 1:
            raise InputError(f"cannot vary {self.text}: the inputs have no such dimension, or not of one size; {_HOW}")
        return dimensions

    def size(self, inputs: Sequence[InputTensor]) -> int:
        return _size(self.dimensions(inputs)[0], inputs)


def parse_vary(text: str) -> Vary:
    """Parse what `text` names; raises `InputError` when it cannot be read."""
    word = text.strip().lower()
    if word.replace(" ", "") in _BOTH:
        return Vary(CONTEXT, frontier=True)
    if word in (BATCH, CONTEXT, *_SEQUENCE, *_IMAGE):
        return Vary("seq_len" if word in _SEQUENCE else "image" if word in _IMAGE else word)
    dimensions = []
    for part in text.split(","):
        name, _, dim = map(str.strip, part.partition(":"))
        if not name or not dim.isdecimal():
            raise InputError(f"cannot read {part!r} as something that varies: {_HOW}")
        if dim == "0":
            raise InputError(f"{part!r} is the batch: vary batch instead")
        dimensions.append(Dimension(name, int(dim)))
    return Vary(text.strip(), tuple(dimensions))


def _size(dimension: Dimension, inputs: Sequence[InputTensor]) -> int:
    tensor = next((tensor for tensor in inputs if tensor.name == dimension.name), None)
    if tensor is None:
        raise UnknownInputError("input", dimension.name, [tensor.name for tensor in inputs])
    if dimension.dim >= len(tensor.spec.shape):
        raise InputError(f"input {dimension.name!r} is {tensor.spec}: it has no dimension {dimension.dim}")
    size = tensor.spec.shape[dimension.dim]
    if size is None:
        raise InputError(f"input {dimension.name!r} is {tensor.spec}: dimension {dimension.dim} has no one size")
    return size


@dataclass(frozen=True, slots=True)
class VariedScript:
    """A script's `path` and its `arguments`, of which the one at `index` is ``prefix + value`` and varies.

    `name` is what the script calls it: ``--batch-size``, ``train.batch_size``.
    """

    path: str
    arguments: tuple[str, ...]
    name: str
    index: int
    prefix: str
    value: int

    @classmethod
    def of(cls, path: str, arguments: Sequence[str], name: str) -> VariedScript:
        """The script whose argument `name` varies, as ``--batch-size 8``, ``--batch-size=8``, ``-b 8`` or ``a.b=8``.

        Dashes in front, and dashes for underscores, make no difference. Raises `InputError` where there is no such
        argument, or where it is no whole number above 0.
        """
        names: list[str] = []
        for index, text in enumerate(arguments):
            head, equals, value = text.partition("=")
            if not (equals or text.startswith("-")):
                continue
            names.append(head)
            if _plain(head) != _plain(name):
                continue
            if not equals:
                value = arguments[index + 1] if index + 1 < len(arguments) else ""
            if not value.isdecimal() or not int(value):
                raise InputError(
                    f"{head} is {repr(value) if value else 'empty'}: what varies has to be a whole number above 0"
                )
            index, prefix = (index, f"{head}=") if equals else (index + 1, "")
            return cls(path, tuple(arguments), head, index=index, prefix=prefix, value=int(value))
        hint = f" ({suggestion(name, names)})" if names else ""
        raise InputError(f"the script gets no argument {name!r}{hint}: add it with a value after {path}")

    def command(self, value: int | None = None) -> str:
        """The command line, with another value of the argument that varies."""
        return " ".join((self.path, *(self.arguments if value is None else self.valued(value))))

    def valued(self, value: int) -> tuple[str, ...]:
        return (*self.arguments[: self.index], f"{self.prefix}{value}", *self.arguments[self.index + 1 :])


def _plain(name: str) -> str:
    return name.lstrip("-+").replace("_", "-")


# -- lengths that vary from batch to batch -----------------------------------------------------------------------------


DISTRIBUTIONS: Final = ("uniform", "normal", "lognormal")
_RANGE: Final = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s*(?::\s*(\w+)\s*)?")
_WRITTEN: Final = "write a number, 128..4096, 128..4096:lognormal, or the name of a file with a length in each line"


class Lengths(int):
    """Lengths of texts, as a number the longest. `samples` are those of a file, in order; without any, lengths between
    `shortest` and the longest have a `distribution`. A normal or lognormal one has its median in the middle, and both
    ends two standard deviations from there.
    """

    shortest: int
    distribution: str
    samples: tuple[int, ...]

    def __new__(
        cls, shortest: int, longest: int, distribution: str = "uniform", samples: Iterable[int] = ()
    ) -> Lengths:
        """Raise `InputError` for lengths that are no range, and for an unknown distribution."""
        if not 1 <= shortest <= longest:
            raise InputError(f"lengths from {shortest} to {longest}: they have to grow from at least 1")
        if distribution not in DISTRIBUTIONS:
            raise UnknownInputError("distribution", distribution, DISTRIBUTIONS)
        lengths = super().__new__(cls, longest)
        lengths.shortest, lengths.distribution, lengths.samples = shortest, distribution, tuple(samples)
        return lengths

    def batches(self, count: int, size: int) -> list[int]:
        """The longest text of each of `count` batches of `size` texts, in an order that is drawn once."""
        number = count * size
        if self.samples:
            lengths = [self.samples[index % len(self.samples)] for index in range(number)]
        else:
            lengths = [self._quantile((index + 0.5) / number) for index in range(number)]
            random.Random(0).shuffle(lengths)
        return [max(lengths[start : start + size]) for start in range(0, number, size)]

    def _quantile(self, share: float) -> int:
        low, high = float(self.shortest), float(self)
        if self.distribution == "uniform":
            return round(low + share * (high - low))
        deviations = max(-2.0, min(2.0, NormalDist().inv_cdf(share))) / 2  # -1 and 1 are the ends
        if self.distribution == "normal":
            return round((low + high) / 2 + deviations * (high - low) / 2)
        return round(math.sqrt(low * high) * math.pow(high / low, deviations / 2))


def parse_lengths(text: str | int) -> int:
    """The number that `text` is, or the `Lengths` that it names; raises `InputError` for anything else."""
    text = str(text).strip()
    if text.lstrip("-").isdecimal():
        return int(text)
    if match := _RANGE.fullmatch(text):
        return Lengths(int(match[1]), int(match[2]), match[3] or "uniform")
    if not os.path.isfile(text):
        raise InputError(f"cannot read the sequence length {text!r}: {_WRITTEN}")
    try:
        words = Path(text).read_text("utf-8").split()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read lengths from {text}: {first_line(error)}") from None
    if wrong := next((word for word in words if not word.isdecimal()), None):
        raise InputError(f"{text} has {quoted(wrong)} where a length in tokens should be: one whole number per line")
    if not (samples := list(map(int, words))):
        raise InputError(f"{text} has no lengths: {_WRITTEN}")
    return Lengths(min(samples), max(samples), samples=samples)
