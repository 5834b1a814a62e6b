"""Try remedies on runs of training steps and generations: choose the table, and measure each variant. The remedies for
generations are here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from memsize.analysis.fit.optimized_models import Recompute, Share, autoencoders, keep_the_last_logits, repeated_blocks
from memsize.analysis.fit.run_cache import GenerationRunCache, NewRuns, RunCache, RunVariant
from memsize.analysis.fit.step_remedies import (
    BF16_PARAMETERS,
    CHUNK,
    EXPANDABLE_SEGMENTS,
    INT8_WEIGHTS,
    PIPELINE_REMEDIES,
    Facts,
    VariantRemedy,
    accumulation,
    edited,
    fewer_checkpoints,
    least_recomputation,
    memory_budgets,
    more_gpus,
    numbers_of_parts,
    quantized,
    remedy,
    step_remedies,
    switched,
)
from memsize.analysis.generation.generation_rows import GenerationRequest
from memsize.analysis.generation.generator import Generator
from memsize.analysis.remedies import Ladder, Need, NotApplicable, RemedySearch, try_remedies
from memsize.analysis.runner import Runner
from memsize.device.budget import budget_of, larger_budgets
from memsize.processes.workers import Workers
from memsize.records.fit import Budget, Remedied, RemedyRow
from memsize.records.generation import GenerationRow
from memsize.spec.scenario import COMPILED, scenario_named
from memsize.spec.vary import Vary
from memsize.units import format_bytes
from memsize.workloads.generation import Prompts

SEGMENT: Final = 2 << 20
"""A remedy that saves less than one segment saves nothing that shows on the GPU."""


def _with_cache(variant: RunVariant, cache: str, dtype: str | None = None) -> RunVariant:
    generation = variant.generation
    assert generation is not None, "remedies for generations are tried on them alone"
    chosen = generation.cache_implementation or ("quantized" if generation.kv_cache_dtype else None)
    if chosen not in (None, "dynamic"):
        raise NotApplicable(f"the cache is {chosen} already")
    return replace(variant, generation=replace(generation, cache_implementation=cache, kv_cache_dtype=dtype))


GENERATION_REMEDIES: Final = (
    BF16_PARAMETERS,
    EXPANDABLE_SEGMENTS,
    INT8_WEIGHTS,
    remedy("int4 weights", partial(quantized, name="int4-weight")),
    remedy("fp8 KV cache", partial(_with_cache, cache="quantized", dtype="fp8")),
    remedy(
        "prefill in chunks",
        switched("generation", "prefill_chunk_size", "the prompt is read in chunks already", CHUNK),
    ),
    remedy("last logits only", edited(keep_the_last_logits)),
    remedy("static cache", partial(_with_cache, cache="static")),
    remedy("offloaded cache", partial(_with_cache, cache="offloaded")),
    remedy("2 GPUs", edited(Share(2))),
)
"""Remedies for a generation, in the order in which they are tried."""


def fewer_sequences(parts: int) -> VariantRemedy:
    """Generate for one of `parts` parts of the batch at a time."""
    title = f"{parts} generations in turn, each with part of the sequences"
    cost = "slower: each step generates tokens for fewer sequences"
    return remedy(f"batch ÷{parts}", partial(replace, split=parts), Facts("speed", "parts", title, cost))


def on_larger_gpu(budget: Budget) -> VariantRemedy:
    """Generate on the GPU of `budget`."""
    card = budget.card
    title = f"the smallest card on which it fits, of {format_bytes(card.bytes)}"
    apply = partial(replace, card=card, capacity=budget.allocator)
    return remedy(card.name, apply, Facts("hardware", "cards", title, "another card"))


# -- trials ------------------------------------------------------------------------------------------------------------


def remedies_of(variant: RunVariant) -> tuple[VariantRemedy, ...]:
    return GENERATION_REMEDIES if variant.generation else step_remedies(variant.parallel)


@dataclass(eq=False)
class RemedyWork:
    """The work of finding remedies for variants of `runs`, which several processes share.

    A variant must fit into its `capacity`.
    """

    runs: RunCache

    def _remedies(self, base: RunVariant) -> tuple[VariantRemedy, ...]:
        return (*(PIPELINE_REMEDIES if autoencoders(self.runs.model) else ()), *remedies_of(base))

    def remedy_alone(self, base: RunVariant, size: int, name: str) -> tuple[RemedyRow, NewRuns]:
        """Measure the remedy `name` at one size; return its row and the runs that this took."""
        before = self.runs.new_runs()
        chosen = next(remedy for remedy in self._remedies(base) if remedy.name == name)
        return self._remedy_search(base, size).alone(chosen), self.runs.new_runs(before)

    def remedied(self, workers: Workers, base: RunVariant, size: int, budget: Budget, *, splits: bool) -> Remedied:
        """Try all remedies at one size; `workers` serve this object, or one with its methods. `splits`: the size is a
        batch that can be split.
        """
        runs, rows, remedies = self.runs, [], self._remedies(base)
        for row, new_runs in workers.answers([("remedy_alone", base, size, tried.name) for tried in remedies]):
            rows.append(row)
            runs.adopt(new_runs)
        search, ladders = self._remedy_search(base, size), [Ladder(more_gpus(base.parallel), until="no gain")]
        if runs.generates and not search.need.fits:
            larger = (one for one in larger_budgets(budget, runs.stack) if one.allocator >= search.need.bytes)
            ladders.insert(0, Ladder(map(on_larger_gpu, larger), until="enough"))
        if any(row.name == "activation checkpointing" and row.outcome == "fits" for row in rows):
            blocks = len(repeated_blocks(runs.model))
            ladders += [Ladder(few(blocks), until="searched") for few in (fewer_checkpoints, least_recomputation)]
        if base.training and base.scenario.compile:
            ladders.append(Ladder(memory_budgets(), until="enough"))
        if splits and (base.training or base.generation) and size > 1:
            in_parts = fewer_sequences if base.generation else accumulation
            ladders.insert(0, Ladder(map(in_parts, numbers_of_parts(size)), until="last"))
        return try_remedies(
            search, remedies, ladders, scenario=base.scenario.name, gpu=budget.name, size=size, rows=rows
        )

    def _remedy_search(self, base: RunVariant, size: int) -> RemedySearch[RunVariant]:
        eager = base
        if base.scenario.compile:  # which does not tell of all products whose they are
            eager = replace(base, scenario=scenario_named(base.scenario.name.partition(COMPILED)[0]))

        def measure(variant: RunVariant) -> Need:
            run = self.runs.run(variant, size)
            recomputing = next((edit for edit in variant.edits if isinstance(edit, Recompute)), None)
            return Need(
                run.needs(variant.capacity),
                variant.capacity,
                run.trace.host.needs if variant.training else 0,
                recomputing.share(self.runs.model, self.runs.run(eager, size).trace.layers) if recomputing else None,
            )

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
