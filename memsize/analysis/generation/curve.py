"""Steps at lengths that were not traced: exact polynomials between those that were, checked where one was held out.

What an op allocates is a polynomial of the number of tokens, of degree 1 in a decode step and 2 in a prefill, between
the lengths at which something changes: a window is full, a kernel is chosen. Some of it changes from one length to the
next and comes back some lengths later, where rows are padded. So lengths are held out: where one does not agree to the
byte, those a period apart are taken together, and then each range is cut in two, down to lengths that are all traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from memsize.analysis.generation.exact import weighted
from memsize.analysis.generation.steps import Step

if TYPE_CHECKING:
    from memsize.analysis.generation.steps import Sizes

_MOST_TRACED = 64
"""Lengths that are traced for one range at most."""


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
        """The first of its lengths."""
        return self.lengths[0]

    @property
    def high(self) -> int:
        """The last of its lengths."""
        return self.lengths[-1]

    def at(self, length: int) -> Step:
        """The step at a length of the piece."""
        if length in self.nodes:
            return self.nodes[length]
        if not self.exact:  # the longest is the largest
            return self.nodes[self.high]
        return Step(self.nodes[self.low].structure, self._sizes(length))

    def agrees(self, length: int, step: Step) -> bool:
        """Whether a step that was traced is what the piece has at its length, to the byte."""
        return _agree(self.nodes, length, step)

    def _sizes(self, length: int) -> Sizes:
        if len(self.nodes) == 2:
            return self.nodes[self.low].sizes + self._slope * (length - self.low)
        found = through({node: each.sizes for node, each in self.nodes.items()}, length)
        assert found is not None, "what a held-out length agreed to is whole"
        return found

    @cached_property
    def _slope(self) -> Sizes:
        return (self.nodes[self.high].sizes - self.nodes[self.low].sizes) // (self.high - self.low)


@dataclass(eq=False)
class Curve:
    """The steps at some lengths, few of which are traced with `trace`; `degree` is that of the polynomials."""

    trace: Callable[[int], Step]
    degree: int
    traced: dict[int, Step] = field(default_factory=dict)

    def pieces(self, lengths: Sequence[int], period: int = 1) -> list[Piece]:
        """Pieces that hold all of `lengths`, which ascend by one step; each is of lengths that are `period` apart where
        those between them differ.
        """
        if len(lengths) <= self.degree + 1:
            return [Piece([each], {each: self._step(each)}) for each in lengths]
        apart = len(lengths) - 1
        nodes = {node: self._step(node) for node in (lengths[apart * n // self.degree] for n in range(self.degree + 1))}
        held = [each for each in _held_out(lengths, period) if each not in nodes]
        if all(_agree(nodes, each, self._step(each)) for each in held):
            return [Piece(lengths, nodes)]
        if len(self.traced) >= _MOST_TRACED:
            return [Piece(lengths, nodes, exact=False)]
        if period > 1 and len(lengths) > period and self._repeats(held[0], period):
            return [piece for start in range(period) for piece in self.pieces(lengths[start::period])]
        middle = (len(lengths) + 1) // 2
        return [*self.pieces(lengths[:middle], period), *self.pieces(lengths[middle:], period)]

    def _repeats(self, length: int, period: int) -> bool:
        """Whether the steps from `length` on are alike after a period, and not before."""
        first, *between = (self._step(length + apart).structure for apart in range(period))
        return self._step(length + period).structure == first and any(each != first for each in between)

    def _step(self, length: int) -> Step:
        if length not in self.traced:
            self.traced[length] = self.trace(length)
        return self.traced[length]


def _held_out(lengths: Sequence[int], period: int) -> list[int]:
    """Lengths to check a polynomial at: in the middle; and where things repeat, one at their period and one beside."""
    middle = len(lengths) // 2
    if period == 1 or len(lengths) <= 2 * period:
        return [lengths[middle]]
    at = next(each for each in lengths[middle:] if each % period == 0)
    return [at, at + 1]


def _agree(nodes: dict[int, Step], length: int, step: Step) -> bool:
    if any(node.structure != step.structure for node in nodes.values()):
        return False
    sizes = through({node: each.sizes for node, each in nodes.items()}, length)
    return sizes is not None and bool((sizes == step.sizes).all())


def through(nodes: dict[int, Sizes], length: int) -> Sizes | None:
    """The values at `length` of the polynomials through `nodes`, by Lagrange; None where one of them is not whole."""
    return weighted([_weight(node, nodes, length) for node in nodes], list(nodes.values()))


def _weight(node: int, nodes: dict[int, Sizes], length: int) -> Fraction:
    weight = Fraction(1)
    for other in nodes:
        if other != node:
            weight *= Fraction(length - other, node - other)
    return weight
