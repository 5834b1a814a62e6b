"""What the zoo run showed, as a summary for the terminal and as a page for the documentation."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from textwrap import shorten

from tabulate import tabulate

from benchmarks.zoo.case import BATCH, Case, Outcome
from benchmarks.zoo.sources import FILES, source

SLOWEST = 10
"""Rows of the table of the slowest models."""
_LONGEST_TARGET, _LONGEST_CAUSE = 80, 240
"""Characters of a table's cell on the page."""

_TITLES = ("library", "models", "inference", "training step", "parameter counts equal", "refused by the library")

_PAGE = """# Models that run

memsize runs every model that a library knows by name, without weights: one inference in evaluation mode and one
training step with AdamW, on a batch of {batch} of the inputs that memsize creates or, for the few types unlike any
other, those of `benchmarks/zoo/inputs.py`. It compares the number of parameters with that of the model that the
library's own constructor builds.

    {command}

With {versions}:

{summary}

{libraries}

torchvision's detectors run operators that are compiled for one build of torch. If they cannot be loaded, memsize
declares them, which is enough for a run without data.

## Failures

{failures}

## What the library itself refuses

Models that their own library cannot build or run with its defaults. They are not counted above.

{refused}

## The slowest models

CPU seconds of one call of `memsize.trace`, which builds the model, runs it, and simulates the GPU's allocator.

{slowest}
"""


def summary(outcomes: Sequence[Outcome], style: str = "simple") -> str:
    """One row per library: how many models, and how many of them succeeded in what."""
    rows = []
    for library in FILES:
        every = [outcome for outcome in outcomes if outcome.case.library == library]
        own = [outcome for outcome in every if not outcome.refused]
        if own:
            rows.append((_labelled(library), f"{len(own):,}", *_shares(own), f"{len(every) - len(own):,}"))
    return tabulate(rows, _TITLES, style, disable_numparse=True, colalign=("left", *["right"] * 5) if rows else None)


def _shares(own: Sequence[Outcome]) -> Iterator[str]:
    tests: tuple[Callable[[Outcome], bool], ...] = (
        lambda outcome: outcome.inference.succeeded,
        lambda outcome: outcome.training.succeeded,
        lambda outcome: outcome.counts_agree,
    )
    for test in tests:
        count = sum(map(test, own))
        yield f"{count:,} ({100 * count / len(own):.1f} %)"


def _labelled(library: str) -> str:
    return ", ".join(f"{name} {version(name)}" for name in source(library).DISTRIBUTIONS)


def failures(outcomes: Iterable[Outcome]) -> Iterator[tuple[str, str, str]]:
    """Target, what failed, and the cause, of everything that failed and that its library does not refuse itself."""
    for outcome in outcomes:
        if outcome.refused:
            continue
        inference, training = outcome.inference, outcome.training
        target = written(outcome.case)
        if inference.reason and inference.reason == training.reason:
            yield target, "inference, training", inference.reason
        else:
            for way, attempt in (("inference", inference), ("training", training)):
                if not attempt.succeeded:
                    yield target, way, attempt.reason
        if not outcome.counts_agree and not (inference.reason and training.reason):
            yield target, "parameter count", outcome.uncounted or f"{outcome.ours:,}, theirs is {outcome.theirs:,}"


def written(case: Case) -> str:
    """The target with its arguments, as a user types it."""
    arguments = "&".join(f"{name}={value}" for name, value in case.arguments.items())
    return f"{case.target}?{arguments}" if arguments else case.target


def _short(target: str) -> str:
    """A target without its arguments, where those would fill the page: whole configs of a model's parts."""
    return target if len(target) <= _LONGEST_TARGET else f"{target.partition('?')[0]}?…"


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of the documentation."""
    failed = [(f"`{_short(target)}`", way, _escaped(cause)) for target, way, cause in failures(outcomes)]
    refused = [(f"`{outcome.case.target}`", _escaped(outcome.refused)) for outcome in outcomes if outcome.refused]
    slowest = sorted(outcomes, key=lambda outcome: -outcome.training.seconds)[:SLOWEST]
    timed = [
        (f"`{_short(written(o.case))}`", f"{o.training.seconds:.1f}", f"{o.inference.seconds:.1f}") for o in slowest
    ]
    libraries = [library for library in FILES if any(o.case.library == library for o in outcomes)]
    subset = [] if libraries == list(FILES) else libraries
    return _PAGE.format(
        command=" ".join(("python -m benchmarks.zoo", *subset, "--page benchmarks/zoo/results.md")),
        batch=BATCH,
        versions=f"torch {version('torch')} and Python {platform.python_version()}",
        summary=summary(outcomes, "github"),
        libraries="\n".join(f"- {source(library).ABOUT}" for library in libraries),
        failures=_table(failed, ("model", "in", "cause")) if failed else "Nothing.",
        refused=_table(refused, ("model", "what its library says")) if refused else "None.",
        slowest=_table(timed, ("model", "training, s", "inference, s")),
    )


def _table(rows: Sequence[Sequence[str]], titles: Sequence[str]) -> str:
    return tabulate(rows, titles, "github", disable_numparse=True)


def _escaped(text: str) -> str:
    return shorten(text, _LONGEST_CAUSE, placeholder=" …").replace("|", r"\|").replace("<", "&lt;")
