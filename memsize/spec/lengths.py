"""Sequence lengths that vary from batch to batch: a range, with a distribution, or the lengths in a file."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Final

from memsize.errors import InputError, UnknownInputError, first_line

DISTRIBUTIONS: Final = ("uniform", "normal", "lognormal")
_RANGE: Final = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s*(?::\s*(\w+)\s*)?")
_HOW: Final = "write a number, 128..4096, 128..4096:lognormal, or the name of a file with a length in each line"


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
        raise InputError(f"cannot read the sequence length {text!r}: {_HOW}")
    try:
        samples = [int(line) for line in Path(text).read_text("utf-8").split()]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read lengths from {text}: {first_line(error)}") from None
    if not samples:
        raise InputError(f"{text} has no lengths: {_HOW}")
    return Lengths(min(samples), max(samples), samples=samples)
