"""Build the run of a whole generation from a few traced steps.

The prefill of the prompt is traced, and the first decode steps. Later steps differ in their sizes alone: the step after
`n` tokens has the sizes of the same step after a prompt that is longer by as many tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from memsize.analysis.generation.step_polynomials import (
    ALIGNED,
    Curve,
    GenerationPoint,
    GenerationRange,
    Piece,
    StepPolynomial,
    Steps,
    polynomial_in,
)
from memsize.analysis.generation.steps import Step, columns_of, steps_of
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
from memsize.workloads.generation import GenerationSteps, Prompts, positions
from memsize.workloads.kv_caches import CachedLayer, OnGpuWithHost, refuse_missing_cache

_FIRST_STEPS = 4
"""The decode steps that are traced after the prompt of a generation."""
_FEW_STEPS = 16
"""In a generation of fewer decode steps each is traced."""
_FEW_COMPILED_STEPS = 1024
"""The same of a compiled model: these take as long as compiling it for another trace."""
_BEGIN = 2
"""The decode step that all later ones are like, in most models, but for their sizes."""
_STEADY = 3
"""The first decode step of a repeating pattern: it frees no storages of the prefill."""

_OUT_OF_RANGE = "is out of range"
_TOO_LONG = "{} has a table of {:,} positions, and {:,} tokens are asked for: lower --prompt or --max-new-tokens"


class Sample(NamedTuple):
    """The traced beginning of a generation: its steps, the setup first, and the trace without them."""

    steps: tuple[Step, ...]
    trace: Trace


@dataclass(frozen=True, eq=False)
class Generated:
    """A generation as one run: its beginning, the `pieces` of its later steps, and the layers of the cache after the
    last step and `before` it.

    `lengths` are the numbers of tokens at which steps were traced, the prompt included. `exact`: each figure that was
    not traced lies on a polynomial that agreed with a held-out length to the byte. `pinned` are the bytes that PyTorch
    pins on the host for an offloaded cache.
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
        """The trace, built anew each time, its storages and events in columns."""
        columns = columns_of(_run(self.begun.steps, self.pieces, self.generation))
        return replace(self.begun.trace, **columns)

    def noted(self, note: str) -> Generated:
        rest = self.begun.trace
        return replace(self, begun=self.begun._replace(trace=replace(rest, notes=(*rest.notes, note))))

    @property
    def flow(self) -> AllocationEvents:
        return flow_of(self.trace)

    @property
    def per_token(self) -> int:
        """Bytes that the last step added to the cache."""
        return sum(layer.bytes for layer in self.cached) - sum(layer.bytes for layer in self.before)


Traced = tuple[Generation, int, int | None]
"""A generation to trace, its batch, and how many of its decode steps (None: all)."""


