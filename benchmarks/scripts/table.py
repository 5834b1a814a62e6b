"""What the scripts showed, as a line for the terminal and as a page."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from tabulate import tabulate

from benchmarks.scripts.runner import Outcome
from memsize.units import format_bytes

_TITLE = """# Scripts that run

`memsize run` on training scripts that others wrote, unchanged, with synthetic data, on a machine without a GPU. Each is
stopped after three optimizer steps.

    python -m benchmarks.scripts --sources FOLDER --page benchmarks/scripts/results.md

CPU time is that of the whole process with its workers: imports and data loading are most of it. FOLDER holds a clone of
each repository under its name. The recipes are in `benchmarks/scripts/recipes.py`. picotron, verl, RF-DETR and LeRobot
ran with transformers 4.57, open-r1 and sd-scripts with the releases that they ask for, scripts that tokenize as GPT-2
does with its two files in TIKTOKEN_CACHE_DIR, and rows of torch 2.13 beside the usual torchvision and torchaudio, which
do not load there. Ten scripts were [compared](../../docs/accuracy.md#scripts) with real steps.
"""


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many ran."""
    return f"{sum(not outcome.failure for outcome in outcomes)} of {len(outcomes)} scripts ran."


def page(outcomes: Sequence[Outcome]) -> str:
    """The page with one row for each script."""
    where = f"With Python {platform.python_version()}: {summary(outcomes)}"
    return "\n".join((_TITLE, f"{where}\n", _ran(outcomes), _failed(outcomes), _commands(outcomes)))


def _ran(outcomes: Sequence[Outcome]) -> str:
    titles = ("script", "steps", "reserved at the peak", "in", "CPU time", "torch")
    rows = [
        (
            outcome.name,
            outcome.steps,
            format_bytes(outcome.reserved),
            outcome.where,
            f"{outcome.seconds:.0f} s" if outcome.seconds else "not taken",
            outcome.torch,
        )
        for outcome in outcomes
        if not outcome.failure
    ]
    return f"{_table(titles, rows)}\n"


def _failed(outcomes: Sequence[Outcome]) -> str:
    rows = [(outcome.name, outcome.failure) for outcome in outcomes if outcome.failure]
    return f"## Did not run\n\n{_table(('script', 'why'), rows)}\n" if rows else ""


def _commands(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (outcome.name, outcome.repository, f"`{outcome.command}`", "; ".join(outcome.assumed)) for outcome in outcomes
    ]
    return f"## How they were started\n\n{_table(('script', 'repository', 'command', 'assumed'), rows)}\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate(rows, titles, "github", disable_numparse=True)
