"""The largest value of a script's own argument that fits: the script is run with one value after another.

It runs on the GPU as if its memory never ended, each time in a process of its own where the platform forks, with what
it imports from installed packages imported before. The values that are looked at are those of any fit: a forecast from
the runs so far says where to look, and the answer and the next value are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from memsize.analysis.findings.fit import RULES, FitEvidence, answer_in_words
from memsize.analysis.findings.interruption import interrupted
from memsize.analysis.fit.footprint import Footprint
from memsize.analysis.fit.rows import growing_row
from memsize.analysis.fit.search import LIMIT, MOST_RUNS, Search
from memsize.analysis.program import run_program
from memsize.analysis.script_imports import import_packages
from memsize.device.allocator_config import AllocatorConfig, config_of
from memsize.errors import ForwardError, InputError, first_line
from memsize.processes.ctrl_c import found_kept
from memsize.processes.forks import can_fork
from memsize.processes.silence import silent
from memsize.processes.workers import Workers
from memsize.records.finding import Finding
from memsize.records.fit import Budget, Fit, FitRow, FitRun
from memsize.records.gpu import Card
from memsize.records.trace import Trace
from memsize.spec.script_command import VariedScript

Ran: TypeAlias = tuple[Trace, AllocatorConfig, str]
"""What a script did, with which settings of the allocator, and how it failed (empty: it did not)."""
_BEYOND: Final = 4
"""How many times as large as a straight line through two runs says a value is tried at most: the data that a script
makes for it are really made.
"""


class ScriptRuns:
    """The runs of a script with different values of one argument, `steps` training steps each."""

    def __init__(
        self, script: VariedScript, card: Card, config: AllocatorConfig | None, steps: int, say: Callable[[str], None]
    ) -> None:
        self.script = script
        self.made: dict[int, Footprint] = {}
        self._card = card
        self._config = config
        self._steps = steps
        self._say = say

    def run(self, value: int) -> Footprint:
        """The run with one value; raises `ForwardError` where the script fails with it."""
        if value not in self.made:
            self._say(f"running {self.script.command(value)}")
            trace, config, failure = self._apart(value)
            if failure:
                raise ForwardError(failure, trace)
            self.made[value] = Footprint(value, trace, config)
        return self.made[value]

    def _apart(self, value: int) -> Ran:
        if not can_fork():
            return self.trace(value)
        with Workers(self, self._say) as workers:
            found: Ran = workers.apart(("silent_trace", value))
            return found

    def silent_trace(self, value: int) -> Ran:
        """`trace` in a process of its own, where nobody reads what the script prints."""
        with silent():
            return self.trace(value)

    def trace(self, value: int) -> Ran:
        """What the script did with a value."""
        arguments = self.script.valued(value)
        found, error = run_program(
            self.script.path, arguments, self._card, self._config, steps=self._steps, module=False, bounded=False
        )
        failure = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        return found.trace, config_of(found), failure


def fit_script(
    script: VariedScript,
    budgets: Sequence[Budget],
    config: AllocatorConfig | None,
    *,
    steps: int = 3,
    say: Callable[[str], None] = lambda _: None,
    tell: Callable[[Finding], None] = lambda _: None,
) -> Fit:
    """The largest value of the script's argument that fits each budget. The allocator has the settings of `config`, or
    with None those that the environment has in each run. `tell` is called with what each row says.

    Raises `ForwardError` where the script fails with the value that it is given, and `InputError` where that value has
    no effect on the memory of the GPU.
    """
    import_packages(script.path, budgets[0].card, config)
    runs: list[ScriptRuns] = []
    asked: list[Budget] = []
    rows: list[FitRow] = []
    searches: list[Search] = []

    def so_far() -> Fit | None:
        return _so_far(runs, rows, searches, [*asked, *budgets[len(asked) :]])

    with found_kept(so_far):
        for budget in budgets:
            # The script may ask for the card's size: each card has runs of its own.
            runs.append(ScriptRuns(script, budget.card, config, steps, say))
            first, second = _first_runs(runs[-1])
            asked.append(replace(budget, fraction=first.config.memory_fraction))
            searches.append(_search(runs[-1], asked[-1], first, second))
            searches[-1].run(None, MOST_RUNS - 2)
            rows.append(_grown(searches[-1], asked[-1]))
            tell(answer_in_words(rows[-1], script.name, several=len(budgets) > 1))
    return _answer(runs, rows, asked)


def _first_runs(runs: ScriptRuns) -> tuple[Footprint, Footprint]:
    """The runs with the value that the script is given, and with twice that."""
    script = runs.script
    first, second = runs.run(script.value), runs.run(2 * script.value)
    if first.pairs == second.pairs:
        raise InputError(
            f"{script.name} {first.size} and {second.size} take the same memory of the GPU: there is nothing to vary"
        )
    return first, second


def _so_far(
    runs: Sequence[ScriptRuns], rows: Sequence[FitRow], searches: Sequence[Search], budgets: Sequence[Budget]
) -> Fit | None:
    """The rows that are complete, and what the search that had begun knows; None where that is nothing."""
    begun = [_grown(search, budgets[len(rows)]) for search in searches[len(rows) :]]
    known = [row for row in begun if row.size]
    missing = [f"the rest of {row.gpu}" for row in known]
    missing += [budget.name for budget in budgets[len(rows) + len(known) :]]
    return _answer(runs, [*rows, *known], budgets, missing) if rows or known else None


def _answer(
    runs: Sequence[ScriptRuns], rows: Sequence[FitRow], budgets: Sequence[Budget], missing: Sequence[str] = ()
) -> Fit:
    script = runs[0].script
    made = {
        FitRun("as-given", size, budget.name): run
        for own, budget in zip(runs, budgets, strict=False)
        for size, run in own.made.items()
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
        notes=tuple(dict.fromkeys(note for run in made.values() for note in run.trace.notes)),
        traces={run: footprint.trace for run, footprint in made.items()},
        runs=len(made),
        missing=tuple(missing),
    )


def _search(runs: ScriptRuns, budget: Budget, first: Footprint, second: Footprint) -> Search:
    """The search for one budget, after the two runs that say about where to look."""
    slope = max((second.requested - first.requested) // (second.size - first.size), 1)
    about = max((budget.allocator - first.requested) // slope + first.size, second.size)
    return Search(runs.run, budget.allocator, {**runs.made}, {}, min(_BEYOND * about, LIMIT))


def _grown(search: Search, budget: Budget) -> FitRow:
    row = FitRow("as-given", "as the script runs", budget.name, budget.allocator, "unavailable")
    return growing_row(search, row, linear=True)
