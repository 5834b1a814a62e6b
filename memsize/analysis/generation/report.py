"""What generation holds, row by row: scenarios, batches and prompts, each as one whole run on a card."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from memsize.analysis.findings.generation import RULES
from memsize.analysis.generation.generator import Generated, Generator
from memsize.analysis.generation.prompts import Prompts
from memsize.analysis.runner import Runner
from memsize.device.config import AllocatorConfig
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.internals.isolation import collector_paused
from memsize.internals.workers import Workers
from memsize.records.aggregates import split_phase
from memsize.records.codec import plain
from memsize.records.generation import CachedLayers, GenerationReport, GenerationRow, Phase
from memsize.records.trace import Trace
from memsize.spec.generation import Generation
from memsize.spec.scenario import Scenario
from memsize.workloads.generation import DECODE, PREFILL, CachedLayer

_WEIGHTS = ("parameter", "buffer")


@dataclass(frozen=True)
class GenerationRequest:
    """What is asked: each of `generations` at each of `batches` under each of `scenarios`.

    `default` says that the scenarios are the usual ones: those that store the same are then left out.
    """

    generations: Sequence[Generation]
    batches: Sequence[int]
    scenarios: Sequence[Scenario]
    config: AllocatorConfig = field(default_factory=AllocatorConfig)


@dataclass(frozen=True)
class Rows:
    """The rows of one scenario and batch; of the one with the highest peak also its trace."""

    rows: tuple[GenerationRow, ...]
    largest: Trace | None = None
    error: Exception | None = None


def report_generation(
    runner: Runner, prompts: Prompts, request: GenerationRequest, notes: Sequence[str], say: Callable[[str], None]
) -> GenerationReport:
    """The answer to `request`. A scenario that fails is reported in its own rows.

    Raises `ForwardError`, `ScenarioError` or `InputError` where no scenario can be run.
    """
    asked = [("rows", scenario, batch) for scenario in request.scenarios for batch in request.batches]
    with collector_paused(), Workers(_Work(runner, prompts, request, say), say) as workers:
        found: list[Rows] = list(workers.each(asked))
    rows = tuple(row for each in found for row in each.rows)
    if all(row.estimate is None for row in rows):
        raise next(each.error for each in found if each.error)
    traces = [each.largest for each in found if each.largest]
    largest = max(traces, key=_most)
    return GenerationReport(
        model=runner.name,
        card=runner.gpu,
        inputs=largest.inputs,
        generation_rows=rows,
        findings=RULES.findings(rows),
        notes=tuple(dict.fromkeys((*notes, *largest.notes, *_beyond(runner, request.generations)))),
        assumptions=largest.assumptions,
        asked=request.generations[-1].arguments,
        allocator=json.dumps(plain(request.config)),
        trace=largest,
    )


def _beyond(runner: Runner, generations: Sequence[Generation]) -> Iterable[str]:
    """A note where the model is asked for more tokens than it has positions for."""
    config = getattr(runner.model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    tokens = max(generation.prompt + generation.new for generation in generations)
    if isinstance(positions, int) and tokens > positions and not getattr(config, "is_encoder_decoder", False):
        yield f"the model has positions for {positions:,} tokens: its answers to {tokens:,} have no meaning"


class _Work:
    """The rows of a report, piece by piece."""

    def __init__(
        self, runner: Runner, prompts: Prompts, request: GenerationRequest, say: Callable[[str], None]
    ) -> None:
        self.runner = runner
        self.prompts = prompts
        self.request = request
        self.say = say

    def rows(self, scenario: Scenario, batch: int) -> Rows:
        """The rows of one scenario at one batch."""
        generator = Generator(self.runner, self.prompts, scenario, self.say)
        rows: list[GenerationRow] = []
        largest: Trace | None = None
        for generation in self.request.generations:
            row = GenerationRow(scenario.name, scenario.title, batch, generation.prompt, generation.new)
            try:
                generated = generator.run(generation, batch)
            except (ScenarioError, ForwardError, InputError) as error:
                return Rows((*rows, replace(row, reason=str(error))), largest, error)
            row = self._row(row, generated)
            if largest is None or _most(generated.trace) > _most(largest):
                largest = generated.trace
            rows.append(row)
        return Rows(tuple(rows), largest)

    def _row(self, row: GenerationRow, generated: Generated) -> GenerationRow:
        trace = generated.trace
        decode = _phase(trace, DECODE)
        return replace(
            row,
            weights=sum(storage.bytes for storage in trace.storages if storage.role in _WEIGHTS),
            prefill=_phase(trace, PREFILL),
            decode=decode,
            cache=sum(layer.bytes for layer in generated.cached),
            per_token=generated.per_token,
            transient=max(decode.peak - decode.end, 0),
            layers=tuple(_kinds(generated, row.batch)),
            estimate=estimate_gpu(trace, self.runner.gpu, config=self.request.config),
            traced=generated.lengths,
            exact=generated.exact,
        )


def _phase(trace: Trace, name: str) -> Phase:
    """The most that tensors hold during the phases called `name`, and what is left at the end of the last."""
    inside = {index for index, label in enumerate(trace.phases) if split_phase(label)[0] == name}
    live = accumulate(event.delta for event in trace.events)
    held = [level for event, level in zip(trace.events, live, strict=True) if event.phase in inside]
    return Phase(max(held), held[-1]) if held else Phase(0, 0)


def _most(trace: Trace) -> int:
    return max(accumulate(event.delta for event in trace.events), default=0)


def _kinds(generated: Generated, batch: int) -> Iterable[CachedLayers]:
    """The layers of the cache by their kind, for one sequence."""
    pairs = list(zip(generated.cached, generated.before, strict=True))
    for kind in dict.fromkeys(layer.kind for layer in generated.cached):
        alike: list[tuple[CachedLayer, CachedLayer]] = [pair for pair in pairs if pair[0].kind == kind]
        held, before = (sum(layer.bytes for layer in layers) for layers in zip(*alike, strict=True))
        yield CachedLayers(kind, len(alike), held // batch, (held - before) // batch)
