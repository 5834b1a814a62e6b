"""Runs cases in processes: one that crashes, hangs or takes too much memory ends with its reason, and not the run."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.zoo.case import Attempt, Case, Outcome
from benchmarks.zoo.operators import declare
from memsize.errors import in_one_line
from memsize.processes.spread import Died, TimeLimitError, spread, time_limited


@dataclass(frozen=True, slots=True)
class Limits:
    """What one case may take: seconds of time, and bytes of memory (0: no limit)."""

    seconds: float = 120
    memory: int = 4 * 2**30


def outcomes(cases: Iterable[Case], workers: int, limits: Limits) -> Iterator[Outcome]:
    """The outcome of each case as it comes, in no particular order; with one worker in this process."""
    for case, result in spread(partial(outcome, limits=limits), cases, workers):
        yield _outcome(case, {}, result.reason) if isinstance(result, Died) else result


def outcome(case: Case, limits: Limits) -> Outcome:
    """What came of a case, in this process; of parts that there was no time for, that."""
    from benchmarks.zoo.trial import parts

    known_parts: dict[str, Any] = {}
    declare()  # an import that the limits cut off could not be begun again: its operators stay registered
    try:
        # What libraries print is not ours: it goes where errors go.
        with contextlib.redirect_stdout(sys.stderr), _memory_limited(limits.memory), time_limited(limits.seconds):
            for name, part in parts(case):
                known_parts[name] = part
    except TimeLimitError:
        return _outcome(case, known_parts, f"took more than {limits.seconds:g} s")
    except Exception as error:  # with no memory left, anything may fail
        return _outcome(case, known_parts, in_one_line(error))
    return _outcome(case, known_parts, "")


@contextlib.contextmanager
def _memory_limited(most: int) -> Iterator[None]:
    """While open, this process may hold `most` bytes of data."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most or before, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _outcome(case: Case, parts: Mapping[str, Any], reason: str) -> Outcome:
    return Outcome(
        case,
        inference=_attempt(parts, "inference", reason),
        training=_attempt(parts, "training", reason),
        ours=parts.get("ours"),
        theirs=parts.get("theirs"),
        uncounted=parts.get("uncounted", reason),
        refused=parts.get("refused", ""),
    )


def _attempt(parts: Mapping[str, Any], way: str, reason: str) -> Attempt:
    return Attempt(**parts[way]) if way in parts else Attempt(reason=reason)
