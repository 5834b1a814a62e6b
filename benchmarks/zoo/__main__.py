"""`python -m benchmarks.zoo [LIBRARY …]`: every model of timm, torchvision and transformers (hf) through memsize."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from rich.progress import track

from benchmarks.zoo import results
from benchmarks.zoo.case import Case, Outcome
from benchmarks.zoo.runner import Limits, outcomes
from benchmarks.zoo.sources import FILES, source
from benchmarks.zoo.table import failures, page, summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.libraries) - set(FILES)
    if unknown:
        parser.error(f"no library {', '.join(sorted(unknown))}: choose from {', '.join(FILES)}")
    try:
        wanted = [case for library in chosen.libraries or FILES for case in _cases(library, chosen.only)]
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed")
    if not chosen.resume:
        chosen.results.unlink(missing_ok=True)
    limits = Limits(chosen.seconds, int(chosen.memory * 2**30))
    _tell(_run(wanted, chosen.results, chosen.workers, limits), chosen.page)


def _run(wanted: Sequence[Case], file: Path, workers: int, limits: Limits) -> list[Outcome]:
    """The outcomes of the cases that are wanted; those that the file does not have are run, and added to it."""
    by_target = {outcome.case.target: outcome for outcome in results.resumed(file)}
    left = [case for case in wanted if case.target not in by_target]
    while left:
        for outcome in track(outcomes(left, workers, limits), "models", total=len(left)):
            results.append(file, outcome)
            by_target[outcome.case.target] = outcome
        # What does not run with fewer layers is tried as it is.
        tried = [by_target[case.target] for case in left if not by_target[case.target].succeeded]
        left = [replace(outcome.case, arguments={}) for outcome in tried if outcome.case.arguments]
    return [by_target[case.target] for case in wanted]


def _cases(library: str, only: str) -> Iterable[Case]:
    return (case for case in source(library).cases() if fnmatch(case.name, only))


def _tell(outcomes: Sequence[Outcome], file: Path | None) -> None:
    print(summary(outcomes))
    for target, way, cause in failures(outcomes):
        print(f"{target} ({way}): {cause}")
    if file is not None:
        file.write_text(page(outcomes), encoding="utf-8")
        print(f"Wrote {file}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.partition(": ")[2])
    add = parser.add_argument
    add("libraries", nargs="*", metavar="LIBRARY", help=f"whose models: {', '.join(FILES)} (default: all)")
    add("--only", default="*", metavar="PATTERN", help="models whose name fits, such as 'resnet*'")
    add("--workers", type=int, default=2, help="processes side by side, 1: this one (default: %(default)s)")
    add("--seconds", type=float, default=120, help="the most that one model may take (default: %(default)s)")
    add("--memory", type=float, default=4, help="GiB that a worker may hold, 0: no limit (default: %(default)s)")
    add("--results", type=Path, default=Path("zoo.jsonl"), help="the results file (default: %(default)s)")
    add("--resume", action="store_true", help="keep what the results file has and run what is missing")
    add("--page", type=Path, help="write the page with the tables there")
    return parser


if __name__ == "__main__":
    main()
