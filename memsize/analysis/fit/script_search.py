"""Find the largest value of a script's own argument that fits: run the script with one value after another.

Each run has a GPU of unlimited memory and, where the platform forks, a process of its own, in which installed packages
are imported already. The values are searched as in any fit (`memsize.analysis.fit.search`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from memsize.analysis.findings.fit import RULES, FitEvidence, answer_in_words
from memsize.analysis.findings.unfinished_runs import interrupted
from memsize.analysis.fit.footprint import Footprint
from memsize.analysis.fit.results import row_of_search, with_peak
from memsize.analysis.fit.search import LIMIT, MOST_RUNS, Search
from memsize.analysis.program import run_program
from memsize.analysis.ranks import import_packages
from memsize.device.allocator_config import AllocatorConfig, config_of
from memsize.errors import ForwardError, InputError, first_line
from memsize.processes.ctrl_c import found_kept
from memsize.processes.workers import Workers, can_fork, silent
from memsize.records.finding import Finding
from memsize.records.fit import Budget, Fit, FitRow, FitRun
from memsize.records.trace import Trace
from memsize.spec.vary import VariedScript
from memsize.virtual.guards.child_processes import Settings
from memsize.virtual.saved_weights import Files

_BEYOND: Final = 4
"""A value is at most this many times the one that a straight line through two runs predicts: the script really makes
the data for it.
"""


class ScriptRun(NamedTuple):
    """The trace of a script, its allocator settings, how it failed (empty: it did not), and the files that it made."""

    trace: Trace
    config: AllocatorConfig
    failure: str
    new_files: set[str]


@dataclass(frozen=True)
class UnboundedScript:
    """A script (or a module) that runs on a GPU of unlimited memory, for as many steps as `settings` has.

    A run may write the `files` again that one before it made.
    """

    path: str
    settings: Settings
    module: bool = False
    files: Files = field(default_factory=Files)

    def run(self, arguments: Sequence[str], progress: Callable[[str], None]) -> ScriptRun:
        """Run it with `arguments`, where the platform forks in a process of its own, whose output nobody sees."""
        if not can_fork():
            return self.trace(arguments, quiet=False)
        with Workers(self, progress) as workers:
            answer: ScriptRun = workers.apart(("trace", arguments, True))
        self.files.new |= answer.new_files
        return answer

    def trace(self, arguments: Sequence[str], quiet: bool) -> ScriptRun:
        """Run it in this process; `quiet` hides what it prints."""
        settings = self.settings._replace(bounded=False)
        with silent() if quiet else nullcontext():
            program, error = run_program(self.path, arguments, settings, module=self.module, files=self.files)
        if isinstance(error, KeyboardInterrupt):  # which reaches the script where it runs in this process
            raise error
        failure = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        return ScriptRun(program.trace, config_of(program), failure, self.files.new)


@dataclass(eq=False)
class ScriptRuns:
    """The runs of a script on one GPU with different values of an argument, `steps` training steps each, and their
    `search`. Once the script ran, `budget` has the share of the GPU's memory that it lets PyTorch use.
    """

    script: VariedScript
    budget: Budget
    config: AllocatorConfig | None
    steps: int
    progress: Callable[[str], None]
    files: Files
    footprints: dict[int, Footprint] = field(default_factory=dict)
    search: Search | None = None

    def run(self, value: int) -> Footprint:
        """Run the script with one value, once; raises `ForwardError` where the script fails with it."""
        if value not in self.footprints:
            self.progress(f"running {self.script.command(value)}")
            script = UnboundedScript(
                self.script.path, Settings(self.budget.card, self.config, self.steps), files=self.files
            )
            run = script.run(self.script.valued(value), self.progress)
            if run.failure:
                raise ForwardError(run.failure, run.trace)
            self.footprints[value] = Footprint(value, run.trace, run.config)
        return self.footprints[value]

    def start(self) -> Search:
        """Run the value of the command and twice that: they show about where to look, and the script's share."""
        script = self.script
        first, second = self.run(script.value), self.run(2 * script.value)
        if tuple(first.flow) == tuple(second.flow):
            sizes = f"{script.name} {first.size} and {second.size}"
            raise InputError(f"{sizes} take the same memory of the GPU: there is nothing to vary")
        self.budget = budget = replace(self.budget, fraction=first.config.memory_fraction)
        slope = max((second.requested - first.requested) // (second.size - first.size), 1)
        about = max((budget.allocator - first.requested) // slope + first.size, second.size)
        most = min(_BEYOND * about, LIMIT)
        self.search = Search(self.run, budget.allocator, runs={**self.footprints}, refused={}, most=most)
        return self.search

    def row(self, search: Search) -> FitRow:
        """The row of the values that were run."""
        budget = self.budget
        row = FitRow("as-given", "as the script runs", gpu=budget.name, budget=budget.allocator, status="unavailable")
        return row_of_search(search, row, linear=True)


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
    # The script may ask for the card's size: each card has runs of its own.
    files = Files()
    runs = [ScriptRuns(script, budget, config, steps, progress, files) for budget in budgets]
    rows: list[FitRow] = []

    def so_far() -> Fit | None:
        started = [of_budget.row(of_budget.search) for of_budget in runs[len(rows) :] if of_budget.search]
        partial = [row for row in started if row.size]
        missing = [f"the rest of {row.gpu}" for row in partial]
        missing += [of_budget.budget.name for of_budget in runs[len(rows) + len(partial) :]]
        return _answer(runs, [*rows, *partial], missing) if rows or partial else None

    with found_kept(so_far):
        for of_budget in runs:
            search = of_budget.start()
            search.run(None, MOST_RUNS - 2)
            rows.append(of_budget.row(search))
            tell(answer_in_words(rows[-1], script.name, several=len(budgets) > 1))
    return _answer(runs, rows)


def _answer(runs: Sequence[ScriptRuns], rows: Sequence[FitRow], missing: Sequence[str] = ()) -> Fit:
    script, budgets = runs[0].script, tuple(of_budget.budget for of_budget in runs)
    footprints = {
        FitRun("as-given", size, of_budget.budget.name): run
        for of_budget in runs
        for size, run in of_budget.footprints.items()
    }
    fit = Fit(
        model=script.command(),
        inputs=(),
        vary=script.name,
        budgets=budgets,
        fit_rows=tuple(rows),
        optimizer="the script's optimizer",
        findings=(*interrupted(missing), *RULES.findings(FitEvidence(tuple(rows), budgets, script.name))),
        notes=tuple(dict.fromkeys(note for run in footprints.values() for note in run.trace.notes)),
        traces={run: footprint.trace for run, footprint in footprints.items()},
        runs=len(footprints),
        missing=tuple(missing),
    )
    return with_peak(fit, next(iter(runs[0].footprints.values())).config)
