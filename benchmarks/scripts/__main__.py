"""`python -m benchmarks.scripts [NAME …]`: training scripts that others wrote, each run unchanged by memsize."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.scripts.recipe import Recipe
from benchmarks.scripts.recipes import RECIPES
from benchmarks.scripts.runner import Outcome, outcome
from benchmarks.scripts.table import page, summary
from benchmarks.zoo.operators import declare

SOURCES = "MEMSIZE_SCRIPTS"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.sources is None:
        parser.error(f"where are the repositories? Name their folder with --sources or {SOURCES}")
    wanted = [recipe for recipe in RECIPES if _wanted(recipe, chosen.names)]
    if not wanted:
        parser.error(f"no script of that name: choose from {', '.join(recipe.name for recipe in RECIPES)}")
    outcomes = _previous(chosen.results) if chosen.resume else {}
    declare()  # transformers imports torchvision for some of the data
    with tempfile.TemporaryDirectory() as temporary:
        scratch = chosen.scratch or Path(temporary)
        for recipe in wanted:
            if recipe.name not in outcomes:
                result = outcomes[recipe.name] = outcome(recipe, chosen.sources, scratch, chosen.seconds)
                print(f"{recipe.name}: {result.failure or 'ran'}", flush=True)
                _keep(chosen.results, outcomes)
    tried = [outcomes[recipe.name] for recipe in RECIPES if recipe.name in outcomes]
    print(summary(tried))
    if chosen.page is not None:
        chosen.page.write_text(page(tried), encoding="utf-8")
        print(f"Wrote {chosen.page}")


def _wanted(recipe: Recipe, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(recipe.name, pattern) for pattern in patterns)


def _previous(file: Path) -> dict[str, Outcome]:
    if not file.is_file():
        return {}
    previous = [Outcome.read(outcome) for outcome in json.loads(file.read_text(encoding="utf-8"))]
    return {outcome.name: outcome for outcome in previous}


def _keep(file: Path, outcomes: dict[str, Outcome]) -> None:
    file.write_text(json.dumps([outcome.as_dict for outcome in outcomes.values()], indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts", description=__doc__.partition(": ")[2])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which to run, such as 'examples/*' (default: all)")
    sources = os.environ.get(SOURCES)
    add("--sources", type=Path, default=sources and Path(sources), help=f"the repositories' folder (or {SOURCES})")
    add("--scratch", type=Path, help="where copies, data and outputs are left (default: nowhere)")
    add("--seconds", type=float, default=300, help="the most that one script may take (default: %(default)s)")
    add("--results", type=Path, default=Path("scripts.json"), help="the results file (default: %(default)s)")
    add("--resume", action="store_true", help="keep what the results file has and run what is missing")
    add("--page", type=Path, help="write the page with the table there")
    return parser


if __name__ == "__main__":
    main()
