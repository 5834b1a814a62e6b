"""Build the report of a generation: one row for each scenario, batch and prompt, each one whole run on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from memsize.analysis.findings.generation import RULES, Evidence
from memsize.analysis.generation.generator import Generated, Generator, Sample, Traced
from memsize.analysis.runner import Runner
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.processes.patches import collector_paused
from memsize.processes.workers import Workers
from memsize.records.aggregates import split_phase
from memsize.records.codec import plain
from memsize.records.columns import numbers, places
from memsize.records.fit import Remedied
from memsize.records.generation import CachedLayers, GenerationReport, GenerationRow, Phase
from memsize.records.trace import Trace
from memsize.spec.generation import Generation
from memsize.spec.scenario import Scenario
from memsize.workloads.generation import ASSISTANT, DECODE, PREFILL, Prompts, positions
from memsize.workloads.kv_caches import CachedLayer

_WEIGHTS = ("parameter", "buffer")
_NONE_RIGHT = "every proposed token is assumed to be rejected, the worst case"


@dataclass(frozen=True)
class GenerationRequest:
    """Each of `generations` at each of `batches` under each of `scenarios`. `loop` takes the place of `generate`."""

    generations: Sequence[Generation]
    batches: Sequence[int]
    scenarios: Sequence[Scenario]
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    loop: Callable[..., Any] | None = None

    @property
    def points(self) -> Iterable[Point]:
        """The scenario, batch and generation of each row."""
        return product(self.scenarios, self.batches, self.generations)


Point = tuple[Scenario, int, Generation]


class RowResult(NamedTuple):
    """A row, its point, the traces that were made for it, the trace without events whose layers and stored tensors are
    the row's, and the error if it has no figures.
    """

    point: Point
    row: GenerationRow
    samples: Mapping[Traced, Sample]
    begun: Trace | None = None
    error: Exception | None = None


def report_generation(
    runner: Runner,
    prompts: Prompts,
    request: GenerationRequest,
    notes: Sequence[str],
    progress: Callable[[str], None],
    remedies: Callable[[Sequence[GenerationRow], Collection[Generator]], Remedied | None] = lambda *_: None,
) -> GenerationReport:
    """Answer `request`. A scenario that fails is reported in its own rows. `remedies` is called with the rows.

    Raises `ForwardError`, `ScenarioError` or `InputError` where no scenario can be run.
    """
    work, draft = GenerationWork(runner, prompts, request), request.generations[-1].draft
    with collector_paused():
        with work.workers(progress) as workers:
            work.cover(workers)
        with work.workers(progress) as workers:  # which know all that was traced so far
            results: list[RowResult] = workers.answers([("row", *point) for point in request.points])
        rows = tuple(result.row for result in results)
        if all(row.estimate is None for row in rows):
            raise next(result.error for result in results if result.error)
        remedied = remedies(rows, work.generators.values())
        largest = work.trace(max(results, key=lambda result: getattr(result.row.estimate, "requested", 0)))
    config, most = getattr(runner.model, "config", None), positions(runner.model)
    tokens = max(generation.prompt + generation.max_new_tokens for generation in request.generations)
    beyond = f"the model has positions for {most or 0:,} tokens: at {tokens:,} its output is meaningless"
    is_beyond = most and tokens > most and not getattr(config, "is_encoder_decoder", False)
    return GenerationReport(
        model=runner.name,
        card=runner.gpu,
        inputs=largest.inputs,
        generation_rows=rows,
        findings=RULES.findings(
            Evidence(tuple(row for row in rows if row.estimate is not None), draft, remedied, _quantized(results))
        ),
        remedied=remedied,
        notes=tuple(dict.fromkeys((*notes, *largest.notes, *([beyond] if is_beyond else [])))),
        assumptions=(*largest.assumptions, *([_NONE_RIGHT] if draft else [])),
        asked=request.generations[-1].arguments,
        allocator=json.dumps(plain(request.config)),
        trace=largest,
    )


class GenerationWork:
    """The pieces of work of a report, which several processes share."""

    def __init__(self, runner: Runner, prompts: Prompts, request: GenerationRequest) -> None:
        self.request = request
        self.gpu = runner.gpu
        self.generators = {
            scenario.name: Generator(runner, prompts, scenario, loop=request.loop) for scenario in request.scenarios
        }

    def workers(self, progress: Callable[[str], None]) -> Workers:
        """Start processes that share the work."""
        workers = Workers(self, progress)
        for generator in self.generators.values():
            generator.progress = workers.announce
        return workers

    def cover(self, workers: Workers) -> None:
        """Trace the generations that the rows of a scenario share, several at a time."""
        generations = {generation.prompt: generation for generation in self.request.generations}
        for name, generator in self.generators.items():
            generator.ahead = partial(self._ahead, workers, name)
            with suppress(ScenarioError, ForwardError, InputError):  # its rows will report it
                generator.cover(next(iter(generations.values())), sorted({*self.request.batches}), sorted(generations))

    def _ahead(self, workers: Workers, name: str, missing: Sequence[Traced]) -> None:
        samples = workers.answers([("sample", name, traced) for traced in missing])
        self.generators[name].samples.update(zip(missing, samples, strict=True))

    def sample(self, name: str, traced: Traced) -> Sample:
        """Trace a generation under a scenario."""
        return self.generators[name].sample(traced)

    def row(self, scenario: Scenario, batch: int, generation: Generation) -> RowResult:
        row = GenerationRow(scenario.name, scenario.title, batch, generation.prompt, generation.max_new_tokens)
        generator = self.generators[scenario.name]
        before = set(generator.samples)
        begun: Trace | None = None
        try:
            generated = generator.derive(generation, batch)
            row, error = self._row(row, generated), None
            begun = generated.begun.trace if scenario.recipe == "quantized" else None
        except (ScenarioError, ForwardError, InputError) as raised:
            row, error = replace(row, reason=str(raised)), raised
        samples = {traced: sample for traced, sample in generator.samples.items() if traced not in before}
        return RowResult((scenario, batch, generation), row, samples, begun, error)

    def trace(self, result: RowResult) -> Trace:
        """Return the trace of the whole run behind a row."""
        scenario, batch, generation = result.point
        generator = self.generators[scenario.name]
        generator.samples.update(result.samples)
        trace = generator.run(generation, batch).trace
        return replace(trace, storages=tuple(trace.storages), events=tuple(trace.events))

    def _row(self, row: GenerationRow, generated: Generated) -> GenerationRow:
        trace = generated.trace
        prefill, decode = _phases(trace, PREFILL, DECODE)
        layers = {index for index, layer in enumerate(trace.layers) if layer.path.partition(".")[0] == ASSISTANT}
        weights = (trace.storages[index] for index in places(trace.storages, "role", _WEIGHTS)) if layers else ()
        return replace(
            row,
            weights=int(numbers(trace.storages, "bytes")[places(trace.storages, "role", _WEIGHTS)].sum()),
            assistant=sum(storage.bytes for storage in weights if storage.layer in layers),
            prefill=prefill,
            decode=decode,
            cache=sum(layer.bytes for layer in generated.cached),
            per_token=generated.per_token,
            hosted=sum(size for layer in generated.cached for size in layer.hosted),
            pinned=generated.pinned,
            transient=max(decode.peak - decode.end, 0),
            layers=tuple(_kinds(generated, row.batch)),
            estimate=estimate_gpu(trace, self.gpu, config=self.request.config),
            traced=generated.lengths,
            exact=generated.exact,
        )


def _quantized(results: Iterable[RowResult]) -> dict[str, Trace]:
    """The stored tensors and layers of each scenario that quantizes, in a trace without events."""
    return {result.row.scenario: result.begun for result in results if result.begun is not None}


def _phases(trace: Trace, *names: str) -> Iterator[Phase]:
    import numpy as np

    inside = np.array([split_phase(label)[0] for label in trace.phases])
    levels, phases = numbers(trace.events, "delta").cumsum(), numbers(trace.events, "phase")
    for name in names:
        live = levels[inside[phases] == name] if len(levels) else levels
        yield Phase(int(live.max()), int(live[-1])) if len(live) else Phase(0, 0)


def _kinds(generated: Generated, batch: int) -> Iterable[CachedLayers]:
    pairs = list(zip(generated.cached, generated.before, strict=True))
    for kind in dict.fromkeys(layer.kind for layer in generated.cached):
        alike: list[tuple[CachedLayer, CachedLayer]] = [pair for pair in pairs if pair[0].kind == kind]
        size, before = (sum(layer.bytes for layer in layers) for layers in zip(*alike, strict=True))
        yield CachedLayers(kind, len(alike), size // batch, (size - before) // batch)
