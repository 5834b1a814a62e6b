"""`python -m benchmarks.zoo.depth TARGET …`: models at their real depth, extended from short ones and run whole.

A forward alone proves that short runs extend. The two have to be the same in every record of their traces. Library
models are named as for memsize: ``timm:vit_*``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import NamedTuple

from benchmarks.zoo import operators
from benchmarks.zoo.case import BATCH, Case
from benchmarks.zoo.inputs import inputs
from benchmarks.zoo.sources import source
from memsize.analysis.runner import Runner
from memsize.analysis.short_runs import different_part
from memsize.api.opened import opened
from memsize.errors import MemsizeError
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import SCENARIOS
from memsize.spec.training import Training
from memsize.workloads.training import TrainingSteps

_STEPS = TrainingSteps(Training("adamw"))
_MANY = 10
"""Runs after which short ones are worth their time for any model whose blocks repeat."""


class Comparison(NamedTuple):
    """A training step of one model, made both ways. `outcome` is equal, different, whole (both times), or failed;
    `detail` has the reason.
    """

    target: str
    outcome: str
    detail: str = ""


def compared(case: Case) -> Comparison:
    """Run a training step of the case in both ways."""
    try:
        with opened(ModelRequest.of(case.target, input_data=inputs(case), batch_size=BATCH)) as model:
            runner = Runner(*model.run)
            if runner.short_runs.blocks is None:
                return Comparison(case.target, "whole", "nothing repeats")
            assert _STEPS.proof is not None
            runner.short_runs.whole_runs[_STEPS.proof.kind] = _MANY
            usual = runner.run(_STEPS, SCENARIOS["as-given"])
            if not usual.extended_from:
                reasons = ("the model counts its calls",) if runner.is_counting else runner.short_runs.reasons
                return Comparison(case.target, "whole", "; ".join(reasons))
            whole = Runner(*model.run, whole=True).run(_STEPS, SCENARIOS["as-given"])
    except MemsizeError as error:
        return Comparison(case.target, "failed", str(error).partition("\n")[0])
    part = different_part(replace(usual, notes=whole.notes), whole)
    return Comparison(case.target, "different" if part else "equal", part or f"{len(whole.events):,} events")


def _cases(targets: Sequence[str]) -> Iterator[Case]:
    for target in targets:
        library, _, pattern = target.partition(":")
        yield from (replace(case, arguments={}) for case in source(library).cases() if fnmatch(case.name, pattern))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the models and print a line for each, and how many came out in which way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.depth")
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="models, such as timm:vit_base* or hf:llama")
    operators.declare()
    outcomes, reasons = Counter[str](), Counter[str]()
    for case in _cases(parser.parse_args(arguments).targets):
        comparison = compared(case)
        outcomes[comparison.outcome] += 1
        reasons[comparison.detail] += comparison.outcome == "whole"
        print(*filter(None, comparison), sep="  ", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    print(*(f"  {count} whole: {reason}" for reason, count in reasons.most_common() if count), sep="\n")


if __name__ == "__main__":
    main()
