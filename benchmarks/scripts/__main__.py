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

SOURCES = "MEMSIZE_SCRIPTS"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.sources is None:
        parser.error(f"where are the repositories? Name their folder with --sources or {SOURCES}")
    wanted = [recipe for recipe in RECIPES if _wanted(recipe, chosen.names)]
    if not wanted:
        parser.error(f"no script of that name: choose from {', '.join(recipe.name for recipe in RECIPES)}")
    known = _known(chosen.results) if chosen.resume else {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = chosen.scratch or Path(temporary)
        for recipe in wanted:
            if recipe.name not in known:
                found = known[recipe.name] = outcome(recipe, chosen.sources, scratch, chosen.seconds)
                print(f"{recipe.name}: {found.failure or 'ran'}", flush=True)
                _keep(chosen.results, known)
    tried = [known[recipe.name] for recipe in RECIPES if recipe.name in known]
    print(summary(tried))
    if chosen.page is not None:
        chosen.page.write_text(page(tried), encoding="utf-8")
        print(f"Wrote {chosen.page}")


def _wanted(recipe: Recipe, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(recipe.name, pattern) for pattern in patterns)


def _known(file: Path) -> dict[str, Outcome]:
    if not file.is_file():
        return {}
    found = [Outcome.read(each) for each in json.loads(file.read_text(encoding="utf-8"))]
    return {each.name: each for each in found}


def _keep(file: Path, known: dict[str, Outcome]) -> None:
    file.write_text(json.dumps([each.as_dict for each in known.values()], indent=1), encoding="utf-8")


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