@dataclass(eq=False)
class Generator:
    """The generations of one model under one scenario, which share their traces (`samples`).

    `ahead` is called with traces that will be needed; it may make them in other processes and add them to `samples`.
    """

    runner: Runner
    prompts: Prompts
    scenario: Scenario
    progress: Callable[[str], None] = lambda _: None
    edits: tuple[Callable[[Setup], Setup], ...] = ()
    loop: Callable[..., Any] | None = None
    ahead: Callable[[Sequence[Traced]], None] = lambda _: None
    samples: dict[Traced, Sample] = field(default_factory=dict)
    _polynomials: list[tuple[Generation, StepPolynomial]] = field(default_factory=list)

    def run(self, generation: Generation, batch: int) -> Generated:
        """Build a generation for `batch` sequences. Raises what running the model raises."""
        if self._is_encoder_decoder:
            generation = replace(generation, begun=1)
        if generation.steps < self._few_steps or generation.is_periodic:
            return _generated(self.sample((generation, batch, None)), generation)
        if generation.draft and (repeating := self._repeating(generation, batch)):
            return repeating
        sample = self.sample((generation, batch, _FIRST_STEPS))
        steady = _steady(sample.steps)
        if steady is None:
            return _generated(self.sample((generation, batch, None)), generation)
        polynomial = self._polynomial(generation, batch)
        if polynomial and (piece := polynomial.piece(batch, generation.start + _FIRST_STEPS, generation.last)):
            return _generated(sample, generation, pieces=[piece], lengths=polynomial.lengths)
        curve = Curve(lambda length: self.sample((generation.after(length - steady), batch, steady)).steps[-1], 1)
        pieces = curve.pieces(range(generation.start + _FIRST_STEPS, generation.last + 1), period=ALIGNED)
        return _generated(sample, generation, pieces=pieces, lengths={node for piece in pieces for node in piece.nodes})

    def derive(self, generation: Generation, batch: int) -> Generated:
        """Build a generation without tracing if a polynomial covers it, its layers those of the largest; else `run`."""
        polynomial = self._polynomial(generation, batch)
        start, last = generation.start, generation.last
        beginning = polynomial and polynomial.at(GenerationPoint(batch, start, last))
        piece = polynomial and polynomial.piece(batch, start + _FIRST_STEPS, last)
        if not (polynomial and beginning and piece):
            return self.run(generation, batch)
        numbers = range(polynomial.generations.begin + 1, _FIRST_STEPS + 1)
        later = (polynomial.step(batch, start + number, last) for number in numbers)
        inputs = input_tensors(self.prompts(generation.prompt).call(batch))
        trace = replace(self._largest(polynomial, generation).trace, inputs=inputs, batch_size=batch)
        begun = Sample((*beginning, *filter(None, later)), trace)
        return _generated(begun, generation, pieces=[piece], lengths=polynomial.lengths)

    def cover(
        self,
        generation: Generation,
        batches: Sequence[int],
        prompts: Sequence[int],
        *,
        between: bool = False,
        splits: int = 2,
    ) -> None:
        """Find polynomials of the generations like `generation` at some batches and prompts, both ascending.

        One polynomial is to cover all of them, or with `between` also all prompts between them. Where the generations
        differ, halves are tried, as often as `splits`. A batch of 1 takes other code paths, so it is covered by itself.
        """
        irregular = (
            generation.num_beams > 1 or generation.is_periodic or generation.prefill_chunk_size or generation.draft
        )
        # The prompt of an encoder-decoder is not what the decoder reads.
        if generation.steps < self._few_steps or irregular or self._is_encoder_decoder:
            return
        if batches[0] == 1 < len(batches):
            self.cover(generation, batches[:1], prompts, between=between, splits=splits)
            batches = batches[1:]
        if len(batches) * len(prompts) < 2:  # nothing is shared
            return
        apart = 1 if between or len({prompt % ALIGNED for prompt in prompts}) > 1 else ALIGNED
        generations = GenerationRange(
            (batches[0], batches[-1]),
            (prompts[0], prompts[-1]),
            new=generation.steps + 1,
            begin=_BEGIN,
            apart=apart,
        )

        def beginnings(points: Sequence[GenerationPoint]) -> list[Steps]:
            needed = [_traced(generation, generations, point) for point in points]
            self.ahead([traced for traced in needed if traced not in self.samples])
            return [self.sample(traced).steps[: generations.begin + 2] for traced in needed]

        polynomial = polynomial_in(generations, beginnings)
        if polynomial:
            if (_steady(self._largest(polynomial, generation).steps) or _FIRST_STEPS) <= _BEGIN:
                self._polynomials.append((replace(generation, prompt=1), polynomial))
        elif splits:
            for fewer, shorter in _parts(batches, prompts, apart):
                self.cover(generation, fewer, shorter, splits=splits - 1)

    def covers(self, generation: Generation, batch: int) -> bool:
        return self._polynomial(generation, batch) is not None

    def sample(self, traced: Traced) -> Sample:
        """Trace the beginning of a generation, once."""
        if traced not in self.samples:
            generation, batch, steps = traced
            refuse_missing_cache(self.runner.model, generation)
            self.progress(f"{self.scenario.name}, batch {batch:,}, a prompt of {generation.prompt:,}")
            edits = self.edits
            if generation.is_offloaded:
                edits = (*edits, OnGpuWithHost(self.runner.gpu))
            workload = GenerationSteps(generation, steps, edits=edits, loop=self.loop)
            try:
                trace = self.runner.with_inputs(self.prompts(generation.prompt), batch).run(workload, self.scenario)
            except ForwardError as error:
                most, tokens = positions(self.runner.model), generation.prompt + generation.max_new_tokens
                if most and most < tokens and _OUT_OF_RANGE in str(error):
                    raise InputError(_TOO_LONG.format(self.runner.name, most, tokens)) from error
                raise
            rest = replace(trace, phases=(), storages=(), events=())
            self.samples[traced] = Sample(tuple(steps_of(trace, workload.record.steps)), rest)
        return self.samples[traced]

    def _repeating(self, generation: Generation, batch: int) -> Generated | None:
        """Build a generation whose steps repeat after 8: from first, last, and two in the middle that must agree."""
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
            Piece(lengths[residue::ALIGNED], {lengths[residue]: low, lengths[residue - ALIGNED]: last})
            for residue, (low, last) in enumerate(pairs)
        ]
        held_out = dict(enumerate(sample(middle, 2).steps[-2:], generation.start + middle))
        agree = all(pieces[(length - lengths[0]) % ALIGNED].agrees(length, step) for length, step in held_out.items())
        before = zip(end.steps[-ALIGNED - _BEGIN : -ALIGNED], begun.steps[-_BEGIN:], strict=True)
        if not agree or any(one.structure.storages != other.structure.storages for one, other in before):
            return None
        return _generated(begun, generation, pieces=pieces, lengths={*held_out, lengths[0], lengths[-1]})

    def _largest(self, polynomial: StepPolynomial, generation: Generation) -> Sample:
        """Return the generation of the most sequences after the longest prompt."""
        generations = polynomial.generations
        return self.sample(_traced(generation, generations, generations.largest))

    def _polynomial(self, generation: Generation, batch: int) -> StepPolynomial | None:
        similar = (one for of, one in self._polynomials if of == replace(generation, prompt=1))
        return next((one for one in similar if one.generations.contains(batch, generation.prompt)), None)

    @property
    def _few_steps(self) -> int:
        return _FEW_COMPILED_STEPS if self.scenario.compile else _FEW_STEPS

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.runner.model, "config", None), "is_encoder_decoder", False))


