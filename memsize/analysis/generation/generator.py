"""The run of a whole generation, from a few steps of it that are traced.

The prompt's prefill is traced, and the first decode steps after it. Further steps differ in their sizes alone: those of
the step after `n` tokens are what the same step does after a prompt that is that much longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from memsize.analysis.generation.curve import Curve, Piece
from memsize.analysis.generation.run_record import put_together
from memsize.analysis.generation.step_polynomials import (
    ALIGNED,
    GenerationPoint,
    GenerationRange,
    StepPolynomial,
    Steps,
    law_of,
)
from memsize.analysis.generation.steps import Step, steps_of
from memsize.analysis.runner import Runner
from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.allocator_config import SMALL
from memsize.errors import ForwardError, InputError
from memsize.model.input_tensors import input_tensors
from memsize.records.trace import Trace
from memsize.spec.generation import Generation
from memsize.spec.scenario import Scenario
from memsize.tracing.run import Setup
from memsize.virtual.host_memory import pinned_block
from memsize.workloads.caches import CachedLayer, on_gpu_with_host, refuse_missing_cache
from memsize.workloads.generation import GenerationSteps, Prompts, positions

LOOKED = 4
"""The decode steps that are traced after the prompt that was asked for, all of which count."""
_ALL = 16
"""Decode steps below which each of them is traced."""
_BEGIN = 2
"""The decode step that all later ones are alike, in most models, but for their sizes."""
_STEADY = 3
"""The decode step from which on those that repeat are: none is about storages of a prefill."""

_OUT_OF_RANGE = "is out of range"
_TOO_LONG = "{} has a table of {:,} positions, and {:,} tokens are asked for: take fewer with --prompt or --new"


class Sample(NamedTuple):
    """The traced beginning of a generation: its steps, the setup first, and the record that they were cut from."""

    steps: tuple[Step, ...]
    trace: Trace


@dataclass(frozen=True, eq=False)
class Generated:
    """A generation as one run: how it begins, the `pieces` that go on from there, and what the cache held after the
    last step and `before` it.

    `lengths` are those of the prompt, and of the tokens at the end of the steps that were traced for it. `exact`: every
    figure that was not traced itself lies on a polynomial that a held-out length agreed with to the byte. `pinned` is
    what PyTorch keeps pinned on the host for an offloaded cache.
    """

    begun: Sample
    generation: Generation
    pieces: tuple[Piece, ...]
    cached: tuple[CachedLayer, ...]
    before: tuple[CachedLayer, ...]
    lengths: tuple[int, ...]
    exact: bool
    pinned: int = 0

    @property
    def trace(self) -> Trace:
        """Its record, put together each time, its storages and events in columns."""
        put = put_together(_run(self.begun.steps, self.pieces, self.generation))
        return replace(self.begun.trace, phases=put.phases, storages=put.storages, events=put.events, lines=put.lines)

    def noted(self, note: str) -> Generated:
        """The same with a note in its record."""
        rest = self.begun.trace
        return replace(self, begun=self.begun._replace(trace=replace(rest, notes=(*rest.notes, note))))

    @property
    def flow(self) -> AllocationEvents:
        """The events of its record."""
        return flow_of(self.trace)

    @property
    def per_token(self) -> int:
        """Bytes that the last step added to the cache."""
        return _held(self.cached) - _held(self.before)


Traced = tuple[Generation, int, int | None]
"""What is traced: a generation, its batch, and how many decode steps of it (None: all)."""


class Generator:
    """The generations of one model under one scenario. What is traced for one is there for the others.

    `ahead` is told what is going to be traced, and may have it done elsewhere and `adopt` it.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: Prompts,
        scenario: Scenario,
        say: Callable[[str], None] = lambda _: None,
        edits: tuple[Callable[[Setup], Setup], ...] = (),
        loop: Callable[..., Any] | None = None,
    ) -> None:
        self.runner = runner
        self.prompts = prompts
        self.scenario = scenario
        self.say = say
        self.edits = edits
        self.loop = loop
        self.ahead: Callable[[Sequence[Traced]], None] = lambda _: None
        self.samples: dict[Traced, Sample] = {}
        self._laws: list[tuple[Generation, StepPolynomial]] = []

    def run(self, generation: Generation, batch: int) -> Generated:
        """A generation for `batch` sequences. Raises what running the model raises."""
        if self._is_encoder_decoder:
            generation = replace(generation, begun=1)
        if generation.steps < _ALL or generation.is_periodic:
            return _generated(self.sample((generation, batch, None)), generation)
        if generation.draft and (repeating := self._repeating(generation, batch)):
            return repeating
        sample = self.sample((generation, batch, LOOKED))
        steady = _steady(sample.steps)
        if steady is None:
            return _generated(self.sample((generation, batch, None)), generation)
        law = self._law(generation, batch)
        if law and (piece := law.piece(batch, generation.start + LOOKED, generation.last)):
            return _generated(sample, generation, [piece], law.lengths)
        curve = Curve(lambda length: self.sample((generation.after(length - steady), batch, steady)).steps[-1], 1)
        pieces = curve.pieces(range(generation.start + LOOKED, generation.last + 1), period=ALIGNED)
        return _generated(sample, generation, pieces, {node for piece in pieces for node in piece.nodes})

    def derive(self, generation: Generation, batch: int) -> Generated:
        """A generation of which nothing need be traced where a law covers it: its record then says of layers what
        that of another does. Else as `run` does it.
        """
        law = self._law(generation, batch)
        begun = law and _begun(law, generation, batch)
        piece = law and law.piece(batch, generation.start + LOOKED, generation.last)
        if not (law and begun and piece):
            return self.run(generation, batch)
        inputs = input_tensors(self.prompts(generation.prompt).call(batch))
        trace = replace(self._largest(law, generation).trace, inputs=inputs, batch_size=batch)
        return _generated(Sample(begun, trace), generation, [piece], law.lengths)

    def cover(
        self,
        asked: Generation,
        batches: Sequence[int],
        prompts: Sequence[int],
        *,
        between: bool = False,
        splits: int = 2,
    ) -> None:
        """Find laws of the generations like `asked` at some batches and prompts, both ascending: of all of them
        together or, where they differ, of halves, as often as `splits`. One sequence makes other steps than several.

        With `between`, they are to be of all prompts between these too.
        """
        if asked.steps < _ALL or asked.beams > 1 or asked.is_periodic or asked.chunk or asked.draft:
            return
        if self._is_encoder_decoder:  # whose prompt is not what the decoder reads
            return
        if batches[0] == 1 < len(batches):
            self.cover(asked, batches[:1], prompts, between=between, splits=splits)
            batches = batches[1:]
        if len(batches) * len(prompts) < 2:  # nothing is shared
            return
        apart = 1 if between or len({prompt % ALIGNED for prompt in prompts}) > 1 else ALIGNED
        box = GenerationRange((batches[0], batches[-1]), (prompts[0], prompts[-1]), asked.steps + 1, _BEGIN, apart)
        if law := law_of(box, lambda places: self._beginnings(asked, box, places)):
            if (_steady(self._largest(law, asked).steps) or LOOKED) <= _BEGIN:
                self._laws.append((replace(asked, prompt=1), law))
        elif splits:
            for fewer, shorter in _parts(batches, prompts, apart):
                self.cover(asked, fewer, shorter, splits=splits - 1)

    def covers(self, generation: Generation, batch: int) -> bool:
        """Whether a law tells of a generation."""
        return self._law(generation, batch) is not None

    def sample(self, traced: Traced) -> Sample:
        """The beginning of a generation."""
        if traced not in self.samples:
            generation, batch, steps = traced
            refuse_missing_cache(self.runner.model, generation)
            self.say(f"{self.scenario.name}, batch {batch:,}, a prompt of {generation.prompt:,}")
            cached: list[tuple[CachedLayer, ...]] = []
            edits = self.edits
            if generation.is_offloaded:
                edits = (*edits, partial(on_gpu_with_host, self.runner.gpu))
            workload = GenerationSteps(generation, steps, partial(_put, cached), edits, self.loop)
            try:
                trace = self.runner.with_inputs(self.prompts(generation.prompt), batch).run(workload, self.scenario)
            except ForwardError as error:
                most, tokens = positions(self.runner.model), generation.prompt + generation.new
                if most and most < tokens and _OUT_OF_RANGE in str(error):
                    raise InputError(_TOO_LONG.format(self.runner.name, most, tokens)) from error
                raise
            rest = replace(trace, phases=(), storages=(), events=())
            self.samples[traced] = Sample(tuple(steps_of(trace, cached)), rest)
        return self.samples[traced]

    def _repeating(self, generation: Generation, batch: int) -> Generated | None:
        """A generation whose steps differ from one to the next and are alike after 8 of them: rows of masks are padded
        to a multiple of 8. None where they aren't.

        Traced are those at its beginning and at its end, and two in the middle that have to agree.
        """
        most = _STEADY + ALIGNED - 1
        first = most + (generation.steps - most) % ALIGNED
        if generation.steps < first + 2 * ALIGNED:
            return None
        middle, high = (first + generation.steps) // 2, generation.steps - ALIGNED + 1

        def sample(number: int, steps: int) -> Sample:
            return self.sample((generation.after(generation.start + number - _STEADY), batch, _STEADY + steps - 1))

        begun, end = self.sample((generation, batch, first)), sample(high, ALIGNED)
        pairs = list(zip(begun.steps[-ALIGNED:], end.steps[-ALIGNED:], strict=True))
        lengths = range(generation.start + first - ALIGNED + 1, generation.last + 1)
        pieces = [
            Piece(lengths[place::ALIGNED], {lengths[place]: low, lengths[place - ALIGNED]: last})
            for place, (low, last) in enumerate(pairs)
        ]
        held = dict(enumerate(sample(middle, 2).steps[-2:], generation.start + middle))
        agreed = (pieces[(each - lengths[0]) % ALIGNED].agrees(each, step) for each, step in held.items())
        before = zip(end.steps[-ALIGNED - _BEGIN : -ALIGNED], begun.steps[-_BEGIN:], strict=True)
        if not all(agreed) or any(one.structure.storages != other.structure.storages for one, other in before):
            return None
        return _generated(begun, generation, pieces, {*held, lengths[0], lengths[-1]})

    def _beginnings(self, asked: Generation, box: GenerationRange, places: Sequence[GenerationPoint]) -> list[Steps]:
        wanted = [_traced(asked, box, place) for place in places]
        self.ahead([each for each in wanted if each not in self.samples])
        return [self.sample(each).steps[: box.begin + 2] for each in wanted]

    def _largest(self, law: StepPolynomial, generation: Generation) -> Sample:
        """The generation of the most sequences after the longest prompt."""
        return self.sample(_traced(generation, law.box, law.box.largest))

    def _law(self, generation: Generation, batch: int) -> StepPolynomial | None:
        alike = (law for asked, law in self._laws if asked == replace(generation, prompt=1))
        return next((law for law in alike if law.box.holds(batch, generation.prompt)), None)

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.runner.model, "config", None), "is_encoder_decoder", False))


