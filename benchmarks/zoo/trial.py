"""One case through memsize, as a user would send it there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import memsize
from benchmarks.zoo.case import BATCH, Case
from benchmarks.zoo.inputs import inputs
from benchmarks.zoo.sources import source
from memsize.errors import MemsizeError
from memsize.processes.spread import TimeLimitError, is_late

Part = tuple[str, Any]
STEPS = 1
"""Training steps: all of one runs what all of several do."""
_LONGEST = 300


def parts(case: Case) -> Iterator[Part]:
    """The parts of an `Outcome` as they become known: the fields of an `Attempt` for each trace, and the counts."""
    ways: tuple[tuple[str, dict[str, Any]], ...] = (
        ("inference", {"optimizer": None, "mode": "eval"}),
        ("training", {"optimizer": "adamw", "mode": "train", "steps": STEPS}),
    )
    library, ours = source(case.library), None
    failed, arguments = False, inputs(case)
    for way, options in ways:
        attempt, count = _attempt(case, options | {"input_data": arguments})
        failed = failed or bool(attempt["reason"])
        ours = count if ours is None else ours
        yield way, attempt
    yield "ours", ours
    theirs, reason = _attempted(lambda: library.parameters(case))
    yield "theirs", theirs
    yield "uncounted", reason
    if failed:
        refused, unknown = _attempted(lambda: library.refusal(case))
        yield "refused", _one_line(refused or "") if not unknown else ""


def _attempt(case: Case, options: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """One trace and the parameters that memsize counts in it."""
    start, options = time.process_time(), {"batch_size": BATCH, "scenario": "fp32", **options}
    trace, reason = _attempted(lambda: memsize.trace(case.target, arguments=case.arguments, **options))
    peak, taken = trace and trace.peak.allocated, time.process_time() - start
    count = trace and sum(layer.parameters for layer in trace.trace.layers)
    return {"peak": peak, "reason": reason, "seconds": round(taken, 2)}, count


def _attempted(call: Callable[[], Any]) -> tuple[Any, str]:
    """What `call` returns and why it returns nothing; what is no error of memsize's own is named by its type."""
    try:
        return call(), ""
    except Exception as error:
        if is_late(error):
            raise TimeLimitError from error
        own = isinstance(error, MemsizeError)
        return None, _one_line(str(error) if own else f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
