"""`python -m benchmarks.zoo.depth TARGET …`: models at their real depth, extended from short ones and run whole.

The two have to be the same in every record of their traces. Library models are named as for memsize: ``timm:vit_*``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import NamedTuple

import memsize
from benchmarks.zoo import operators
from benchmarks.zoo.case import BATCH, Case
from benchmarks.zoo.inputs import inputs
from benchmarks.zoo.sources import source
from memsize.errors import MemsizeError
from memsize.records.trace import Trace


class Comparison(NamedTuple):
    """A training step of one model, made both ways. `outcome` is equal, different, whole (both times), or failed."""

    target: str
    outcome: str
    detail: str = ""


def compared(case: Case) -> Comparison:
    """Run a training step of the case in both ways."""
    options = {"input_data": inputs(case), "batch_size": BATCH, "optimizer": "adamw"}
    try:
        usual, whole = (memsize.trace(case.target, whole=of_all, **options).trace for of_all in (False, True))
    except MemsizeError as error:
        return Comparison(case.target, "failed", str(error).partition("\n")[0])
    if not usual.extended_from:
        return Comparison(case.target, "whole")
    outcome = "equal" if _records(usual) == _records(whole) else "different"
    return Comparison(case.target, outcome, f"{len(whole.events):,} events")


def _records(trace: Trace) -> Trace:
    """The trace without a note on how it was made."""
    return replace(trace, notes=(), extended_from=())


def _cases(targets: Sequence[str]) -> Iterator[Case]:
    for target in targets:
        library, _, pattern = target.partition(":")
        yield from (replace(case, arguments={}) for case in source(library).cases() if fnmatch(case.name, pattern))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the models and print a line for each, and how many came out in which way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.depth")
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="models, such as timm:vit_base* or hf:llama")
    operators.declare()
    outcomes: Counter[str] = Counter()
    for case in _cases(parser.parse_args(arguments).targets):
        comparison = compared(case)
        outcomes[comparison.outcome] += 1
        print(*filter(None, comparison), sep="  ", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))


if __name__ == "__main__":
    main()
