"""Polynomials through whole numbers, in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsize.analysis.generation.steps import Sizes

Powers = tuple[int, ...]
"""A term of a polynomial: the power of each variable."""


class Polynomials:
    """The polynomials with some `terms` that are given by their values at `points`: as many, none on a curve of others.

    Raises `ValueError` where the points do not determine them.
    """

    def __init__(self, points: Sequence[tuple[int, ...]], terms: Sequence[Powers]) -> None:
        self._terms = terms
        self._inverse = _inverse([[Fraction(each) for each in self._values(point)] for point in points])

    def weights(self, at: tuple[int, ...]) -> list[Fraction]:
        """What the values at the points count at another: their weighted sum is the value there."""
        values = self._values(at)
        columns = zip(*self._inverse, strict=True)
        return [sum((a * b for a, b in zip(values, column, strict=True)), Fraction()) for column in columns]

    def _values(self, point: tuple[int, ...]) -> list[int]:
        return [math.prod(x**power for x, power in zip(point, term, strict=True)) for term in self._terms]


def weighted(weights: Sequence[Fraction], values: Sequence[Sizes]) -> Sizes | None:
    """The weighted sum of vectors of whole numbers; None where it is not whole itself."""
    import numpy as np

    whole = math.lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * whole) for weight in weights]
    most = sum(abs(count) * int(np.abs(value).max(initial=0)) for count, value in zip(counts, values, strict=True))
    kind = np.int64 if most < 1 << 62 else object
    total = np.add.reduce([value.astype(kind) * count for count, value in zip(counts, values, strict=True)])
    if (total % whole).any():
        return None
    return np.asarray(total // whole, dtype=np.int64)


def _inverse(rows: Sequence[Sequence[Fraction]]) -> list[list[Fraction]]:
    """The inverse of a matrix, by Gauss and Jordan."""
    size = len(rows)
    work = [[*row, *(Fraction(int(column == number)) for column in range(size))] for number, row in enumerate(rows)]
    for column in range(size):
        pivot = next((number for number in range(column, size) if work[number][column]), None)
        if pivot is None:
            raise ValueError("the points do not determine a polynomial with these terms")
        work[column], work[pivot] = work[pivot], work[column]
        work[column] = [each / work[column][column] for each in work[column]]
        for number in range(size):
            factor = work[number][column]
            if number != column and factor:
                work[number] = [a - factor * b for a, b in zip(work[number], work[column], strict=True)]
    return [row[size:] for row in work]
