"""The run of a whole generation, from a few steps of it that are traced.

The prompt's prefill is traced, and the first decode steps after it. Further steps differ in their sizes alone: those of
the step after `n` tokens are what the same step does after a prompt that is that much longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memsize.analysis.generation.curve import Curve, Piece
from memsize.analysis.generation.prompts import Prompts
from memsize.analysis.generation.steps import Step, put_together, steps_of
from memsize.analysis.runner import Runner
from memsize.device.config import SMALL
from memsize.records.trace import Trace
from memsize.spec.generation import Generation
from memsize.spec.scenario import Scenario
from memsize.workloads.generation import CachedLayer, GenerationSteps

LOOKED = 4
"""The decode steps that are traced after the prompt that was asked for, all of which count."""
_ALL = 16
"""New tokens up to which every step is traced."""
_PERIOD = 8
"""The tokens after which what a step takes may repeat: attention wants masks whose rows are multiples of 8."""


class Sample(NamedTuple):
    """The traced beginning of a generation: its steps, the setup first, and the record that they were cut from."""

    steps: tuple[Step, ...]
    trace: Trace


@dataclass(frozen=True)
class Generated:
    """A generation as one run: its trace, and what the cache held after the last step and `before` it.

    `lengths` are those of the prompt, and of the tokens at the end of the steps that were traced for it. `exact`: every
    figure that was not traced itself lies on a polynomial that a held-out length agreed with to the byte.
    """

    trace: Trace
    cached: tuple[CachedLayer, ...]
    before: tuple[CachedLayer, ...]
    lengths: tuple[int, ...]
    exact: bool

    @property
    def per_token(self) -> int:
        """Bytes that the last step added to the cache."""
        return _held(self.cached) - _held(self.before)


class Generator:
    """The generations of one model under one scenario. What is traced for one is there for the others."""

    def __init__(
        self, runner: Runner, prompts: Prompts, scenario: Scenario, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.runner = runner
        self.prompts = prompts
        self.scenario = scenario
        self.say = say
        self._samples: dict[tuple[Generation, int, int | None], Sample] = {}

    def run(self, generation: Generation, batch: int) -> Generated:
        """A generation for `batch` sequences. Raises what running the model raises."""
        if getattr(getattr(self.runner.model, "config", None), "is_encoder_decoder", False):
            generation = replace(generation, begun=1)
        if generation.new <= _ALL or generation.is_periodic:
            return _generated(self._sample(generation, batch, None), generation)
        sample = self._sample(generation, batch, LOOKED)
        steady = _steady(sample.steps)
        if steady is None:
            return _generated(self._sample(generation, batch, None), generation)
        curve = Curve(lambda length: self._sample(generation.after(length - steady), batch, steady).steps[-1], 1)
        lengths = range(generation.start + LOOKED, generation.last + 1)
        return _generated(sample, generation, curve.pieces(lengths, period=_PERIOD))

    def _sample(self, generation: Generation, batch: int, steps: int | None) -> Sample:
        key = generation, batch, steps
        if key not in self._samples:
            self.say(f"{self.scenario.name}, batch {batch:,}, a prompt of {generation.prompt:,}")
            cached: list[tuple[CachedLayer, ...]] = []
            workload = GenerationSteps(generation, steps, lambda number, layers: _put(cached, number, layers))
            trace = self.runner.given(self.prompts(generation.prompt), batch).run(workload, self.scenario)
            self._samples[key] = Sample(tuple(steps_of(trace, cached)), trace)
        return self._samples[key]


def _put(cached: list[tuple[CachedLayer, ...]], number: int, layers: tuple[CachedLayer, ...]) -> None:
    del cached[number:]
    cached.append(layers)


def _steady(steps: Sequence[Step]) -> int | None:
    """The first decode step that all later ones are like, but for their sizes; None where even the last two differ.

    Such a step is about storages of the setup, its own, and those of steps before it that made the same as it.
    """
    decode = [step.structure for step in steps[1:]]  # the prefill first
    last = decode[-1]
    oldest = max((each.age for each in last.events), default=0)
    for number in range(oldest + 1, len(decode) - 1):
        alike = all(structure == last for structure in decode[number:])
        if alike and all(structure.storages == last.storages for structure in decode[number - oldest : number]):
            return number
    return None


def _generated(sample: Sample, generation: Generation, pieces: Sequence[Piece] = ()) -> Generated:
    traced = sample.steps[: generation.new + 1]
    steps = [(step, None) for step in traced] + list(_later(pieces, after=generation.start + len(traced) - 2))
    put = put_together(steps)
    last, before = steps[-1][0], steps[-2][0]
    lengths = {node for piece in pieces for node in piece.nodes} | {generation.start}
    return Generated(
        trace=replace(sample.trace, phases=put.phases, storages=put.storages, events=put.events),
        cached=last.cached,
        before=before.cached if len(steps) > 2 else last.cached,
        lengths=tuple(sorted(lengths)),
        # A beam search keeps tables whose size is that of the whole search: they do not follow from the length alone.
        exact=all(piece.exact for piece in pieces) and (generation.beams == 1 or not pieces),
    )


def _held(layers: Sequence[CachedLayer]) -> int:
    return sum(layer.bytes for layer in layers)


def _later(pieces: Sequence[Piece], after: int) -> Iterator[tuple[Step, Sequence[int] | None]]:
    """The steps of the lengths beyond `after`, each whole near the ends of its piece.

    In between, memory grows evenly: the most is held at an end. There the small tensors that a step makes and frees are
    left out, for which the allocator has cached blocks since the first step.
    """
    placed = {length: (piece, place) for piece in pieces for place, length in enumerate(piece.lengths)}
    lasting = {id(piece): _lasting(piece) for piece in pieces}
    for length in sorted(placed):
        piece, place = placed[length]
        if length > after:
            whole = place < 2 or place == len(piece.lengths) - 1
            yield piece.at(length), None if whole else lasting[id(piece)]


def _lasting(piece: Piece) -> list[int]:
    """The events of a step about large storages, and about those that outlive it."""
    low, high = piece.nodes[piece.low], piece.nodes[piece.high]
    events = low.structure.events
    balance: dict[int, int] = {}
    for happening, delta in zip(events, low.deltas.tolist(), strict=True):
        if happening.age == 0:
            balance[happening.place] = balance.get(happening.place, 0) + delta
    start = len(events)
    passing = {
        place
        for place, left in balance.items()
        if left == 0 and max(low.sizes[start + place], high.sizes[start + place]) <= SMALL
    }
    return [index for index, each in enumerate(events) if each.age != 0 or each.place not in passing]
