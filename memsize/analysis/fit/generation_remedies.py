"""What would make a generation fit that does not: what a fit tries for its batch, each really run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from memsize.analysis.fit.generations import GenerationTrials
from memsize.analysis.fit.remedies import Tries
from memsize.analysis.fit.run_cache import RunVariant
from memsize.analysis.generation.generation_rows import GenerationRequest
from memsize.analysis.generation.generator import Generator
from memsize.analysis.generation.prompts import Prompts
from memsize.analysis.runner import Runner
from memsize.device.budget import budget_of
from memsize.processes.workers import Workers
from memsize.records.fit import Remedied
from memsize.records.generation import GenerationRow
from memsize.spec.vary import Vary


def generation_remedies(
    runner: Runner,
    prompts: Prompts,
    request: GenerationRequest,
    say: Callable[[str], None],
    rows: Sequence[GenerationRow],
    known: Collection[Generator],
) -> Remedied | None:
    """Remedies for the first row that does not fit, of the first scenario that ran; None where all of them do, and for
    a loop of one's own, which knows no other cache and no chunks, and where tokens are proposed: each try would take as
    long as the row itself. What the `known` generators have traced is not traced again.
    """
    ran = [row for row in rows if row.estimate is not None]
    short = next((row for row in ran if row.scenario == ran[0].scenario and not row.fits), None)
    if short is None or request.loop or request.generations[0].draft:
        return None
    generation = next(each for each in request.generations if each.prompt == short.prompt)
    scenario = next(each for each in request.scenarios if each.name == short.scenario)
    batch, config, stack = short.batch, request.config, runner.stack
    trials = GenerationTrials(runner.name, runner.model, prompts, generation, batch, Vary(), say, stack, known)
    budget = budget_of(runner.gpu, stack, config.memory_fraction)
    base = RunVariant(scenario, runner.gpu, config=config, generation=generation)
    trials.run(base, batch)  # once, for all workers
    tries = Tries(trials)
    with Workers(tries, say) as workers:
        trials.say = workers.say
        for each in known:
            each.say = workers.say
        return tries.remedied(workers, base, batch, budget, parts=True)
