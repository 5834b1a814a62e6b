"""What the scripts showed, as a line for the terminal and as a page."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

from tabulate import tabulate

from benchmarks.scripts.runner import Outcome
from memsize.units import format_bytes

_TITLE = """# Scripts that run

`memsize run` on training scripts that others wrote, unchanged, with synthetic data, on a machine without a GPU. Each is
stopped after three optimizer steps.

    python -m benchmarks.scripts --sources FOLDER --page benchmarks/scripts/results.md

CPU time is that of the whole process with its workers: imports and data loading are most of it. FOLDER holds a clone of
each repository under its name. The recipes are in `benchmarks/scripts/recipes.py`.
"""


def summary(found: Sequence[Outcome]) -> str:
    """How many ran."""
    return f"{sum(not each.failure for each in found)} of {len(found)} scripts ran."


def page(found: Sequence[Outcome]) -> str:
    """The page with one row for each script."""
    where = f"With torch {version('torch')} and Python {platform.python_version()}: {summary(found)}"
    return "\n".join((_TITLE, f"{where}\n", _ran(found), _failed(found), _commands(found)))


def _ran(found: Sequence[Outcome]) -> str:
    titles = ("script", "steps", "reserved at the peak", "in", "CPU time")
    rows = [
        (
            each.name,
            each.steps,
            format_bytes(each.reserved),
            each.where,
            f"{each.seconds:.0f} s" if each.seconds else "not taken",
        )
        for each in found
        if not each.failure
    ]
    return f"{_table(titles, rows)}\n"


def _failed(found: Sequence[Outcome]) -> str:
    rows = [(each.name, each.failure) for each in found if each.failure]
    return f"## Did not run\n\n{_table(('script', 'why'), rows)}\n" if rows else ""


def _commands(found: Sequence[Outcome]) -> str:
    rows = [(each.name, each.repository, f"`{each.command}`", "; ".join(each.assumed)) for each in found]
    return f"## How they were started\n\n{_table(('script', 'repository', 'command', 'assumed'), rows)}\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate(rows, titles, "github", disable_numparse=True)
