"""Predict untraced steps of generations by exact polynomial interpolation between traced ones.

What an op allocates is a polynomial of the number of tokens, of degree 1 in a decode step and 2 in a prefill, between
the lengths at which something changes: a window is full, a kernel is chosen. Polynomials have integer values and are
computed in exact arithmetic. Each is checked at held-out lengths: it is used only if it agrees to the byte.

`Curve` interpolates one step over lengths. `StepPolynomial` interpolates the beginnings of generations (the setup, the
prefill, and decode steps up to one that all later ones are like) over batch, prompt length and final length, for which
a static cache makes room. It is of degree 1 in each, and has two terms more where attention stores its scores. The
step after `n` tokens is the last of a beginning that is `n` tokens long, so one polynomial gives all steps of all
batches and prompts in its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Final, NamedTuple

from memsize.analysis.generation.steps import Step

if TYPE_CHECKING:
    from memsize.analysis.generation.steps import Sizes

Steps = tuple[Step, ...]
"""The beginning of a generation: its setup, its prefill and some decode steps."""
Powers = tuple[int, ...]
"""A term of a polynomial: the power of each variable."""
ALIGNED: Final = 8
"""The tokens after which the memory of steps may repeat: attention wants masks whose rows are multiples of 8."""
_MOST_TRACED: Final = 64
"""Lengths that are traced for one range at most."""


# -- polynomials through integers -------------------------------------------------------------------------------------


class Polynomials:
    """The polynomials with some `terms` that their values at as many `points` determine; else a `ValueError`."""

    def __init__(self, points: Sequence[tuple[int, ...]], terms: Sequence[Powers]) -> None:
        self._terms = terms
        self._inverse = _inverse([[Fraction(value) for value in self._values(point)] for point in points])

    @classmethod
    def of_degree(cls, points: Iterable[int]) -> Polynomials:
        """Return the polynomials of one variable through all of `points`, of the least degree."""
        nodes = [(point,) for point in points]
        return cls(nodes, [(power,) for power in range(len(nodes))])

    def at(self, point: tuple[int, ...], values: Iterable[Sizes]) -> Sizes | None:
        """Interpolate the `values` at the points; None where a result is no integer."""
        return weighted(self.weights(point), list(values))

    def weights(self, point: tuple[int, ...]) -> list[Fraction]:
        """Return the weights of the values at the points, whose weighted sum is the value at `point`."""
        values = self._values(point)
        columns = zip(*self._inverse, strict=True)
        return [sum((a * b for a, b in zip(values, column, strict=True)), Fraction()) for column in columns]

    def _values(self, point: tuple[int, ...]) -> list[int]:
        return [math.prod(x**power for x, power in zip(point, term, strict=True)) for term in self._terms]


def weighted(weights: Sequence[Fraction], values: Sequence[Sizes]) -> Sizes | None:
    """Sum vectors of integers with weights; None where a sum is no integer."""
    import numpy as np

    denominator = math.lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * denominator) for weight in weights]
    most = sum(abs(count) * int(np.abs(value).max(initial=0)) for count, value in zip(counts, values, strict=True))
    kind = np.int64 if most < 1 << 62 else object
    total = np.add.reduce([value.astype(kind) * count for count, value in zip(counts, values, strict=True)])
    if (total % denominator).any():
        return None
    return np.asarray(total // denominator, dtype=np.int64)


def _inverse(rows: Sequence[Sequence[Fraction]]) -> list[list[Fraction]]:
    size = len(rows)
    work = [[*row, *(Fraction(int(column == number)) for column in range(size))] for number, row in enumerate(rows)]
    for column in range(size):
        pivot = next((number for number in range(column, size) if work[number][column]), None)
        if pivot is None:
            raise ValueError("the points do not determine a polynomial with these terms")
        work[column], work[pivot] = work[pivot], work[column]
        work[column] = [value / work[column][column] for value in work[column]]
        for number in range(size):
            factor = work[number][column]
            if number != column and factor:
                work[number] = [a - factor * b for a, b in zip(work[number], work[column], strict=True)]
    return [row[size:] for row in work]


# -- one step over lengths --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Piece:
    """The steps at `lengths`, which ascend: a polynomial through the steps at `nodes`.

    `exact`: a held-out length agreed to the byte, or every length was traced.
    """

    lengths: Sequence[int]
    nodes: dict[int, Step]
    exact: bool = True

    @property
    def low(self) -> int:
        return self.lengths[0]

    @property
    def high(self) -> int:
        return self.lengths[-1]

    def at(self, length: int) -> Step:
        if self.exact and len(self.nodes) == 2 and length not in self.nodes:
            sizes = self.nodes[self.low].sizes + self._slope * (length - self.low)
            return Step(self.nodes[self.low].structure, sizes)
        step = self.interpolated(length)
        assert step is not None, "a held-out length has agreed, so all are integers"
        return step

    def interpolated(self, length: int) -> Step | None:
        """Return the step at a length of the piece; None where its sizes would be no integers."""
        if length in self.nodes:
            return self.nodes[length]
        if not self.exact:  # the longest is the largest
            return self.nodes[self.high]
        sizes = self._polynomials.at((length,), (step.sizes for step in self.nodes.values()))
        return None if sizes is None else Step(self.nodes[self.low].structure, sizes)

    def agrees(self, length: int, step: Step) -> bool:
        """Whether the piece predicts a traced step to the byte."""
        if any(node.structure != step.structure for node in self.nodes.values()):
            return False
        sizes = self._polynomials.at((length,), (node.sizes for node in self.nodes.values()))
        return sizes is not None and bool((sizes == step.sizes).all())

    @cached_property
    def _slope(self) -> Sizes:
        return (self.nodes[self.high].sizes - self.nodes[self.low].sizes) // (self.high - self.low)

    @cached_property
    def _polynomials(self) -> Polynomials:
        return Polynomials.of_degree(self.nodes)


@dataclass(eq=False)
class Curve:
    """A step as a function of the length; few lengths are traced with `trace`. `degree` is that of the polynomials."""

    trace: Callable[[int], Step]
    degree: int
    traced: dict[int, Step] = field(default_factory=dict)

    def pieces(self, lengths: Sequence[int], period: int = 1) -> list[Piece]:
        """Cut `lengths`, which ascend by one step, into pieces that agree with held-out lengths.

        Where one does not agree, lengths that are a `period` apart are taken together, if steps repeat after it (rows
        are padded); else the range is cut in two, down to lengths that are all traced.
        """
        if len(lengths) <= self.degree + 1:
            return [Piece([length], {length: self._step(length)}) for length in lengths]
        last = len(lengths) - 1
        nodes = {node: self._step(node) for node in (lengths[last * n // self.degree] for n in range(self.degree + 1))}
        between = (length for length in (*lengths[len(lengths) // 2 :], *lengths) if length not in nodes)
        held_out = [length for length in _held_out(lengths, period) if length not in nodes] or [next(between)]
        piece = Piece(lengths, nodes)
        if all(piece.agrees(length, self._step(length)) for length in held_out):
            return [piece]
        if len(self.traced) >= _MOST_TRACED:
            return [Piece(lengths, nodes, exact=False)]
        if period > 1 and len(lengths) > period and self._repeats(held_out[0], period):
            return [piece for start in range(period) for piece in self.pieces(lengths[start::period])]
        middle = (len(lengths) + 1) // 2
        return [*self.pieces(lengths[:middle], period), *self.pieces(lengths[middle:], period)]

    def _repeats(self, length: int, period: int) -> bool:
        first, *between = (self._step(length + apart).structure for apart in range(period))
        return self._step(length + period).structure == first and any(other != first for other in between)

    def _step(self, length: int) -> Step:
        if length not in self.traced:
            self.traced[length] = self.trace(length)
        return self.traced[length]


def _held_out(lengths: Sequence[int], period: int) -> list[int]:
    """Choose lengths to check a polynomial at: the middle; with a period, a multiple of it near there and the next."""
    middle = len(lengths) // 2
    if period == 1 or len(lengths) <= 2 * period:
        return [lengths[middle]]
    multiple = next(length for length in lengths[middle:] if length % period == 0)
    return [multiple, multiple + 1]


# -- beginnings over batches, prompts and final lengths ---------------------------------------------------------------


class GenerationPoint(NamedTuple):
    """A generation: its sequences, the tokens that each reads first, and the tokens that each has at the end."""

    batch: int
    start: int
    last: int


@dataclass(frozen=True)
class GenerationRange:
    """The generations of `new` tokens between two batches and between two prompts, both ascending.

    A beginning has `begin` decode steps. Prompts are `apart` tokens apart: 1, or 8 where a static cache makes the rows
    of a mask as long as the last token demands.
    """

    batches: tuple[int, int]
    prompts: tuple[int, int]
    new: int
    begin: int
    apart: int = 1

    @property
    def largest(self) -> GenerationPoint:
        """The largest batch after the longest prompt."""
        return self.nodes(scores=False)[0]

    def contains(self, batch: int, prompt: int) -> bool:
        (few, many), (short, long) = self.batches, self.prompts
        return few <= batch <= many and short <= prompt <= long and (prompt - short) % self.apart == 0

    def nodes(self, scores: bool) -> list[GenerationPoint]:
        """List generations that determine a polynomial: the same starts and ends for both batches."""
        short, long = (prompt + self.new - 1 for prompt in self.prompts)
        ends = [(self.prompts[1], long), (long - self.begin, long), (self.prompts[0], short)]
        if scores:
            ends += [(short - self.begin, short), ((self.prompts[0] + short) // 2, short)]
        both = product(dict.fromkeys(reversed(self.batches)), dict.fromkeys(ends))
        return [GenerationPoint(batch, *end) for batch, end in both]

    def terms(self, scores: bool) -> list[Powers]:
        """List the terms of a polynomial through as many nodes, without variables that are constant in the range."""
        ends = [(0, 0), (1, 0)] + [(0, 1)] * self._is_long
        if scores:
            ends += [(2, 0)] + [(1, 1)] * self._is_long
        return [(batch, *end) for batch, end in product((0, 1) if self.batches[0] < self.batches[1] else (0,), ends)]

    @property
    def held_out(self) -> list[GenerationPoint]:
        """Generations to check a polynomial at: in the middle, at a multiple of 8 tokens and next to one."""
        (few, many), (short, long) = self.batches, self.prompts
        batch, prompt = (few + many) // 2, short + (long - short) // 2 // ALIGNED * ALIGNED
        last = prompt + self.new - 1
        start = (prompt + last) // 2 // ALIGNED * ALIGNED
        beside = 1 if self.apart == 1 and short < long else 0
        return [GenerationPoint(batch, start, last), GenerationPoint(min(batch + 1, many), start + 1, last + beside)]

    @property
    def _is_long(self) -> bool:
        return self.prompts[0] < self.prompts[1]


@dataclass(frozen=True, eq=False)
class StepPolynomial:
    """The beginnings in a range, all of one structure, as the polynomial through the beginnings at its nodes."""

    generations: GenerationRange
    nodes: Mapping[GenerationPoint, Steps]
    scores: bool

    @property
    def lengths(self) -> set[int]:
        """The numbers of tokens at which steps were traced."""
        starts = {point.start for point in (*self.nodes, *self.generations.held_out)}
        return starts | {start + self.generations.begin for start in starts}

    def at(self, point: GenerationPoint) -> Steps | None:
        """Return a beginning; None where the polynomial is no integer."""
        if point in self.nodes:
            return self.nodes[point]
        sizes = self._polynomials.at(point, map(_sizes, self.nodes.values()))
        if sizes is None:
            return None
        steps = next(iter(self.nodes.values()))
        cuts = pairwise(accumulate((len(step.sizes) for step in steps), initial=0))
        return tuple(Step(step.structure, sizes[low:high]) for step, (low, high) in zip(steps, cuts, strict=True))

    def agrees(self, point: GenerationPoint, steps: Steps) -> bool:
        """Whether the polynomial predicts a traced beginning to the byte."""
        predicted = self.at(point)
        return predicted is not None and bool((_sizes(predicted) == _sizes(steps)).all())

    def step(self, batch: int, length: int, last: int) -> Step | None:
        """Return the decode step after which each sequence has `length` tokens."""
        beginning = self.at(GenerationPoint(batch, length - self.generations.begin, last))
        return beginning[-1] if beginning else None

    def piece(self, batch: int, low: int, last: int) -> Piece | None:
        """Return the decode steps from `low` to `last` tokens; None where a node is no integer."""
        lengths, degree = range(low, last + 1), 2 if self.scores else 1
        nodes = [lengths[(len(lengths) - 1) * part // degree] for part in range(degree + 1)]
        steps = {node: step for node in nodes if (step := self.step(batch, node, last))}
        return Piece(lengths, steps) if len(steps) == len(nodes) else None

    @cached_property
    def _polynomials(self) -> Polynomials:
        return Polynomials(list(self.nodes), self.generations.terms(self.scores))


def polynomial_in(
    generations: GenerationRange, trace: Callable[[Sequence[GenerationPoint]], Sequence[Steps]]
) -> StepPolynomial | None:
    """Find the polynomial of a range; None where the held-out generations disagree. `trace` returns beginnings."""
    points = [*generations.nodes(scores=False), *generations.held_out]
    traced = dict(zip(points, trace(points), strict=True))
    for scores in (False, True):
        nodes = generations.nodes(scores)
        missing = [node for node in nodes if node not in traced]
        traced |= zip(missing, trace(missing), strict=True)
        first, *others = ([step.structure for step in steps] for steps in traced.values())
        if any(structures != first for structures in others):
            return None
        polynomial = StepPolynomial(generations, {node: traced[node] for node in nodes}, scores)
        if all(polynomial.agrees(point, steps) for point, steps in traced.items() if point not in polynomial.nodes):
            return polynomial
    return None


def _sizes(steps: Steps) -> Sizes:
    import numpy as np

    return np.concatenate([step.sizes for step in steps])