def _traced(asked: Generation, box: GenerationRange, place: GenerationPoint) -> Traced:
    """What is traced at a place: more steps of the largest, which tell from which on they are alike."""
    proposed = asked.draft.tokens if asked.draft else 0
    generation = replace(asked, prompt=place.start, new=place.last - place.start + 1 + proposed)
    return generation, place.batch, LOOKED if place == box.largest else box.begin


def _begun(law: StepPolynomial, generation: Generation, batch: int) -> Steps | None:
    """The steps that `run` would trace of a generation."""
    start, last = generation.start, generation.last
    begun = law.at(GenerationPoint(batch, start, last))
    later = (law.step(batch, start + number, last) for number in range(law.box.begin + 1, LOOKED + 1))
    return begun and (*begun, *filter(None, later))


def _parts(batches: Sequence[int], prompts: Sequence[int], apart: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Batches and prompts in parts that may be more alike: prompts a multiple of 8 apart, else halves."""
    if apart < ALIGNED:
        residues = sorted({prompt % ALIGNED for prompt in prompts})
        yield from ((batches, [each for each in prompts if each % ALIGNED == residue]) for residue in residues)
    elif len(prompts) > 1:
        yield from ((batches, half) for half in _halves(prompts))
    else:
        yield from ((half, prompts) for half in _halves(batches))


def _halves(some: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = (len(some) + 1) // 2
    return some[:middle], some[middle:]


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


def _generated(
    sample: Sample, generation: Generation, pieces: Sequence[Piece] = (), lengths: Set[int] = frozenset()
) -> Generated:
    traced = sample.steps[: generation.steps + 2]
    steps = list(_run(traced, pieces, generation))
    last, before = steps[-1][0], steps[-2][0]
    return Generated(
        begun=Sample(traced, sample.trace),
        generation=generation,
        pieces=tuple(pieces),
        cached=last.cached,
        before=before.cached if len(steps) > 2 else last.cached,
        lengths=tuple(sorted({*lengths, generation.start})),
        # A beam search keeps tables whose size is that of the whole search: they do not follow from the length alone.
        exact=all(piece.exact for piece in pieces) and (generation.beams == 1 or not pieces),
        pinned=_pinned(step for step, _ in steps) if generation.is_offloaded else 0,
    )


def _run(begun: Steps, pieces: Sequence[Piece], generation: Generation) -> Iterator[tuple[Step, Sequence[int] | None]]:
    """All steps of a generation, the setup first, and which of their events are counted (None: all)."""
    yield from ((step, None) for step in begun)
    yield from _later(pieces, after=generation.start + len(begun) - 2)


def _pinned(steps: Iterable[Step]) -> int:
    """What PyTorch keeps pinned for the tensors that are on the host at the end of each step, where most of them are:
    of each size of a block as many as were in use at one time.
    """
    most: Counter[int] = Counter()
    for step in steps:
        most |= Counter(pinned_block(size) for layer in step.cached for size in layer.hosted)
    return sum(size * count for size, count in most.items())


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
