"""Try remedies on runs of training steps and generations: choose the table, and measure each variant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from memsize.analysis.fit.generation_remedies import GENERATION_REMEDIES, fewer_sequences, on_larger_gpu
from memsize.analysis.fit.generation_runs import GenerationRunCache
from memsize.analysis.fit.run_cache import NewRuns, RunCache, RunVariant
from memsize.analysis.fit.step_remedies import VariantRemedy, accumulation, more_gpus, numbers_of_parts, step_remedies
from memsize.analysis.generation.generation_rows import GenerationRequest
from memsize.analysis.generation.generator import Generator
from memsize.analysis.remedies import Ladder, Need, RemedySearch, try_remedies
from memsize.analysis.runner import Runner
from memsize.device.budget import budget_of, larger_budgets
from memsize.processes.workers import Workers
from memsize.records.fit import Budget, Remedied, RemedyRow
from memsize.records.generation import GenerationRow
from memsize.spec.vary import Vary
from memsize.workloads.generation import Prompts

SEGMENT: Final = 2 << 20
"""A remedy that saves less than one segment saves nothing that shows on the GPU."""


def remedies_of(variant: RunVariant) -> tuple[VariantRemedy, ...]:
    """Return the remedies that are tried for a variant."""
    return GENERATION_REMEDIES if variant.generation else step_remedies(variant.parallel)


def ladders_of(
    search: RemedySearch[RunVariant], size: int, *, splits: bool, larger: Sequence[Budget] = ()
) -> Iterator[Ladder[RunVariant]]:
    """Yield the ladders that are tried after the table: parts of the batch (if `splits`), GPUs of `larger` budgets, and
    more GPUs.
    """
    base = search.base
    if splits and (base.training or base.generation) and size > 1:
        in_parts = fewer_sequences if base.generation else accumulation
        yield Ladder(map(in_parts, numbers_of_parts(size)), until="last")
    if larger and not search.need.fits:
        enough = (budget for budget in larger if budget.allocator >= search.need.bytes)
        yield Ladder(map(on_larger_gpu, enough), until="enough")
    yield Ladder(more_gpus(base.parallel), until="no gain")


@dataclass(eq=False)
class RemedyWork:
    """The work of finding remedies for variants of `runs`, which several processes share.

    A variant must fit into its `capacity`.
    """

    runs: RunCache

    def remedy_alone(self, base: RunVariant, size: int, name: str) -> tuple[RemedyRow, NewRuns]:
        """Measure the remedy `name` at one size; return its row and the runs that this took."""
        before = self.runs.new_runs()
        remedy = next(remedy for remedy in remedies_of(base) if remedy.name == name)
        return self._search(base, size).alone(remedy), self.runs.new_runs(before)

    def remedied(self, workers: Workers, base: RunVariant, size: int, budget: Budget, *, splits: bool) -> Remedied:
        """Try all remedies at one size; `workers` serve this object, or one with its methods. `splits`: the size is a
        batch that can be split.
        """
        runs, rows, remedies = self.runs, [], remedies_of(base)
        for row, new_runs in workers.answers([("remedy_alone", base, size, remedy.name) for remedy in remedies]):
            rows.append(row)
            runs.adopt(new_runs)
        search = self._search(base, size)
        larger = larger_budgets(budget, runs.stack) if runs.generates else ()
        ladders = ladders_of(search, size, splits=splits, larger=larger)
        return try_remedies(
            search, remedies, ladders, scenario=base.scenario.name, gpu=budget.name, size=size, rows=rows
        )

    def _search(self, base: RunVariant, size: int) -> RemedySearch[RunVariant]:
        def measure(variant: RunVariant) -> Need:
            return Need(self.runs.run(variant, size).needs(variant.capacity), variant.capacity)

        return RemedySearch(base, measure, SEGMENT)


def remedies_for_generations(
    runner: Runner,
    prompts: Prompts,
    request: GenerationRequest,
    progress: Callable[[str], None],
    rows: Sequence[GenerationRow],
    generators: Collection[Generator],
) -> Remedied | None:
    """Try remedies for the first row that does not fit, of the first scenario that ran.

    Returns None where all rows fit; for a loop of the user's, which has no other cache and no chunks; and for assisted
    generations, where each variant would take as long as the row itself. Traces of `generators` are used again.
    """
    ran = [row for row in rows if row.estimate is not None]
    short = next((row for row in ran if row.scenario == ran[0].scenario and not row.fits), None)
    if short is None or request.loop or request.generations[0].draft:
        return None
    generation = next(generation for generation in request.generations if generation.prompt == short.prompt)
    scenario = next(scenario for scenario in request.scenarios if scenario.name == short.scenario)
    runs = GenerationRunCache(
        runner.name,
        runner.model,
        prompts=prompts,
        generation=generation,
        batch=short.batch,
        vary=Vary(),
        progress=progress,
        stack=runner.stack,
        generators=generators,
        whole=runner.whole,
    )
    budget = budget_of(runner.gpu, runner.stack, request.config.memory_fraction)
    base = RunVariant(scenario, runner.gpu, config=request.config, generation=generation, capacity=budget.allocator)
    runs.run(base, short.batch)  # once, for all workers
    work = RemedyWork(runs)
    with Workers(work, progress) as workers:
        runs.progress = workers.announce
        for generator in generators:
            generator.progress = workers.announce
        return work.remedied(workers, base, short.batch, budget, splits=True)
