"""Find the largest value of a script's own argument that fits: run the script with one value after another.

Each run has a GPU of unlimited memory and, where the platform forks, a process of its own, in which installed packages
are imported already. The values are searched as in any fit (`memsize.analysis.fit.search`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from memsize.analysis.findings.fit import RULES, FitEvidence, answer_in_words
from memsize.analysis.findings.unfinished_runs import interrupted
from memsize.analysis.fit.footprint import Footprint
from memsize.analysis.fit.results import row_of_search
from memsize.analysis.fit.search import LIMIT, MOST_RUNS, Search
from memsize.analysis.program import run_program
from memsize.analysis.ranks import import_packages
from memsize.device.allocator_config import AllocatorConfig, config_of
from memsize.errors import ForwardError, InputError, first_line
from memsize.processes.ctrl_c import found_kept
from memsize.processes.workers import Workers, can_fork, silent
from memsize.records.finding import Finding
from memsize.records.fit import Budget, Fit, FitRow, FitRun
from memsize.records.gpu import Card
from memsize.records.trace import Trace
from memsize.spec.vary import VariedScript

ScriptRun: TypeAlias = tuple[Trace, AllocatorConfig, str]
"""The trace of a script, its allocator settings, and how it failed (empty: it did not)."""
_BEYOND: Final = 4
"""A value is at most this many times the one that a straight line through two runs predicts: the script really makes
the data for it.
"""


class ScriptRuns:
    """The runs of a script with different values of one argument, `steps` training steps each."""

    def __init__(
        self,
        script: VariedScript,
        card: Card,
        config: AllocatorConfig | None,
        steps: int,
        progress: Callable[[str], None],
    ) -> None:
        self.script = script
        self.footprints: dict[int, Footprint] = {}
        self._card = card
        self._config = config
        self._steps = steps
        self._progress = progress

    def run(self, value: int) -> Footprint:
        """Run the script with one value, once; raises `ForwardError` where the script fails with it."""
        if value not in self.footprints:
            self._progress(f"running {self.script.command(value)}")
            if can_fork():
                with Workers(self, self._progress) as workers:
                    trace, config, failure = workers.apart(("silent_trace", value))
            else:
                trace, config, failure = self.trace(value)
            if failure:
                raise ForwardError(failure, trace)
            self.footprints[value] = Footprint(value, trace, config)
        return self.footprints[value]

    def silent_trace(self, value: int) -> ScriptRun:
        """Call `trace` without showing what the script prints."""
        with silent():
            return self.trace(value)

    def trace(self, value: int) -> ScriptRun:
        """Run the script with a value."""
        arguments = self.script.valued(value)
        program, error = run_program(
            self.script.path, arguments, self._card, self._config, steps=self._steps, module=False, bounded=False
        )
        if isinstance(error, KeyboardInterrupt):  # which reaches the script where it runs in this process
            raise error
        failure = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        return program.trace, config_of(program), failure


def fit_script(
    script: VariedScript,
    budgets: Sequence[Budget],
    config: AllocatorConfig | None,
    *,
    steps: int = 3,
    progress: Callable[[str], None] = lambda _: None,
    tell: Callable[[Finding], None] = lambda _: None,
) -> Fit:
    """Find the largest value of the script's argument that fits each budget.

    The allocator has the settings of `config`; None: those of the environment in each run. `tell` is called with a
    finding for each row.

    Raises `ForwardError` where the script fails with the value in its command, and `InputError` where that value has no
    effect on the memory of the GPU.
    """
    import_packages(script.path, budgets[0].card, config)
    runs: list[ScriptRuns] = []
    in_use: list[Budget] = []
    rows: list[FitRow] = []
    searches: list[Search] = []

    def so_far() -> Fit | None:
        all_budgets = [*in_use, *budgets[len(in_use) :]]
        unfinished = [_row_of(search, all_budgets[len(rows)]) for search in searches[len(rows) :]]
        partial = [row for row in unfinished if row.size]
        missing = [f"the rest of {row.gpu}" for row in partial]
        missing += [budget.name for budget in all_budgets[len(rows) + len(partial) :]]
        return _answer(runs, [*rows, *partial], all_budgets, missing) if rows or partial else None

    with found_kept(so_far):
        for budget in budgets:
            # The script may ask for the card's size: each card has runs of its own.
            runs.append(ScriptRuns(script, budget.card, config, steps, progress))
            search, budget_in_use = _search(runs[-1], budget)
            in_use.append(budget_in_use)
            searches.append(search)
            search.run(None, MOST_RUNS - 2)
            rows.append(_row_of(search, budget_in_use))
            tell(answer_in_words(rows[-1], script.name, several=len(budgets) > 1))
    return _answer(runs, rows, in_use)


def _search(runs: ScriptRuns, budget: Budget) -> tuple[Search, Budget]:
    """Run the value of the command and twice that: they show about where to look, and which share of the GPU's memory
    the script lets PyTorch use.
    """
    script = runs.script
    first, second = runs.run(script.value), runs.run(2 * script.value)
    if tuple(first.flow) == tuple(second.flow):
        raise InputError(
            f"{script.name} {first.size} and {second.size} take the same memory of the GPU: there is nothing to vary"
        )
    budget = replace(budget, fraction=first.config.memory_fraction)
    slope = max((second.requested - first.requested) // (second.size - first.size), 1)
    about = max((budget.allocator - first.requested) // slope + first.size, second.size)
    most = min(_BEYOND * about, LIMIT)
    return Search(runs.run, budget.allocator, runs={**runs.footprints}, refused={}, most=most), budget


def _answer(
    runs: Sequence[ScriptRuns], rows: Sequence[FitRow], budgets: Sequence[Budget], missing: Sequence[str] = ()
) -> Fit:
    script = runs[0].script
    footprints = {
        FitRun("as-given", size, budget.name): run
        for of_budget, budget in zip(runs, budgets, strict=False)
        for size, run in of_budget.footprints.items()
    }
    return Fit(
        model=script.command(),
        inputs=(),
        vary=script.name,
        budgets=tuple(budgets),
        fit_rows=tuple(rows),
        optimizer="the script's optimizer",
        findings=(
            *interrupted(missing),
            *RULES.findings(FitEvidence(tuple(rows), tuple(budgets), script.name, None, ())),
        ),
        notes=tuple(dict.fromkeys(note for run in footprints.values() for note in run.trace.notes)),
        traces={run: footprint.trace for run, footprint in footprints.items()},
        runs=len(footprints),
        missing=tuple(missing),
    )


def _row_of(search: Search, budget: Budget) -> FitRow:
    row = FitRow("as-given", "as the script runs", gpu=budget.name, budget=budget.allocator, status="unavailable")
    return row_of_search(search, row, linear=True)
