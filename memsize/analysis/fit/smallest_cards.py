"""The smallest card on which a size fits, of all in the table: two or three runs, in place of one for each card."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from memsize.analysis.fit.fit import FitRequest, RowKey, without_equal_scenarios
from memsize.analysis.fit.run_cache import RunCache
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Budget
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.scenario import Scenario


def on_smallest(runs: RunCache, request: FitRequest) -> FitRequest:
    """Return `request` about the smallest of its budgets for each scenario, and for each number of GPUs.

    Without a budget that is large enough it is about the largest.
    """
    request = without_equal_scenarios(runs, request)
    ways: dict[str, list[Budget]] = {}
    for budget in sorted(request.budgets, key=lambda budget: budget.allocator):
        ways.setdefault(budget.parallel, []).append(budget)
    cells: set[RowKey] = set()
    starts = {way: next((n for n, b in enumerate(of) if b.card.name == DEFAULT_GPU), 0) for way, of in ways.items()}
    for scenario in request.scenarios:
        for way, budgets in ways.items():
            with suppress(ScenarioError, ForwardError, InputError):  # its row says why
                starts[way] = _smallest(runs, request, scenario, budgets, starts[way])
            cells.add((scenario.name, budgets[starts[way]].name))
    names = {name for _, name in cells}
    chosen = tuple(budget for of in ways.values() for budget in of if budget.name in names)
    return replace(request, budgets=chosen, cells=frozenset(cells))


def _smallest(runs: RunCache, request: FitRequest, scenario: Scenario, budgets: Sequence[Budget], start: int) -> int:
    """Return the position of the smallest budget that is enough; the last one where none is.

    What a run needs hardly depends on the card. So a run on one card says on which it would fit; if that one runs other
    kernels, it is run there too, until the answer stays.
    """
    assert request.size is not None
    allocators = [budget.allocator for budget in budgets]
    position, least = start, 0
    while True:
        needed = runs.run(request.variant(scenario, budgets[position]), request.size).needs()
        # Never back to a card that its own run found too small: two kinds of kernels could go on forever.
        least = least if needed <= allocators[position] else position + 1
        enough = min(max(bisect_left(allocators, needed), least), len(budgets) - 1)
        if enough == position or budgets[enough].runs_as(budgets[position]):
            return enough
        position = enough