def _traced(generation: Generation, generations: GenerationRange, point: GenerationPoint) -> Traced:
    proposed = generation.draft.tokens if generation.draft else 0
    longer = replace(generation, prompt=point.start, max_new_tokens=point.last - point.start + 1 + proposed)
    return longer, point.batch, _FIRST_STEPS if point == generations.largest else generations.begin


def _parts(batches: Sequence[int], prompts: Sequence[int], apart: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield parts of the batches and prompts that may be more alike: prompts a multiple of 8 apart, else halves."""
    if apart < ALIGNED:
        for residue in sorted({prompt % ALIGNED for prompt in prompts}):
            yield batches, [prompt for prompt in prompts if prompt % ALIGNED == residue]
    elif len(prompts) > 1:
        middle = (len(prompts) + 1) // 2
        yield from ((batches, prompts[:middle]), (batches, prompts[middle:]))
    else:
        middle = (len(batches) + 1) // 2
        yield from ((batches[:middle], prompts), (batches[middle:], prompts))


def _steady(steps: Sequence[Step]) -> int | None:
    """Find the first decode step that all later ones are like, but for sizes; None where even the last two differ.

    The events of such a step are about storages of the setup, the step, and earlier steps that allocated the same.
    """
    decode = [step.structure for step in steps[1:]]  # the prefill first
    last = decode[-1]
    oldest = max((event.age for event in last.events), default=0)
    for number in range(oldest + 1, len(decode) - 1):
        alike = all(structure == last for structure in decode[number:])
        if alike and all(structure.storages == last.storages for structure in decode[number - oldest : number]):
            return number
    return None


def _generated(
    sample: Sample, generation: Generation, *, pieces: Sequence[Piece] = (), lengths: Set[int] = frozenset()
) -> Generated:
    traced = sample.steps[: generation.steps + 2]
    steps = list(_run(traced, pieces, generation))
    last, before = steps[-1][0], steps[-2][0]
    pinned: Counter[int] = Counter()  # of each block size as many as are in use when most tensors are on the host
    for step, _ in steps if generation.is_offloaded else ():
        pinned |= Counter(pinned_block(size) for layer in step.cached for size in layer.hosted)
    return Generated(
        begun=Sample(traced, sample.trace),
        generation=generation,
        pieces=tuple(pieces),
        cached=last.cached,
        before=before.cached if len(steps) > 2 else last.cached,
        lengths=tuple(sorted({*lengths, generation.start})),
        # A beam search keeps tables whose size is that of the whole search: they do not follow from the length alone.
        exact=all(piece.exact for piece in pieces) and (generation.num_beams == 1 or not pieces),
        pinned=sum(size * count for size, count in pinned.items()),
    )


def _run(begun: Steps, pieces: Sequence[Piece], generation: Generation) -> Iterator[tuple[Step, Sequence[int] | None]]:
    """Yield all steps of a generation, the setup first, and the events that are recorded of each (None: all).

    Between the ends of a piece memory grows evenly, so the peak is at an end. There, small tensors that a step
    allocates and frees are dropped: the allocator has had cached blocks for them since the first step.
    """
    yield from ((step, None) for step in begun)
    positions_of = {length: (piece, index) for piece in pieces for index, length in enumerate(piece.lengths)}
    lasting = {id(piece): _lasting(piece) for piece in pieces}
    for length in sorted(positions_of):
        piece, index = positions_of[length]
        if length > generation.start + len(begun) - 2:
            whole = index < 2 or index == len(piece.lengths) - 1
            yield piece.at(length), None if whole else lasting[id(piece)]


def _lasting(piece: Piece) -> list[int]:
    low, high = piece.nodes[piece.low], piece.nodes[piece.high]
    events = low.structure.events
    left: dict[int, int] = {}
    for event, delta in zip(events, low.deltas.tolist(), strict=True):
        if event.age == 0:
            left[event.slot] = left.get(event.slot, 0) + delta
    start = len(events)
    passing = {
        slot
        for slot, size in left.items()
        if size == 0 and max(low.sizes[start + slot], high.sizes[start + slot]) <= SMALL
    }
    return [number for number, event in enumerate(events) if event.age != 0 or event.slot not in passing]
