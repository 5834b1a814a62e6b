"""Generations that were not traced: exact polynomials in their batch, start and end through those that were.

What the beginning of a generation allocates (the setup, the prefill, and decode steps up to one that all later ones are
like) is a polynomial of the sequences, of the tokens that are read first, and of those that there are at the end, of
which a static cache makes room for all. It is of degree 1 in each, and has two terms more where attention keeps its
scores. The step after `n` tokens is the last of a beginning that is `n` tokens long: one polynomial gives all steps of
all batches and prompts between those that were traced. It holds where others, held out, agree with it to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Final, NamedTuple

from memsize.analysis.generation.curve import Piece
from memsize.analysis.generation.exact import Polynomials, Powers, weighted
from memsize.analysis.generation.steps import Step

if TYPE_CHECKING:
    from memsize.analysis.generation.steps import Sizes

Steps = tuple[Step, ...]
"""The beginning of a generation: its setup, its prefill and some decode steps."""
ALIGNED: Final = 8
"""The tokens after which what a step takes may repeat: attention wants masks whose rows are multiples of 8."""


class GenerationPoint(NamedTuple):
    """A generation: its sequences, the tokens that each reads first, and those that it has at the end."""

    batch: int
    start: int
    last: int


@dataclass(frozen=True)
class GenerationRange:
    """The generations of `new` tokens between two batches and between two prompts, both ascending.

    `begin` is how many decode steps a beginning has. `apart` is 1, or 8 where it only has prompts a multiple of that
    apart: a static cache makes the rows of a mask as long as the last token demands.
    """

    batches: tuple[int, int]
    prompts: tuple[int, int]
    new: int
    begin: int
    apart: int = 1

    @property
    def largest(self) -> GenerationPoint:
        """Its largest batch after its longest prompt."""
        return self.nodes(scores=False)[0]

    def holds(self, batch: int, prompt: int) -> bool:
        """Whether so many sequences after such a prompt are among them."""
        (few, many), (short, long) = self.batches, self.prompts
        return few <= batch <= many and short <= prompt <= long and (prompt - short) % self.apart == 0

    def nodes(self, scores: bool) -> list[GenerationPoint]:
        """Generations that determine a polynomial: the same starts and ends for either batch."""
        short, long = (prompt + self.new - 1 for prompt in self.prompts)
        ends = [(self.prompts[1], long), (long - self.begin, long), (self.prompts[0], short)]
        if scores:
            ends += [(short - self.begin, short), ((self.prompts[0] + short) // 2, short)]
        both = product(dict.fromkeys(reversed(self.batches)), dict.fromkeys(ends))
        return [GenerationPoint(batch, *end) for batch, end in both]

    def terms(self, scores: bool) -> list[Powers]:
        """The terms of a polynomial through as many nodes, without what is the same in the whole box."""
        ends = [(0, 0), (1, 0)] + [(0, 1)] * self._is_long
        if scores:
            ends += [(2, 0)] + [(1, 1)] * self._is_long
        return [(batch, *end) for batch, end in product((0, 1) if self.batches[0] < self.batches[1] else (0,), ends)]

    @property
    def held_out(self) -> list[GenerationPoint]:
        """Generations to check a polynomial at: in the middle, at a multiple of 8 tokens and beside one."""
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
    """The beginnings in a box, all of one structure, by the polynomial through those at its nodes."""

    box: GenerationRange
    nodes: Mapping[GenerationPoint, Steps]
    scores: bool

    @property
    def lengths(self) -> set[int]:
        """The numbers of tokens that were traced for it."""
        starts = {place.start for place in (*self.nodes, *self.box.held_out)}
        return starts | {start + self.box.begin for start in starts}

    def at(self, place: GenerationPoint) -> Steps | None:
        """A beginning; None where the polynomial is no whole number."""
        if place in self.nodes:
            return self.nodes[place]
        sizes = weighted(self._polynomials.weights(place), list(map(_sizes, self.nodes.values())))
        if sizes is None:
            return None
        steps = next(iter(self.nodes.values()))
        cuts = self._cuts
        return tuple(Step(each.structure, sizes[low:high]) for each, (low, high) in zip(steps, cuts, strict=True))

    def step(self, batch: int, length: int, last: int) -> Step | None:
        """The decode step after which each sequence has `length` tokens."""
        found = self.at(GenerationPoint(batch, length - self.box.begin, last))
        return found[-1] if found else None

    def piece(self, batch: int, low: int, last: int) -> Piece | None:
        """The decode steps from `low` to `last` tokens; None where one at an end is no whole number."""
        lengths, degree = range(low, last + 1), 2 if self.scores else 1
        nodes = [lengths[(len(lengths) - 1) * part // degree] for part in range(degree + 1)]
        steps = {node: step for node in nodes if (step := self.step(batch, node, last))}
        return Piece(lengths, steps) if len(steps) == len(nodes) else None

    @cached_property
    def _polynomials(self) -> Polynomials:
        return Polynomials(list(self.nodes), self.box.terms(self.scores))

    @cached_property
    def _cuts(self) -> list[tuple[int, int]]:
        ends = [0]
        for step in next(iter(self.nodes.values())):
            ends.append(ends[-1] + len(step.sizes))
        return list(pairwise(ends))


def law_of(
    box: GenerationRange, traced: Callable[[Sequence[GenerationPoint]], Sequence[Steps]]
) -> StepPolynomial | None:
    """The law of a box, None where the held-out generations show none; `traced` gives the beginnings of some."""
    places = [*box.nodes(scores=False), *box.held_out]
    found = dict(zip(places, traced(places), strict=True))
    for scores in (False, True):
        nodes = box.nodes(scores)
        missing = [node for node in nodes if node not in found]
        found |= zip(missing, traced(missing), strict=True)
        if not _alike(found.values()):
            return None
        law = StepPolynomial(box, {node: found[node] for node in nodes}, scores)
        if all(_same(law.at(place), steps) for place, steps in found.items() if place not in law.nodes):
            return law
    return None


def _alike(beginnings: Iterable[Steps]) -> bool:
    first, *others = ([step.structure for step in steps] for steps in beginnings)
    return all(other == first for other in others)


def _sizes(steps: Steps) -> Sizes:
    import numpy as np

    return np.concatenate([step.sizes for step in steps])


def _same(found: Steps | None, traced: Steps) -> bool:
    return found is not None and bool((_sizes(found) == _sizes(traced)).all())
