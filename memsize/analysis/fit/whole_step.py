"""The memory that the steps of a script need after it ran out, and the batch that fits: the script is run again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from memsize.analysis.findings.program import BATCH
from memsize.analysis.fit.footprint import Footprint
from memsize.analysis.fit.script_search import UnboundedScript
from memsize.analysis.fit.search import Search
from memsize.analysis.program import findings_of
from memsize.device.budget import budget_of
from memsize.errors import ForwardError, InputError
from memsize.records.aggregates import split_phase
from memsize.records.program import FittingBatch, ProgramRun, WholeSteps
from memsize.spec.vary import VariedScript

_PATIENCE: Final = 30
"""Seconds that a script may have run for it to be run again."""
_MOST_RUNS: Final = 4
"""Runs that the search for a batch may take."""
_SHARES: Final = (1, 0.95, 0.9)
"""The parts of the memory for which a batch is searched, until one also fits a GPU with more."""
_BATCH_OPTION: Final = re.compile(r"--?(?!.*(eval|val|test))([\w.-]*batch([_-]?size)?|bs|b)")
"""An option for the batch of training."""


def with_whole_steps(
    run: ProgramRun,
    script: UnboundedScript,
    arguments: Sequence[str],
    defaults: Mapping[str, int],
    started: float,
    progress: Callable[[str], None],
) -> ProgramRun:
    """Return `run`, which ran out of memory, with what its steps need on a GPU that has enough.

    `defaults` are the script's own values of options that are not among its `arguments`. It began at `started`
    (`time.monotonic`): one that takes long, or fails for another reason, is left alone.
    """

    def measure(command: Sequence[str], size: int) -> Footprint:
        if time.monotonic() - started > _PATIENCE:
            raise ForwardError("the script takes long", run.trace)
        progress(f"running {' '.join((script.path, *command))} with enough memory; Ctrl-C skips this")
        rerun = script.run(command, progress)
        if rerun.failure:
            raise ForwardError(rerun.failure, rerun.trace)
        return Footprint(size, rerun.trace, rerun.config)

    try:
        varied = _varied(script, arguments, defaults)
        footprint = measure(arguments, varied.value if varied else 1)
        phases = map(split_phase, footprint.trace.phases)
        steps = max((step or 0 for phase, step in phases if phase == "optimizer"), default=0)
        whole = WholeSteps(steps, footprint.needs(run.capacity))
        if varied is not None and varied.value > 1:
            # A run refuses what can't fit beside the least that CUDA takes; what fits does so beside the most.
            capacity = min(run.capacity, budget_of(run.card, script.settings.stack).allocator)
            whole = whole._replace(batch=_batch(capacity, run.capacity, varied, footprint, measure))
    except (ForwardError, InputError, KeyboardInterrupt):
        return run
    run = replace(run, whole=whole)
    return replace(run, findings=findings_of(run))


def _varied(script: UnboundedScript, arguments: Sequence[str], defaults: Mapping[str, int]) -> VariedScript | None:
    """The script with its argument for the batch, if it has one; one that is left at its default is written out."""
    command = tuple(arguments)
    match = BATCH.search(" ".join((script.path, *command)))
    if match:
        return VariedScript.of(script.path, command, match[1])
    name = next(filter(_BATCH_OPTION.fullmatch, defaults), None)
    return VariedScript.of(script.path, (*command, name, str(defaults[name])), name) if name else None


def _batch(
    capacity: int,
    roomy: int,
    script: VariedScript,
    footprint: Footprint,
    measure: Callable[[Sequence[str], int], Footprint],
) -> FittingBatch | None:
    """The largest batch below the script's own that a few runs show to fit `capacity`, and `roomy`, which its own did
    not.

    What fits less memory may not fit more, because cached blocks are given back at another moment. Then a batch that
    leaves some room is named.
    """
    runs = {script.value: footprint}
    for share in _SHARES:
        search = Search(
            lambda size: measure(script.valued(size), size),
            int(capacity * share),
            runs=runs,
            refused={},
            most=script.value - 1,
        )
        search.run(None, _MOST_RUNS)
        size = search.size
        if 0 < size < script.value and runs[size].fits(roomy):
            return FittingBatch(script.name, size, share == 1 and (search.closed or search.endless))
    return None
